"""What only CUDA can show of experts: the grouped kernel, no waiting for the GPU, streams, Transformer Engine."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from host_waits import no_waiting
from torch import Tensor

from labkit.config import ModelConfig, MoEConfig, ParallelConfig
from labkit.fp8 import Float8Recipe, Float8Scaling
from labkit.launch import run
from labkit.launch.transformer_engine import why_no_transformer_engine
from labkit.moe.experts import Experts, GroupedExperts, SequentialExperts, StackedLinear
from labkit.moe.grouped_gemm import Segments, grouped_weight_gradient
from labkit.moe.layer import MoELayer
from labkit.parallel import initialize_model_parallel, single_process_groups
from labkit.te.linear import GroupedLinear

pytestmark = pytest.mark.gpu

HIDDEN, WIDTH = 64, 96
ROUTINGS = {
    "skewed": [130, 1, 0, 29],
    "one takes all": [0, 0, 90, 0],
    "nothing": [0, 0, 0, 0],
    "equal": [40, 40, 40, 40],
}


def build(kind: type[Experts], dtype: torch.dtype, impl: str = "local") -> Experts:
    model = ModelConfig(layers=1, hidden=HIDDEN, heads=2, activation="swiglu")
    moe = MoEConfig(num_experts=4, ffn_hidden=WIDTH)
    made: dict[str, Any] = {"seed": 3, "std": 0.3, "dtype": dtype, "device": "cuda"}
    made["linear"] = GroupedLinear if impl == "transformer_engine" else StackedLinear
    return kind("layers.0.mlp.experts", model, moe, single_process_groups(device="cuda"), **made)


def inputs(counts: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(sum(counts))
    tokens = torch.randn(sum(counts), HIDDEN, generator=random).to("cuda", dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    probs = torch.rand(sum(counts), generator=random).to("cuda", wide)
    return tokens.requires_grad_(), torch.tensor(counts), probs.requires_grad_()


def results(experts: Experts, counts: list[int], dtype: torch.dtype) -> dict[str, Tensor]:
    tokens, tokens_per_expert, probs = inputs(counts, dtype)
    y = experts(tokens, tokens_per_expert, probs)
    y.backward(torch.linspace(-1, 2, y.numel(), device="cuda").view_as(y).to(dtype))
    found = {"output": y.detach(), "tokens": tokens.grad, "probs": probs.grad}
    return found | {name: parameter.grad for name, parameter in experts.named_parameters()}  # type: ignore[return-value]


def assert_close(found: dict[str, Tensor], exact: dict[str, Tensor], tolerance: float) -> None:
    """By norm, since bf16 rounds single elements by 1 part in 256."""
    assert found.keys() == exact.keys()
    for name, tensor in exact.items():
        distance = (found[name].double() - tensor.double()).norm() / tensor.double().norm().clamp(min=1e-30)
        assert distance < tolerance, f"{name}: {distance:.2e}"


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-4), (torch.float64, 1e-12)]
)
@pytest.mark.parametrize("counts", ROUTINGS.values(), ids=ROUTINGS)
def test_grouped_is_sequential(counts: list[int], dtype: torch.dtype, tolerance: float) -> None:
    found = results(build(GroupedExperts, dtype), counts, dtype)
    exact = results(build(SequentialExperts, dtype), counts, dtype)
    assert_close(found, exact, tolerance)


def float8_results(device: str, recipe: Float8Recipe, counts: list[int]) -> dict[str, Tensor]:
    """Of the second of two steps, which `delayed` scales by the first."""
    groups = single_process_groups(device=device)
    scaling = Float8Scaling(recipe, groups)
    model = ModelConfig(layers=1, hidden=HIDDEN, heads=2, activation="swiglu")
    made: dict[str, Any] = {"seed": 3, "std": 0.3, "dtype": torch.bfloat16, "device": device}
    linear = partial(StackedLinear, gemms=scaling.grouped_gemms)
    experts = GroupedExperts("e", model, MoEConfig(num_experts=4, ffn_hidden=WIDTH), groups, linear=linear, **made)
    found: dict[str, Tensor] = {}
    for _ in range(2):
        experts.zero_grad()
        given = inputs(counts, torch.bfloat16)
        tokens, probs = (t.detach().to(device).requires_grad_() for t in given[::2])
        y = experts(tokens, given[1], probs)
        y.backward(torch.linspace(-1, 2, y.numel(), device=device).view_as(y).to(y.dtype))
        scaling.end_step()
        found = {"output": y.detach(), "tokens": tokens.grad, "probs": probs.grad}  # type: ignore[dict-item]
        found |= {name: p.grad for name, p in experts.named_parameters() if p.grad is not None}
    return {name: tensor.cpu() for name, tensor in found.items()}


@pytest.mark.parametrize("counts", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise"])
def test_experts_in_fp8_compute_what_the_cpu_computes(recipe: str, hybrid: bool, counts: list[int]) -> None:
    """A last bit of bf16 in the activation moves one value in 16 to the next number of fp8, so the norm may move by
    2^-2 2^-4 in e4m3 and twice that in e5m2."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip(f"{torch.cuda.get_device_name()} has no fp8 tensor cores (Ada, Hopper or later have)")
    found, exact = (float8_results(device, Float8Recipe(recipe, hybrid), counts) for device in ("cuda", "cpu"))
    assert_close(found, exact, 0.05)


def need_grouped_kernel() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip(f"{torch.cuda.get_device_name()} has no grouped kernel of torch's (Hopper and later have)")


def test_an_expert_without_rows_has_zeros_for_a_gradient_whatever_the_memory_held() -> None:
    """The grouped kernel sums over no row there: nothing but zeros may come of it."""
    need_grouped_kernel()
    counts = Segments([0, 48, 0, 16])
    grad_NO, x_NI = (torch.randn(64, width, device="cuda", dtype=torch.bfloat16) for width in (WIDTH, HIDDEN))
    for _ in range(3):
        dirt = torch.full((4, WIDTH, HIDDEN), torch.nan, device="cuda", dtype=torch.bfloat16)
        del dirt  # its memory goes to the next tensor of this size
        found = grouped_weight_gradient(grad_NO, x_NI, counts)
        assert found is not None and not found[[0, 2]].any() and found.isfinite().all()


@pytest.mark.parametrize("counts_on", ["cpu", "cuda"])
def test_grouped_experts_never_wait_for_the_gpu(counts_on: str) -> None:
    need_grouped_kernel()
    experts = build(GroupedExperts, torch.bfloat16)
    tokens, counts, probs = inputs(ROUTINGS["skewed"], torch.bfloat16)
    counts, grad = counts.to(counts_on), torch.randn_like(tokens)
    experts(tokens, counts, probs).backward(grad)  # first use of the kernels
    with no_waiting():
        experts(tokens, counts, probs).backward(grad)


@pytest.mark.parametrize("counts", ROUTINGS.values(), ids=ROUTINGS)
def test_transformer_engine_computes_what_we_do(counts: list[int]) -> None:
    if (missing := why_no_transformer_engine()) is not None:
        pytest.skip(f"needs transformer_engine: {missing}")
    theirs, ours = (build(GroupedExperts, torch.bfloat16, impl) for impl in ("transformer_engine", "local"))
    assert list(theirs.state_dict()) == list(ours.state_dict())
    assert_close(results(theirs, counts, torch.bfloat16), results(ours, counts, torch.bfloat16), 1e-2)


# ---- the layer ----


def layer(device: str, *, overlap: bool = False, groups: Any = None, dtype: torch.dtype = torch.float32) -> MoELayer:
    model = ModelConfig(layers=1, hidden=HIDDEN, heads=2, activation="swiglu")
    moe = MoEConfig(
        num_experts=4, ffn_hidden=WIDTH, shared_expert_ffn_hidden=WIDTH, shared_expert_gate=True,
        shared_expert_overlap=overlap,
    )  # fmt: skip
    chosen = groups or single_process_groups(device=device)
    return MoELayer("layers.0.mlp", model, moe, chosen, seed=2, dtype=dtype, device=device)


def layer_results(made: MoELayer, device: str, part: slice = slice(None)) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(32, 2, HIDDEN, generator=random, dtype=torch.float64)[part] for _ in range(2))
    dtype = made.experts.fc1.weight.dtype
    leaf = x.to(device, dtype).requires_grad_()
    y = made(leaf)
    y.backward(grad.to(device, dtype))
    found = {"output": y.detach(), "x": leaf.grad}
    return {name: tensor.cpu() for name, tensor in found.items()} | {  # type: ignore[union-attr]
        name: parameter.grad.cpu() for name, parameter in made.named_parameters() if parameter.grad is not None
    }


def test_the_layer_on_a_gpu_is_that_of_a_cpu() -> None:
    dtype = torch.float64
    found = layer_results(layer("cuda", dtype=dtype), "cuda")
    assert_close(found, layer_results(layer("cpu", dtype=dtype), "cpu"), 1e-6)  # scores are float32


def test_shared_experts_on_a_stream_of_their_own_change_nothing() -> None:
    expected = layer_results(layer("cuda"), "cuda")
    for _ in range(5):
        found = layer_results(layer("cuda", overlap=True), "cuda")
        assert_close(found, expected, 1e-5)


def half_of_the_experts() -> dict[str, Tensor]:
    groups = initialize_model_parallel(ParallelConfig(ep=2))
    made = layer("cuda", groups=groups, dtype=torch.float64)
    half = slice(16 * groups.rank, 16 * (groups.rank + 1))
    return layer_results(made, "cuda", half)


def test_two_ranks_share_the_experts_and_the_gpu() -> None:
    whole = layer_results(layer("cuda", dtype=torch.float64), "cuda")
    found = run(half_of_the_experts, 2, backend="gloo", device="cuda", timeout=120)
    joined = {name: torch.cat([part[name] for part in found]) for name in ("output", "x")}
    joined |= {name: torch.cat([part[name] for part in found]) for name in found[0] if name.startswith("experts.")}
    assert_close(joined, {name: whole[name] for name in joined}, 1e-6)
