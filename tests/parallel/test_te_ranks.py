"""Transformer Engine's modules over ranks: given our groups they compute what our layers compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from labkit.config import ModelConfig, ParallelConfig
from labkit.fp8 import Float8Recipe
from labkit.models import GPTModel
from labkit.parallel import initialize_model_parallel
from labkit.parallel.parameters.parameter_record import record_of
from labkit.te import EngineSpec
from labkit.train.pretraining import layer_spec_with

CONFIG = ModelConfig(
    layers=2, hidden=32, heads=4, kv_heads=2, vocab_size=64, make_vocab_size_divisible_by=16, seq_length=16
)


def both(parallel: ParallelConfig, kv_heads: int) -> dict[str, dict[str, Tensor]]:
    """Loss and gradients of both implementations on this rank."""
    import te_stub

    groups, found = initialize_model_parallel(parallel), {}
    ids = torch.randint(0, 64, (3, 17), generator=torch.Generator().manual_seed(1))
    chunks = 2 * groups.cp.size
    keep = torch.cat([torch.arange(16).chunk(chunks)[i] for i in (groups.cp.rank, chunks - 1 - groups.cp.rank)])
    for impl in ("local", "transformer_engine"):
        with te_stub.installed() as record:
            config = replace(CONFIG, transformer_impl=impl, kv_heads=kv_heads)
            model = GPTModel(
                config, groups, layers=range(2), seed=1, dtype=torch.float64, spec=layer_spec_with(config, None)
            )
            loss = model(ids[:, :-1][:, keep], labels_BS=ids[:, 1:][:, keep])
        loss.mean().backward()
        called = [len(record.of(name, "forward")) for name in ("LayerNormLinear", "Linear", "DotProductAttention")]
        assert called == ([4, 4, 2] if impl == "transformer_engine" else [0, 0, 0])
        found[impl] = {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}
    return found


@pytest.mark.parametrize(
    ("parallel", "kv_heads"),
    [
        pytest.param(ParallelConfig(tp=2), 2, id="tp2", marks=pytest.mark.sweep),
        pytest.param(ParallelConfig(tp=2), 1, id="one kv head", marks=pytest.mark.sweep),
        pytest.param(ParallelConfig(tp=2, sequence_parallel=True), 2, id="sp"),
        pytest.param(ParallelConfig(cp=2), 2, id="ring"),
        pytest.param(ParallelConfig(cp=2, cp_comm_type="all_gather"), 2, id="all_gather", marks=pytest.mark.sweep),
    ],
)
def test_the_engines_layers_equal_ours_over_ranks(
    on_ranks: Callable[..., list[Any]], parallel: ParallelConfig, kv_heads: int
) -> None:
    for found in on_ranks(both, 2, parallel, kv_heads):
        ours, theirs = found["local"], found["transformer_engine"]
        assert theirs.keys() == ours.keys()
        for name, expected in ours.items():
            torch.testing.assert_close(
                theirs[name], expected, rtol=1e-10, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}"
            )


def told(parallel: ParallelConfig, recipe: str) -> None:
    """What the engine is given of our groups."""
    import te_stub

    groups = initialize_model_parallel(parallel)
    with te_stub.installed() as record:
        config = replace(CONFIG, transformer_impl="transformer_engine")
        model = GPTModel(config, groups, layers=range(2), seed=1, spec=EngineSpec(Float8Recipe(recipe)))
        model(torch.zeros(1, 8, dtype=torch.long))
    made = {name: record.of(name) for name in ("LayerNormLinear", "Linear", "DotProductAttention")}
    assert {name: len(calls) for name, calls in made.items()} == {
        "LayerNormLinear": 4, "Linear": 4, "DotProductAttention": 2,
    }  # fmt: skip
    for call in (call for calls in made.values() for call in calls):
        assert call["tp_group"] is groups.tp.process_group and call["tp_size"] == groups.tp.size
    for call in made["LayerNormLinear"] + made["Linear"]:
        assert call["sequence_parallel"] is (parallel.sequence_parallel and groups.tp.size > 1)
    for call in made["DotProductAttention"]:
        expected = (groups.cp.process_group, list(groups.cp.ranks)) if groups.cp.size > 1 else (None, None)
        assert (call["cp_group"], call["cp_global_ranks"]) == expected
        assert call["cp_comm_type"] == parallel.cp_comm_type
    [region] = record.of("autocast")
    assert region["amax_reduction_group"] is groups.tp_dp_cp.process_group
    asked_by_graphs: Any = model.precision.graph_options()  # type: ignore[union-attr]
    assert asked_by_graphs["amax_reduction_group"] is groups.tp_dp_cp.process_group
    assert (asked_by_graphs["amax_reduction_group"] is not None) is (groups.tp_dp_cp.size > 1)
    [call] = record.of("DelayedScaling")
    assert call["reduce_amax"] is (groups.tp_dp_cp.size > 1)
    whole = ("norm.weight", "norm.bias", "proj.bias", "fc2.bias")
    outside = {name: parameter for name, parameter in model.named_parameters() if name.endswith(whole)}
    assert len(outside) == 2 * 6 + 2, "of two layers, and the final norm"
    for name, parameter in outside.items():
        assert record_of(parameter).sequence_parallel is parallel.sequence_parallel, name


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(tp=2, sequence_parallel=True),
        ParallelConfig(cp=2, cp_comm_type="all_gather"),
        ParallelConfig(pp=2),
    ],
    ids=["sp", "cp", "pp"],
)
def test_the_engine_is_given_our_groups(on_ranks: Callable[..., list[Any]], parallel: ParallelConfig) -> None:
    on_ranks(told, 2, parallel, "delayed")
