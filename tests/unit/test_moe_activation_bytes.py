"""Closed forms of what a layer with experts keeps for backward, against what autograd keeps, byte for byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.config import ModelConfig, MoEConfig, RunConfig
from labkit.fp8 import Float8Recipe
from labkit.fp8.scaling import Float8Spec
from labkit.models import GPTModel
from labkit.models.build import LayerSpec
from labkit.models.saved_tensors import SavedTensors
from labkit.parallel import single_process_groups
from labkit.plan.activations import (
    MOE_PARTS,
    Share,
    layer_activation_bytes,
    layer_input_bytes,
    layer_parts,
    layer_saved,
    layers_activation_bytes,
    recomputed_at_once_bytes,
)
from labkit.plan.float8 import saved_bytes
from labkit.plan.workload import Workload

GROUPS = single_process_groups()
BATCH = 3
GELU = ModelConfig(layers=4, hidden=64, heads=4, vocab_size=301, seq_length=32, hidden_dropout=0.1)
GATED = replace(GELU, activation="swiglu", norm="rmsnorm", bias=False)
PLAIN = MoEConfig(num_experts=8, ffn_hidden=40, top_k=2)
SHARED = replace(PLAIN, shared_expert_ffn_hidden=24)
CASES: dict[str, MoEConfig] = {
    "plain": PLAIN,
    "one by one": replace(PLAIN, grouped_gemm=False),
    "local": replace(PLAIN, dispatcher="local", top_k=3),
    "gathered": replace(PLAIN, dispatcher="allgather"),
    "losses": replace(PLAIN, aux_loss_coeff=0.1, z_loss_coeff=0.1),
    "by sequence": replace(PLAIN, aux_loss_coeff=0.1, load_balancing="seq_aux_loss", pre_softmax=True),
    "global": replace(PLAIN, aux_loss_coeff=0.1, load_balancing="global_aux_loss", topk_scaling_factor=2.0),
    "sigmoid": replace(PLAIN, score_function="sigmoid", aux_loss_coeff=0.1, expert_bias=True),
    "sigmoid of one": replace(PLAIN, score_function="sigmoid", top_k=1),
    "groups": replace(PLAIN, score_function="sigmoid", num_groups=4, group_topk=2),
    "sinkhorn": replace(PLAIN, load_balancing="sinkhorn"),
    "padded": replace(PLAIN, capacity_factor=1.0, pad_to_capacity=True),
    "jitter": replace(PLAIN, input_jitter=0.1),
    "jitter with shared": replace(SHARED, input_jitter=0.1),
    "wide router": replace(PLAIN, router_dtype="fp64", aux_loss_coeff=0.1),
    "router like the model": replace(PLAIN, router_dtype="model"),
    "shared": SHARED,
    "shared with gate": replace(SHARED, shared_expert_gate=True),
    "shared, overlapped": replace(SHARED, shared_expert_gate=True, shared_expert_overlap=True),
}
TYPED = ("plain", "one by one", "losses", "sigmoid", "wide router", "router like the model", "shared with gate")
"""Cases whose tensors are of several types, as those of the router and its weights."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def measured(
    config: ModelConfig, moe: MoEConfig, dtype: torch.dtype, layers: int = 1, spec: LayerSpec | None = None
) -> SavedTensors:
    """What `layers` layers keep, and their output, which keeps it alive."""
    torch.manual_seed(1)
    ends: dict[str, Any] = {"pre_process": False, "post_process": False} | ({} if spec is None else {"spec": spec})
    model = GPTModel(config, GROUPS, layers=range(layers), moe=moe, seed=1, dtype=dtype, **ends)
    x_SBH = torch.randn(config.seq_length, BATCH, config.hidden, dtype=dtype, requires_grad=True) * 1
    with SavedTensors(model) as saved:
        saved.output = model.recompute.run_layers(model.layers.values(), x_SBH, None)  # type: ignore[attr-defined]
    return saved


@pytest.mark.parametrize("moe", [PLAIN, SHARED], ids=["plain", "shared"])
@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise"])
def test_a_layer_in_fp8_keeps_inputs_in_one_byte(recipe: str, moe: MoEConfig) -> None:
    """Its first step, in which `delayed` casts no rows of experts. Shared experts keep a copy of the router's input."""
    run = RunConfig().override({"precision": "bf16", "optim.fp8": "hybrid", "optim.fp8_recipe": recipe})
    run = replace(run, model=replace(GATED, layers=2, hidden_dropout=0.0), moe=moe)
    one = Share(samples=BATCH, element_bytes=2)
    wide = layers_activation_bytes(run.model, one, 2, moe)
    found = measured(run.model, moe, torch.bfloat16, 2, Float8Spec(Float8Recipe(recipe))).bytes
    assert found == pytest.approx(wide + saved_bytes(Workload(run, 1), run, one, range(2)), rel=1e-3)
    assert (found < 0.95 * wide) == (recipe == "current")


def share(dtype: torch.dtype = torch.float32) -> Share:
    return Share(samples=BATCH, element_bytes=dtype.itemsize)


def experts_part(sizes: dict[str, int], prefix: str) -> int:
    return sum(size for name, size in sizes.items() if name.startswith(prefix) and "norm" not in name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", [GELU, GATED], ids=["gelu", "gated"])
def test_the_experts_branch_byte_for_byte(config: ModelConfig, dtype: str) -> None:
    kind = DTYPES[dtype]
    for name in CASES if dtype == "fp32" else TYPED:
        moe = CASES[name]
        found = measured(config, moe, kind)
        saved = layer_saved(config, share(kind), moe)
        mask = saved["mlp dropout mask"]
        assert experts_part(found.by_module, "layers.0.mlp") == experts_part(saved, "mlp") - mask, name
        assert found.bytes == pytest.approx(sum(saved.values()), rel=0.01), name


RECOMPUTED: list[tuple[str, ...]] = [
    ("moe",),
    ("shared_experts",),
    ("layernorm",),
    ("moe", "layernorm"),
    ("core_attn", "mlp", "shared_experts", "layernorm"),
]


@pytest.mark.parametrize("modules", RECOMPUTED, ids="+".join)
def test_what_the_selected_parts_throw_away(modules: tuple[str, ...]) -> None:
    config = replace(GATED, recompute_granularity="selective", recompute_modules=modules)
    for moe in (replace(SHARED, shared_expert_gate=True, aux_loss_coeff=0.1), PLAIN):
        for jitter in (0.0, 0.1):
            mixed = replace(moe, layer_freq=(1, 0), input_jitter=jitter)
            expected = layers_activation_bytes(config, share(), range(4), mixed)
            assert measured(config, mixed, torch.float32, 4).bytes == pytest.approx(expected, rel=0.01), mixed


@pytest.mark.parametrize(("method", "count"), [("uniform", 1), ("uniform", 3), ("block", 1), ("block", 3)])
def test_full_recomputation_of_mixed_layers(method: str, count: int) -> None:
    how = {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": count}
    config, moe = replace(GATED, **how), replace(SHARED, layer_freq=(0, 0, 0, 1))
    inputs, rest = {("uniform", 1): (4, ()), ("uniform", 3): (2, ())}.get((method, count), (count, range(count, 4)))
    kept = [layer_activation_bytes(config, share(), moe if index == 3 else None) for index in rest]
    by_hand = inputs * layer_input_bytes(config, share()) + sum(kept)
    assert layers_activation_bytes(config, share(), None, moe) == by_hand
    assert measured(config, moe, torch.float32, 4).bytes == pytest.approx(by_hand, rel=0.01)


@pytest.mark.parametrize("first", [0, 1])
def test_the_largest_piece_stands_beside_it_in_backward(first: int) -> None:
    """Of a layer with experts and a dense one, whichever keeps more."""
    config = replace(GATED, layers=2, recompute_granularity="full", hidden_dropout=0.0)
    moe = replace(SHARED, layer_freq=(first, 1 - first))
    model = GPTModel(config, GROUPS, layers=range(2), moe=moe, pre_process=False, post_process=False, seed=1)
    x_SBH = torch.randn(config.seq_length, BATCH, config.hidden, requires_grad=True) * 1
    peaks: list[int] = []
    with SavedTensors(model) as saved:
        y = model.recompute.run_layers(model.layers.values(), x_SBH)
        for layer in model.layers.values():
            layer.register_full_backward_pre_hook(lambda *_: peaks.append(saved.bytes))
        y.sum().backward()
    beside = recomputed_at_once_bytes(config, share(), None, moe)
    dense, sparse = (layer_activation_bytes(config, share(), which) for which in (None, moe))
    assert beside == max(dense, sparse) - layer_input_bytes(config, share()) and dense != sparse
    assert max(peaks) <= 1.01 * (layers_activation_bytes(config, share(), None, moe) + beside)
    assert max(peaks) >= 0.99 * (layer_input_bytes(config, share()) + beside)


@given(
    k=st.sampled_from([1, 2, 8]),
    tp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    etp=st.sampled_from([1, 2]),
    grouped=st.booleans(),
)
def test_tokens_are_shared_out_and_rows_follow_k(k, tp, cp, etp, grouped) -> None:
    """Everything behind the norm shrinks with tp x cp; rows, not their widths, grow with etp."""
    moe = replace(SHARED, top_k=k, grouped_gemm=grouped)
    one = layer_saved(GATED, Share(samples=4), moe)
    part = layer_saved(GATED, Share(samples=4, tp=tp, cp=cp, etp=etp, sequence_parallel=tp > 1), moe)
    for name in (name for name in one if name.startswith("mlp")):
        grows = etp if name in ("mlp experts fc1 input", "mlp experts weights") else 1
        assert part[name] * tp * cp == one[name] * grows, name
    twice = layer_saved(GATED, Share(samples=4, expert_rows=2 * 4 * GATED.seq_length * k), moe)
    assert twice["mlp experts fc2 input"] == 2 * one["mlp experts fc2 input"]


def test_parts_in_words_are_all_of_it() -> None:
    moe: Any = replace(CASES["shared, overlapped"], input_jitter=0.1, aux_loss_coeff=0.1)
    parts = layer_parts(GATED, share(), moe)
    assert list(parts) == list(MOE_PARTS)
    assert sum(parts.values()) == layer_activation_bytes(GATED, share(), moe)


def test_a_capacity_that_drops_an_unknown_number_is_refused() -> None:
    with pytest.raises(ValueError, match="only the routing decides the number of rows; set pad_to_capacity"):
        layer_activation_bytes(GATED, share(), replace(PLAIN, capacity_factor=1.0))
