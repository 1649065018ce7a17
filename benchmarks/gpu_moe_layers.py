"""Parts of the GPU benchmark: whole MoE layers beside plain torch, and a grouped product beside loops (row G5).

A layer is the router, the permutation, the experts and the way back. The plain layer is written twice: as a loop over
experts (Mixtral's form), and with torch's grouped product over rows sorted by expert. The second form has fixed shapes,
so it compiles as a whole. A loop whose products are spread over streams is Transformer Engine's default for experts; it
is written out here, because the engine is not everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_moe import LOADS, Loop
from gpu_peers import DEVICE, Row, Side, beside
from gpu_plain import random_pair, stack_side
from gpu_profile import SAMPLES, Op, kernels_in, medians, profiled
from gpu_steps import ON_DEVICE
from harness import Comparison
from torch import Tensor, nn
from torch.autograd import Function

from labkit import plan
from labkit.config import ModelConfig, MoEConfig
from labkit.launch.transformer_engine import why_no_transformer_engine
from labkit.moe.experts import GroupedExperts
from labkit.moe.grouped_gemm import Segments
from labkit.moe.layer import MoELayer
from labkit.parallel import single_process_groups
from labkit.parallel.layers import NATIVE
from labkit.train.pretraining import layer_spec_with

SWIGLU: dict[str, Any] = {"layers": 1, "activation": "swiglu", "bias": False, "use_cpu_initialization": False}
LAYERS = {
    "8 experts, top 2, as Mixtral 8x7B's with half their width": (
        ModelConfig(hidden=4096, heads=32, seq_length=2048, **SWIGLU),
        MoEConfig(num_experts=8, top_k=2, ffn_hidden=7168, dispatcher="local"),
    ),
    "64 experts, top 6, as DeepSeekMoE 16B's": (
        ModelConfig(hidden=2048, heads=16, seq_length=2048, **SWIGLU),
        MoEConfig(num_experts=64, top_k=6, ffn_hidden=1408, dispatcher="local"),
    ),
}
TOLERANCE = 0.05
"""Of outputs and gradients in bf16: ours weights before the second projection, the loop behind it."""
STREAMS = 4
"""Of the loop on streams."""
Made = dict[str, Any]

# ---- the plain layer ----


class Stacked(nn.Module):
    """The weights of one projection of all experts."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())


class PlainMoE(nn.Module):
    """Top-k routing in float32, softmax over the chosen, SwiGLU experts; the weights of ours."""

    def __init__(self, ours: MoELayer, *, grouped: bool) -> None:
        super().__init__()
        self.router, self.top_k, self.grouped = Stacked(ours.router.weight), ours.moe.top_k, grouped
        self.fc1, self.fc2 = Stacked(ours.experts.fc1.weight), Stacked(ours.experts.fc2.weight)

    def forward(self, x_SBH: Tensor) -> Tensor:
        """[S, B, H] -> [S, B, H]."""
        x_TH = x_SBH.flatten(0, 1)
        chosen, expert_TK = F.linear(x_TH.float(), self.router.weight.float()).topk(self.top_k, dim=1)
        form = self.in_groups if self.grouped else self.in_a_loop
        return form(x_TH, chosen.softmax(dim=1), expert_TK).view_as(x_SBH)

    def in_a_loop(self, x_TH: Tensor, probs_TK: Tensor, expert_TK: Tensor) -> Tensor:
        """Expert after expert: find its tokens, compute, add."""
        y_TH = torch.zeros_like(x_TH)
        for index, (fc1, fc2) in enumerate(zip(self.fc1.weight.unbind(), self.fc2.weight.unbind(), strict=True)):
            tokens, places = torch.where(expert_TK == index)
            gate, up = F.linear(x_TH.index_select(0, tokens), fc1).chunk(2, dim=-1)
            rows = F.linear(F.silu(gate) * up, fc2) * probs_TK[tokens, places, None]
            y_TH.index_add_(0, tokens, rows.to(y_TH.dtype))
        return y_TH

    def in_groups(self, x_TH: Tensor, probs_TK: Tensor, expert_TK: Tensor) -> Tensor:
        """Rows sorted by expert, one grouped product a projection; nothing waits for the host."""
        experts = torch.arange(len(self.fc1.weight), device=x_TH.device)
        flat = expert_TK.flatten()
        order = flat.argsort(stable=True)
        ends = (flat[:, None] == experts).sum(0).cumsum(0).to(torch.int32)
        tokens = order // self.top_k
        rows = x_TH.index_select(0, tokens)
        gate, up = F.grouped_mm(rows, self.fc1.weight.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        inner = (F.silu(gate) * up * probs_TK.flatten()[order, None]).to(x_TH.dtype)
        rows = F.grouped_mm(inner, self.fc2.weight.transpose(1, 2), offs=ends)
        return torch.zeros_like(x_TH).index_add_(0, tokens, rows)


@cache
def our_layer(model: ModelConfig, moe: MoEConfig, device: torch.device, dtype: torch.dtype) -> MoELayer:
    """A layer of ours. Its many weights are drawn once; plain layers copy them."""
    return MoELayer(
        "moe",
        model,
        moe,
        single_process_groups(device=device),
        seed=ON_DEVICE,
        expert_linear=layer_spec_with(model, None).expert_linear(NATIVE),
        device=device,
        dtype=dtype,
    )


def moe_side(model: ModelConfig, moe: MoEConfig, wrap: Callable[[MoELayer], Any], batch: int, made: Made) -> Side:
    """Forward and backward of `wrap(layer of ours)`: that layer, or a plain one with its weights, or a pair of what is
    called and what holds the weights."""
    if model.transformer_impl == "transformer_engine" and (missing := why_no_transformer_engine()) is not None:
        raise RuntimeError(missing)
    wrapped = wrap(our_layer(model, moe, **made))
    run, holder = wrapped if isinstance(wrapped, tuple) else (wrapped, wrapped)
    x, grad = random_pair(model, batch, made["device"], made["dtype"])
    weights = holder.experts if isinstance(holder, MoELayer) else holder
    return stack_side(run, weights, x, grad, [holder])


def plain(grouped: bool, **options: Any) -> Callable[[MoELayer], Any]:
    """The plain layer; compiled with `options` where there are any."""

    def wrap(ours: MoELayer) -> Any:
        made = PlainMoE(ours, grouped=grouped)
        return (torch.compile(made, **options), made) if options else made

    return wrap


def moe_layers(
    layers: dict[str, tuple[ModelConfig, MoEConfig]] = LAYERS,
    batch: int = 4,
    *,
    device: torch.device = DEVICE,
    dtype: torch.dtype = torch.bfloat16,
    repetitions: int = 15,
) -> Iterator[Comparison | Row]:
    """Whole MoE layers, permutation included, forward and backward."""
    made: Made = {"device": device, "dtype": dtype}
    for name, (model, moe) in layers.items():
        engine = replace(model, transformer_impl="transformer_engine")
        sides: dict[str, tuple[ModelConfig, MoEConfig, Callable[[MoELayer], Any]]] = {
            "labkit": (model, moe, lambda layer: layer),
            "labkit, dispatcher alltoall": (model, replace(moe, dispatcher="alltoall"), lambda layer: layer),
            "labkit, Transformer Engine's products": (engine, moe, lambda layer: layer),
            "plain, loop over experts": (model, moe, plain(False)),
            "plain, grouped product": (model, moe, plain(True)),
            "plain, grouped product, compiled": (model, moe, plain(True, fullgraph=True)),
        }
        if moe.num_experts <= 8:  # the loop is unrolled, and broken by each look at who has which token
            sides["plain, loop over experts, compiled"] = (model, moe, plain(False, fullgraph=False))
        builds = {key: partial(moe_side, *one, batch, made) for key, one in sides.items()}
        rows = batch * model.seq_length * moe.top_k
        flops = 3 * plan.forward_flops(model, samples=batch, moe=moe).experts
        case = f"G5: MoE layer, {name}: h{model.hidden} s{model.seq_length} b{batch}, {rows} rows, forward and backward"
        told: Made = {"tolerance": TOLERANCE, "repetitions": repetitions, "flops": flops, "share": "share_of_peak"}
        yield from beside(case, builds, device=device, **told)
        our_layer.cache_clear()


# ---- a grouped product beside loops ----


def spread_over(streams: Sequence[Any], jobs: Sequence[Callable[[], Any]]) -> None:
    """Run jobs on streams in turn, each stream behind what is under way; then let the current stream wait for all.
    Without streams, one after the other."""
    current = torch.cuda.current_stream() if streams else None
    for stream in streams:
        stream.wait_stream(current)
    for index, job in enumerate(jobs):
        with torch.cuda.stream(streams[index % len(streams)]) if streams else nullcontext():
            job()
    for stream in streams:
        assert current is not None
        current.wait_stream(stream)


class _OnStreams(Function):
    """y_e = x_e W_e^T, dx_e = dy_e W_e and dW_e = dy_e^T x_e, each expert's products on one of several streams."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_EOI: Tensor, counts: list[int], streams: Sequence[Any]) -> Tensor:
        ctx.save_for_backward(x_NI, weight_EOI)
        ctx.counts, ctx.streams = counts, streams
        y_NO = x_NI.new_empty(len(x_NI), weight_EOI.shape[1])
        parts = zip(x_NI.split(counts), weight_EOI.unbind(), y_NO.split(counts), strict=True)
        spread_over(streams, [lambda x=x, w=w, y=y: torch.mm(x, w.t(), out=y) for x, w, y in parts])
        return y_NO

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x_NI, weight_EOI = ctx.saved_tensors
        grad_NO, dx_NI, dw_EOI = grads[0].contiguous(), torch.empty_like(x_NI), torch.empty_like(weight_EOI)
        rows = (t.split(ctx.counts) for t in (grad_NO, x_NI, dx_NI))
        parts = zip(*rows, weight_EOI.unbind(), dw_EOI.unbind(), strict=True)

        def both(dy: Tensor, x: Tensor, dx: Tensor, w: Tensor, dw: Tensor) -> None:
            torch.mm(dy, w, out=dx)
            torch.mm(dy.t(), x, out=dw)

        spread_over(ctx.streams, [lambda part=part: both(*part) for part in parts])
        return dx_NI, dw_EOI, None, None


class OnStreams(nn.Module):
    """One projection of all experts, called as `StackedLinear`."""

    def __init__(self, weight_EOI: nn.Parameter, count: int = STREAMS) -> None:
        super().__init__()
        self.weight = weight_EOI
        self.streams = [torch.cuda.Stream() for _ in range(count)] if weight_EOI.is_cuda else []

    def forward(self, x_NI: Tensor, segments: Segments) -> Tensor:
        """[N, I] -> [N, O]."""
        return _OnStreams.apply(x_NI, self.weight, segments.counts, self.streams)  # type: ignore[no-any-return]


def experts_side(given: GroupedExperts, load: Tensor, made: Made, linear: Any, *, forward: bool) -> Side:
    """All experts on sorted rows: two projections and what is between; `linear(weight)` in the place of ours. The
    weights are those of `given`, and shared."""
    experts = copy(given)
    experts._modules = dict(given._modules)
    if linear is not None:
        experts.fc1, experts.fc2 = linear(given.fc1.weight), linear(given.fc2.weight)
    device, shape = made["device"], (int(load.sum()), given.input_shape[1])
    generator = torch.Generator(device).manual_seed(0)
    x, grad = (torch.randn(shape, device=device, generator=generator).to(made["dtype"]) for _ in range(2))
    probs = torch.rand(shape[0], device=device, generator=generator)
    if not forward:
        return stack_side(lambda x: experts(x, load, probs), experts, x, grad, [experts])
    output: list[Tensor] = []

    def step() -> None:
        with torch.no_grad():
            output[:] = [experts(x, load, probs)]

    return Side(step, lambda: {"output": output[0]})


def before_activation(kernels: Sequence[Op], activation: str = "silu") -> dict[str, float]:
    """Kernels up to the first whose name contains `activation`, how long the GPU idled between them, and how long it
    idled right before that one, in microseconds.

    Raises:
        ValueError: no such kernel.
    """
    in_order = sorted(kernels, key=lambda kernel: kernel.start)
    chosen = next((index for index, kernel in enumerate(in_order) if activation in kernel.path[-1]), None)
    if chosen is None:
        raise ValueError(f"no kernel is named like {activation}: {sorted({kernel.path[-1] for kernel in kernels})}")
    before, busy_until, idle = in_order[:chosen], in_order[0].start, 0.0
    for kernel in before:
        idle += max(0.0, kernel.start - busy_until)
        busy_until = max(busy_until, kernel.end)
    gap = max(0.0, in_order[chosen].start - busy_until) if before else 0.0
    return {"launches": len(before), "idle_us_between": idle, "idle_us_before_activation": gap}


def launches(side: Side, device: torch.device) -> Row:
    """Kernels, and idle time between them, up to the activation of a forward."""
    samples = [before_activation(kernels_in(profiled(side.step, device))) for _ in range(SAMPLES)]
    return {name: round(value, 1) for name, value in medians(samples).items()}


def grouped_product(
    layers: dict[str, tuple[ModelConfig, MoEConfig]] = LAYERS,
    rows: int = 16384,
    *,
    device: torch.device = DEVICE,
    dtype: torch.dtype = torch.bfloat16,
    repetitions: int = 15,
) -> Iterator[Comparison | Row]:
    """G5 beside the loop on streams: experts on rows that are sorted already, forward, and forward and backward."""
    made: Made = {"device": device, "dtype": dtype}
    groups = single_process_groups(device=device)
    linears = {"labkit, grouped product": None, f"loop on {STREAMS} streams": OnStreams, "loop over experts": Loop}
    for name, (model, moe) in layers.items():
        flops = 2 * rows * plan.expert_parameters(model, moe)
        experts = GroupedExperts("experts", model, moe, groups, seed=ON_DEVICE, **made)
        for load in ("nearly even", "skewed"):
            given = (experts, LOADS[load](moe.num_experts, rows), made)
            for forward in (True, False):
                builds = {key: partial(experts_side, *given, one, forward=forward) for key, one in linears.items()}
                words = "forward" if forward else "forward and backward"
                shown = forward and device.type == "cuda"
                yield from beside(
                    f"G5: experts, {name}: {rows} rows, {load}, {words}", builds, device=device, tolerance=TOLERANCE,
                    repetitions=repetitions, flops=flops if forward else 3 * flops, share="share_of_peak",
                    describe=(lambda side, _: launches(side, device)) if shown else None,
                )  # fmt: skip
