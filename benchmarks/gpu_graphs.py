"""Part of the GPU benchmark: CUDA graphs (rows G4, G6, G7 and F25).

Forward and backward of a training step, without the optimizer: eagerly, with a graph for each layer (ours, Transformer
Engine's), as one graph; where launching is what takes the time, and where computing is. Experts captured in part. The
memory that graphs of a pipeline share. All of a row compute the same, and none reads a number of the GPU in its step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from gpu_peers import DEVICE, Row, Side, beside
from gpu_plain import LAYER_TOLERANCE
from gpu_profile import work_facts
from gpu_steps import PLAIN, our_run, synchronize
from harness import Comparison

from labkit.config import GraphConfig, ModelConfig, MoEConfig
from labkit.graphs import make_graphed_callables, plan_buffers
from labkit.launch.transformer_engine import why_no_transformer_engine
from labkit.models.blocks import TransformerLayer
from labkit.models.build import Build
from labkit.parallel import single_process_groups, token_ids_checked_late
from labkit.plan.activations import Share, layers_activation_bytes
from labkit.schedules import one_f_one_b
from labkit.train.pipeline import Pipeline

SMALL = ModelConfig(layers=12, hidden=768, heads=12, seq_length=256, vocab_size=1024, **PLAIN)
LARGE = ModelConfig(layers=4, hidden=4096, heads=32, seq_length=2048, vocab_size=1024, **PLAIN)
SIZES = {"launch-bound: 12 layers, h768 s256 b1": (SMALL, 1), "compute-bound: 4 layers, h4096 s2048 b2": (LARGE, 2)}
"""Case -> model and micro batch."""
EXPERTS = (
    ModelConfig(layers=4, hidden=1024, heads=16, seq_length=1024, vocab_size=1024, activation="swiglu", **PLAIN),
    MoEConfig(num_experts=16, top_k=2),
)
PARTS: dict[str, tuple[str, ...]] = {
    "attn, moe_router, moe_preprocess": ("attn", "moe_router", "moe_preprocess"),
    "attn, moe_router": ("attn", "moe_router"),
    "attn": ("attn",),
}
LOCAL = GraphConfig(cuda_graph_impl="local", cuda_graph_warmup_steps=1)
EAGER = GraphConfig()

# ---- steps ----


@dataclass(kw_only=True)
class Iteration(Side):
    """Forward and backward of a training step of one microbatch; `step` returns the report of the loss."""

    pipeline: Pipeline
    capture_seconds: float
    """Of the step that captured."""

    def pool_bytes(self) -> int | None:
        """What its graphs share of memory; None without graphs of ours."""
        graphs: Any = self.pipeline.graphs
        holder: Any = getattr(graphs, "helper", None) or getattr(graphs, "training", None)
        return None if getattr(holder, "pool", None) is None else holder.pool.reserved_bytes

    def graphed_layers(self) -> int:
        """How many layers have graphs of their own."""
        helper = getattr(self.pipeline.graphs, "helper", None)
        return len(helper.layers) if helper is not None else 0


def iteration(
    model: ModelConfig,
    graph: GraphConfig = EAGER,
    micro_batch: int = 1,
    moe: MoEConfig | None = None,
    *,
    precision: str = "bf16",
    device: torch.device = DEVICE,
) -> Iteration:
    """Build it and run it until its graphs are there; the same weights and batches for the same model.

    As in `train_step` a GPU notes bad token ids and the host does not wait for them. Nobody looks at the notes, with
    graphs or without: no step reads a number of the GPU.
    """
    pipeline, _, data = our_run(model, micro_batch, device, moe=moe, graph=graph, precision=precision)
    reports: list[Any] = []

    def run() -> Any:
        for chunk in pipeline.chunks:
            chunk.zero_grad_buffer()
        with token_ids_checked_late(device):
            reports[:] = pipeline.forward_backward(data)
        pipeline.finalize_grads()
        return reports[0]

    def results() -> dict[str, torch.Tensor]:
        first: Any = next(p for p in pipeline.chunks[0].parameters() if p.requires_grad)
        return {"loss": torch.as_tensor(reports[0]["loss_sum"]), "first_gradient": first.main_grad}

    run()
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return Iteration(run, results, pipeline=pipeline, capture_seconds=time.perf_counter() - start)


# ---- rows ----


def told(side: Side, seconds: float | None, device: torch.device) -> Row:
    """What it launches, what its graphs hold, and how long a layer's capture took."""
    assert isinstance(side, Iteration)
    row = work_facts(side.step, seconds, device)
    if (pool := side.pool_bytes()) is not None:
        row["pool_mib"] = round(pool / 2**20, 1)
    if layers := side.graphed_layers():
        row["capture_s_a_layer"] = round(side.capture_seconds / layers, 3)
    return row


def compared(case: str, builds: Mapping[str, Callable[[], Side]], device: torch.device) -> Iterator[Comparison | Row]:
    """Graphs and the eager step; by name what each launches, and its pool."""
    yield from beside(case, builds, device=device, tolerance=LAYER_TOLERANCE, describe=partial(told, device=device))
    torch.cuda.empty_cache()


def dense(
    sizes: Mapping[str, tuple[ModelConfig, int]] = MappingProxyType(SIZES),
    graph: GraphConfig = LOCAL,
    *,
    precision: str = "bf16",
    device: torch.device = DEVICE,
) -> Iterator[Comparison | Row]:
    """G4: launch-bound, aim at 1.5 of eager's rate and 1.05 of the kernels' own time; compute-bound, no loss."""
    kinds = {"graphs of layers, ours": graph}
    if why_no_transformer_engine() is None:
        kinds["graphs of layers, Transformer Engine"] = replace(graph, cuda_graph_impl="transformer_engine")
    kinds |= {"one graph of the iteration": replace(graph, cuda_graph_impl="full_iteration"), "eager": EAGER}
    for case, (model, micro_batch) in sizes.items():
        make = partial(iteration, model, micro_batch=micro_batch, precision=precision, device=device)
        builds = {name: partial(make, kind) for name, kind in kinds.items()}
        yield from compared(f"G4: {case}, forward and backward", builds, device)


def experts_in_part(
    case: tuple[ModelConfig, MoEConfig] = EXPERTS,
    graph: GraphConfig = LOCAL,
    *,
    precision: str = "bf16",
    device: torch.device = DEVICE,
) -> Iterator[Comparison | Row]:
    """G6: aim at 1.10 of eager's rate where the GPU idles 15% of the time or more; neutral cases are reported too."""
    model, moe = case
    make = partial(iteration, model, moe=moe, precision=precision, device=device)
    builds = {f"scope {name}": partial(make, replace(graph, cuda_graph_modules=scope)) for name, scope in PARTS.items()}
    sizes = f"{moe.num_experts} experts, top {moe.top_k}, {model.layers} layers, h{model.hidden} s{model.seq_length} b1"
    yield from compared(f"G6: {sizes}: partial graphs", builds | {"eager": make}, device)


def same_losses(
    model: ModelConfig, graphs: Mapping[str, GraphConfig], moe: MoEConfig | None = None, steps: int = 6, **made: Any
) -> list[dict[str, Any]]:
    """Whether `steps` losses and the last gradients are those of the eager run, to the bit, while weights change."""

    def record(graph: GraphConfig) -> list[torch.Tensor]:
        one, found = iteration(model, graph, moe=moe, **made), []
        parameters = [p for chunk in one.pipeline.chunks for p in chunk.parameters() if p.requires_grad]
        for _ in range(steps):
            report = one.step()
            found.append(torch.as_tensor(report["loss_sum"]).detach().clone())
            for p in parameters:  # as an optimizer would, in place
                p.data.add_(p.main_grad.to(p.dtype), alpha=-0.01)  # type: ignore[attr-defined]
        return [*found, *(p.main_grad.clone() for p in parameters)]  # type: ignore[attr-defined]

    expected = record(EAGER)
    return [
        {
            "case": f"F25: {name}: {steps} steps, losses and gradients bit-equal to eager",
            "equal": all(torch.equal(a, b) for a, b in zip(record(graph), expected, strict=True)),
        }
        for name, graph in graphs.items()
    ]


def equality() -> Iterator[dict[str, Any]]:
    """F25 and G6: weights change between replays, and nothing else does."""
    small = ModelConfig(layers=2, hidden=256, heads=8, vocab_size=1024, seq_length=256, **PLAIN)
    yield from same_losses(
        small, {"graphs of layers": LOCAL, "one graph": replace(LOCAL, cuda_graph_impl="full_iteration")}
    )
    scopes = {f"scope {name}": replace(LOCAL, cuda_graph_modules=scope) for name, scope in PARTS.items()}
    yield from same_losses(replace(small, activation="swiglu"), scopes, MoEConfig(num_experts=8, top_k=2))


def pipeline_pool(
    pp: int = 4,
    microbatches: int = 8,
    layers: int = 2,
    config: ModelConfig = ModelConfig(layers=1, hidden=1024, heads=16, seq_length=1024, **PLAIN),  # noqa: B008
    *,
    replays: int = 1000,
    device: torch.device = DEVICE,
    impl: str = "local",
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[dict[str, Any]]:
    """G7: the pool of the first stage of 1F1B, aim at 1.15 of what is in flight at the peak and half of a pool for each
    layer and microbatch (a backward shares that of its forward), flat over 1,000 replays."""
    groups = single_process_groups(device=device)
    build = Build(config=config, group=groups.tp, seed=1, dtype=dtype, device=device)
    stack = tuple(TransformerLayer(index, build) for index in range(layers))
    order = one_f_one_b(pp, microbatches).order(0)

    def sample() -> tuple[torch.Tensor]:
        return (torch.randn(config.seq_length, 1, config.hidden, device=device, dtype=dtype, requires_grad=True),)

    samples = [sample() for _ in range(layers * microbatches)]
    shared = make_graphed_callables(
        stack, samples, order=order, num_layers_per_chunk=[layers], reuse_buffers=True, impl=impl, num_warmup=1
    )
    in_flight = plan_buffers(order, [layers]).num_buffers // layers
    share = Share(samples=1, element_bytes=dtype.itemsize, device="cuda" if device.type == "cuda" else "cpu")
    activations = in_flight * layers * layers_activation_bytes(replace(config, layers=1), share)
    boundary = samples[0][0].nbytes
    before = shared[0].pool.reserved_bytes
    for _ in range(replays // len(order)):
        run_order(order, shared, layers, sample()[0])
    pool = shared[0].pool.reserved_bytes
    separate = 0
    alone = []  # all kept, as all are needed in a step
    for layer in stack * microbatches:
        alone.append(make_graphed_callables(layer, sample(), impl=impl, num_warmup=1))
        separate += alone[-1].pool.reserved_bytes
    mib, sizes = 2**20, f"{layers} layers h{config.hidden} s{config.seq_length}"
    yield {
        "case": f"G7: pool of stage 0, 1F1B pp{pp} M{microbatches}, {sizes}",
        "pool_mib": round(pool / mib, 1), "grown_mib": round((pool - before) / mib, 1),
        "in_flight_and_static_mib": round((activations + 2 * in_flight * layers * boundary) / mib, 1),
        "over_in_flight": round(pool / (activations + 2 * in_flight * layers * boundary), 3),
        "of_a_pool_each": round(pool / separate, 3),
    }  # fmt: skip


def run_order(order: Sequence[float], graphed: Sequence[Any], layers: int, x: torch.Tensor) -> None:
    """One step of one chunk in its order; every microbatch has the same input."""
    forwards = backwards = 0
    under_way: dict[int, torch.Tensor] = {}
    for entry in order:
        if entry > 0:
            y = x.detach().requires_grad_()
            for layer in range(layers):
                y = graphed[forwards * layers + layer](y)
            under_way[forwards] = y
            forwards += 1
        else:
            under_way.pop(backwards).sum().backward()
            backwards += 1
