"""fp8 over ranks: with agreed scales every layout computes what one process computes; what is gathered is bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_bounds import random
from torch import Tensor

from labkit.config import ParallelConfig, RunConfig, presets
from labkit.fp8 import Float8Recipe, Float8Scaling
from labkit.parallel import CommLedger, all_gather, dropped, initialize_model_parallel
from labkit.parallel.layers import ColumnParallelLinear, RowParallelLinear
from labkit.parallel.parameters.weights import gather_parameter
from labkit.train import compare, pretrain

S, B, INNER, OUTER = 8, 2, 32, 64
EXACT = {"rtol": 1e-12, "atol": 1e-14}


def float8_config(**more: Any) -> RunConfig:
    return presets.tiny().override(
        {"model.layers": 2, "model.hidden": 32, "model.seq_length": 32, "optim.precision": "fp64", "optim.eps": 1e-5,
         "optim.fp8": "hybrid", "train.global_batch_size": 8} | more
    )  # fmt: skip


LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2, "sequence_parallel": True, "world_size": 4, "distributed_optimizer": True},
]
MORE: list[dict[str, Any]] = [
    {"tp": 2, "sequence_parallel": True, "pp": 2},
    {"tp": 4},
    {"cp": 2, "tp": 2, "sequence_parallel": True},
    {"world_size": 4},
    {"pp": 2, "schedule.name": "zero_bubble_h1"},
    {"model.recompute_granularity": "full", "world_size": 2},
]


EXPERTS = {"moe.num_experts": 4, "moe.layer_freq": (1, 0), "moe.shared_expert_ffn_hidden": 32, "aux_loss_coeff": 0.01}
SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
WITH_EXPERTS: list[dict[str, Any]] = [{**SP, "ep": 2, "world_size": 4, "distributed_optimizer": True}]
MORE_WITH_EXPERTS: list[dict[str, Any]] = [
    {**SP, "ep": 2, "etp": 1, "moe.shared_expert_overlap": True},
    {**SP, "pp": 2, "etp": 2, "schedule.name": "zero_bubble_h1"},
    {"cp": 2, "ep": 2, "moe.dispatcher": "allgather"},
    {"ep": 4, "world_size": 4},
    {"world_size": 2, "moe.dispatcher": "local"},
    {"ep": 2, "world_size": 2, "model.recompute_granularity": "full"},
    {"ep": 2, "world_size": 2, "recompute_granularity": "selective", "recompute_modules": ("moe",)},
]


def agree(layouts: list[dict[str, Any]], **changes: Any) -> None:
    report = compare(float8_config(**changes), layouts, steps=3 if changes else 2)
    assert all(row.first_difference is None for row in report.rows), f"\n{report}"
    assert all(max(row.loss_diff, row.grad_diff, row.param_diff) < 1e-10 for row in report.rows), f"\n{report}"


def test_delayed_scaling_gives_every_layout_the_numbers_of_one_process() -> None:
    agree(LAYOUTS)


@pytest.mark.sweep
def test_delayed_scaling_over_more_layouts() -> None:
    agree(MORE)


def test_experts_of_every_layout_compute_the_numbers_of_one_process() -> None:
    """The first step casts no rows of experts; two more scale by its history."""
    agree(WITH_EXPERTS, **EXPERTS)


@pytest.mark.sweep
def test_experts_over_more_layouts() -> None:
    agree(MORE_WITH_EXPERTS, **EXPERTS)


def test_a_checkpoint_of_two_ranks_of_experts_goes_on_in_one_process(
    on_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """With the history: a step without one would compute experts without fp8."""
    config = float8_config(**EXPERTS, **{"train.steps": 4, "optim.decay_steps": 4})
    saved = {"ep": 2, "train.steps": 3, "checkpoint.dir": str(tmp_path), "checkpoint.interval": 3}
    on_ranks(pretrain, 2, config.override(saved))
    [whole] = on_ranks(pretrain, 1, config)
    [after] = on_ranks(pretrain, 1, config.override({"checkpoint.load": str(tmp_path)}))
    assert after.resumed_after == 3
    assert after.losses == pytest.approx(whole.losses[3:], rel=1e-12)


def test_copies_of_a_head_stay_alike_under_fp8() -> None:
    """The forward is that of one process. Gradients of the copies are cast before they are summed: e5m2 has two bits
    behind the leading one, so each of the two casts errs by up to an eighth."""
    report = compare(float8_config(kv_heads=1), [LAYOUTS[0], {"tp": 4}], steps=2)
    for row in report.rows:
        assert row.disagreements == (), f"\n{report}"
        assert row.first_difference is not None and row.first_difference.endswith("gradient"), f"\n{report}"
        assert row.grad_diff < 1 / 8, f"\n{report}"


def pair(recipe: str, sequence_parallel: bool, steps: int, history: int = 16) -> dict[str, Tensor]:
    """A column- and a row-parallel layer, `steps` steps: whole output, input gradient and weight gradients."""
    groups = initialize_model_parallel(ParallelConfig(tp=torch.distributed.get_world_size()))
    scaling = Float8Scaling(Float8Recipe(recipe, amax_history_len=history), groups)
    shared: dict[str, Any] = {"group": groups.tp, "std": 0.2, "dtype": torch.float64, "precision": scaling}
    shared["sequence_parallel"] = sequence_parallel
    first = ColumnParallelLinear("first", INNER, OUTER, **shared)
    second = RowParallelLinear("second", OUTER, INNER, **shared)
    x, grad = random(S, B, INNER, seed=1), random(S, B, INNER, seed=2, std=1e-5)
    part = slice(groups.tp.rank * S // groups.tp.size, (groups.tp.rank + 1) * S // groups.tp.size)
    own = part if sequence_parallel and groups.tp.size > 1 else slice(None)
    for _ in range(steps):
        first.zero_grad()
        second.zero_grad()
        leaf = x[own].clone().requires_grad_()
        y = second(torch.tanh(first(leaf)[0]))[0]
        y.backward(grad[own])
        scaling.end_step()
    found = {"y": y.detach(), "dx": leaf.grad}
    if own != slice(None):
        found = {name: all_gather(t, groups.tp) for name, t in found.items()}
    for layer in (first, second):
        found[f"{layer.name}.weight"] = gather_parameter(layer.weight.grad, layer.weight, groups.tp)
    return found


def pair_without_agreement() -> dict[str, Tensor]:
    with dropped(layer="fp8"):
        return pair("delayed", False, 3, 1)  # the first step agrees on amaxes by itself; a history of 1 forgets it


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_cut_layer_casts_what_the_whole_one_casts(
    on_ranks: Callable[..., list[Any]], sequence_parallel: bool, steps: int
) -> None:
    [alone] = on_ranks(pair, 1, "delayed", sequence_parallel, steps)
    for found in on_ranks(pair, 2, "delayed", sequence_parallel, steps):
        for name, expected in alone.items():
            torch.testing.assert_close(found[name], expected, msg=lambda m, n=name: f"{n}: {m}", **EXACT)


def test_scales_that_ranks_do_not_agree_on_change_the_numbers(on_ranks: Callable[..., list[Any]]) -> None:
    [alone] = on_ranks(pair, 1, "delayed", False, 3, 1)
    assert torch.equal(on_ranks(pair, 2, "delayed", False, 3, 1)[0]["y"], alone["y"])
    for found in on_ranks(pair_without_agreement, 2):
        assert (found["y"] - alone["y"]).norm() > 1e-4 * alone["y"].norm()


@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise"])
def test_same_layout_twice_gives_the_same_bits(on_ranks: Callable[..., list[Any]], recipe: str) -> None:
    first, second = (on_ranks(pair, 2, recipe, True, 2) for _ in range(2))
    for one, two in zip(first, second, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_current_scaling_gathers_one_scale(on_ranks: Callable[..., list[Any]]) -> None:
    """The parts of a gathered input share the scale of the whole: the input is cast as it would be in one process."""
    [alone] = on_ranks(packed_input, 1)
    for found in on_ranks(packed_input, 2):
        assert torch.equal(found, alone)


def packed_input() -> Tensor:
    groups = initialize_model_parallel(ParallelConfig(tp=torch.distributed.get_world_size()))
    scaling = Float8Scaling(Float8Recipe("current"), groups)
    layer = ColumnParallelLinear("fc", INNER, OUTER, group=groups.tp, precision=scaling, dtype=torch.float64)
    x = random(S, B, INNER, seed=1) * torch.linspace(0.1, 9.0, S, dtype=torch.float64)[:, None, None]
    part = x.chunk(groups.tp.size)[groups.tp.rank]
    values, _ = layer.plan.gemms.pack(part, "input", groups.tp, trains=True)
    return all_gather(values, groups.tp)


def traffic(recipe: str) -> list[tuple[str, str, int]]:
    with CommLedger() as ledger:
        pair(recipe, True, 2)
    return [(record.operation, record.layer or "", record.bytes) for record in ledger.records]


@pytest.mark.parametrize(("recipe", "size"), [("delayed", 1), ("current", 1), ("blockwise", 8)])
def test_the_ledger_shows_bytes_gathered_and_one_exchange_of_amaxes_a_step(
    on_ranks: Callable[..., list[Any]], recipe: str, size: int
) -> None:
    for records in on_ranks(traffic, 2, recipe):
        gathered = [nbytes for op, layer, nbytes in records if op == "all_gather" and layer in ("first", "second")]
        # Per step: the input forward and again backward, the gradient of the second layer's output.
        assert gathered == [S // 2 * B * INNER * size] * 6, records
        amaxes = [nbytes for op, layer, nbytes in records if layer == "fp8"]
        assert amaxes == ([2 * 3 * 4] * 2 if recipe == "delayed" else []), "layers x operands x float32"
