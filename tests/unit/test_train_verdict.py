"""Rounding or a fault: the rule on synthetic differences, and the same training with its sums in another order."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import labkit.train.parity.comparison as parity
from labkit.config import presets
from labkit.train import compare
from labkit.train.parity.assemble import FullRun
from labkit.train.parity.rounding import MULTIPLE, ORDERS, WIDEST, judge, reordered_sums, widest
from labkit.train.pretraining import pretrain

BIAS, WEIGHT, LATER = "fc1.bias parameter", "fc1.weight parameter", "fc1.bias parameter of step 9"
SPREAD = {BIAS: 3e-5, WEIGHT: 2e-7, LATER: 4e-5, "loss": 1e-8} | dict.fromkeys(
    ("norm output", "norm.bias gradient", "norm.bias parameter"), 0.1
)
"""Wide in biases, tight in the weight, of no use in the norm."""


@pytest.mark.parametrize(
    ("found", "verdict", "named"),
    [
        ({BIAS: 9e-6, WEIGHT: 9e-6, LATER: 1e-5}, "equal", None),
        ({WEIGHT: 1e-6, BIAS: 2.6e-5, LATER: 3e-4}, "rounding", BIAS),
        ({BIAS: 2.6e-5, WEIGHT: 1.1e-5, LATER: 3e-5}, "fault", WEIGHT),  # one tensor, beside one that spreads widely
        ({BIAS: 2.6e-5, WEIGHT: 1e-6, LATER: 5e-4}, "fault", LATER),  # one step
        ({"loss": 2e-5, BIAS: 2.6e-5}, "fault", "loss"),
        ({"norm.bias gradient": 0.99e-3, "norm.bias parameter": 0.99e-2}, "rounding", "norm.bias gradient"),
        ({"norm.bias gradient": 1.01e-3}, "fault", "norm.bias gradient"),  # its spread is wider than `WIDEST`
        ({"norm.bias parameter": 1.01e-2}, "fault", "norm.bias parameter"),
        ({"norm output": 1.01e-4}, "fault", "norm output"),
        ({"unknown output": 2e-5}, "fault", "unknown output"),
        ({BIAS: math.inf}, "fault", BIAS),
        ({}, "equal", None),
    ],
)
def test_a_difference_is_held_against_the_spread_of_its_own_tensor_and_step(found, verdict, named):
    differences = [(name, name.split(" of ")[0].split()[-1], difference) for name, difference in found.items()]
    assert judge(differences, 1e-5, lambda: SPREAD) == (verdict, named)


@pytest.mark.parametrize("difference", [1e-5, WIDEST["loss"] * 1.01, math.inf])
def test_the_spread_is_measured_only_where_it_decides(difference):
    def measured():
        raise AssertionError("the reference ran again for nothing")

    verdict, _ = judge([("loss", "loss", difference)], 1e-5, measured)
    assert verdict == ("equal" if difference <= 1e-5 else "fault")


def test_the_spread_is_the_largest_of_all_orders_tensor_by_tensor():
    runs = [[("a", "loss", 1e-6), ("b", "loss", 5e-6)], [("a", "loss", 4e-6), ("b", "loss", 2e-6)]]
    assert widest(runs) == {"a": 4e-6, "b": 5e-6}


def observed(monkeypatch: pytest.MonkeyPatch, bias: dict[int, float], layouts: list[float]) -> Callable[..., object]:
    """`compare` over runs of one step whose only tensor is a bias of 1 plus a number: by order of summation in the
    reference, by layout in the others."""
    counted = iter(layouts)
    log = []

    def observe(config, world_size, watched, *_):
        log.append((world_size, watched.parts))
        value = torch.tensor([1.0 + (next(counted) if world_size > 1 else bias[watched.parts])], dtype=torch.float64)
        return FullRun([1.0], {}, {0: {"bias": torch.ones(1)}}, {0: {"bias": value}}, []), 0

    monkeypatch.setattr(parity, "_observe", observe)
    return lambda **how: SimpleNamespace(report=compare(presets.tiny(), [{"tp": 2}] * len(layouts), 1, **how), log=log)


@pytest.mark.parametrize(("dtype", "unit"), [("float32", 1.0), ("float64", 1e-5)])
def test_the_reference_runs_again_once_for_all_layouts_and_only_where_one_is_beyond_the_tolerance(
    monkeypatch, dtype, unit
):
    spread = {order: unit * moved for order, moved in enumerate([0.0, 1e-5, 2e-5, 0.0, 1e-6])}
    found = observed(monkeypatch, spread, [unit * moved for moved in (9e-6, 1.9e-4, 2.1e-4, 5e-5)])(dtype=dtype)
    assert [row.verdict for row in found.report.rows] == ["equal", "rounding", "fault", "rounding"]
    assert found.log == [(1, 0), (2, 0), (2, 0), *((1, parts) for parts in ORDERS), (2, 0), (2, 0)]
    assert not found.report.ok and "first in bias parameter." in found.report.sentence
    assert MULTIPLE == 10, "the numbers above"
    quiet = observed(monkeypatch, spread, [unit * 9e-6, 0.0])(dtype=dtype)
    assert quiet.report.ok and quiet.log == [(1, 0), (2, 0), (2, 0)]


def test_rounding_is_no_failure_and_is_told(monkeypatch):
    found = observed(monkeypatch, {0: 0.0} | dict.fromkeys(ORDERS, 2e-5), [0.0, 2.6e-5])(dtype="float32").report
    assert found.ok
    assert [row.first_difference for row in found.rows] == [None, "bias parameter"]
    assert [row.differing for row in found.rows] == [(), ("bias parameter",)]
    assert found.sentence.startswith(
        "1 of 2 layouts agree with one process to 1e-05 over 1 optimizer step in float32. "
    )
    none_equal = replace(found, rows=found.rows[1:]).sentence
    assert none_equal.startswith("1 of 1 layouts within rounding of one process over 1 optimizer step in float32. ")
    assert "by up to 2.6e-05, first in bias parameter: this is rounding" in found.sentence
    assert [line.split()[7:] for line in found.table().splitlines()[1:]] == [
        ["equal", "none"], ["rounding", "bias", "parameter"]
    ]  # fmt: skip


def test_ranks_that_disagree_with_each_other_are_a_fault_however_little_they_differ(monkeypatch):
    whole = FullRun([1.0], {}, {0: {}}, {0: {}}, [])
    torn = FullRun([1.0], {}, {0: {}}, {0: {}}, ["norm.bias gradient (tp replicas)"])
    monkeypatch.setattr(parity, "_observe", lambda _, world_size, *__: (torn if world_size > 1 else whole, 0))
    row = compare(presets.tiny(), [{"tp": 2}], 1, dtype="float32").rows[0]
    assert (row.verdict, row.first_difference) == ("fault", "norm.bias gradient (tp replicas)")


_NUMBERS = torch.Generator().manual_seed(5)
A_NK, B_KM, C_NM = (torch.randn(shape, dtype=torch.float64, generator=_NUMBERS) for shape in ((6, 37), (37, 5), (6, 5)))
BATCH = (A_NK.expand(3, -1, -1), B_KM.expand(3, -1, -1))
OPERATIONS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "mm": lambda t: A_NK.to(t) @ B_KM.to(t),
    "mm into a tensor": lambda t: torch.mm(A_NK.to(t), B_KM.to(t), out=torch.empty(6, 5, dtype=t)),
    "addmm": lambda t: torch.addmm(C_NM.to(t), A_NK.to(t), B_KM.to(t), beta=2, alpha=3),
    "addmm_": lambda t: C_NM.to(t, copy=True).addmm_(A_NK.to(t), B_KM.to(t), beta=0.5, alpha=2),
    "linear": lambda t: F.linear(A_NK.to(t), B_KM.t().to(t), C_NM[0].to(t)),
    "bmm": lambda t: torch.bmm(*(x.to(t) for x in BATCH)),
    "baddbmm": lambda t: torch.baddbmm(C_NM.to(t), *(x.to(t) for x in BATCH), beta=2, alpha=3),
    "baddbmm_": lambda t: C_NM.to(t).repeat(3, 1, 1).baddbmm_(*(x.to(t) for x in BATCH), alpha=2),
    "sum": lambda t: A_NK.to(t).sum(),
    "sum of a dimension": lambda t: A_NK.to(t).sum(-1, keepdim=True),
    "sum into a tensor": lambda t: torch.sum(A_NK.to(t), -1, out=torch.empty(6, dtype=t)),
    "mean": lambda t: A_NK.to(t).mean(),
    "mean of dimensions": lambda t: BATCH[0].to(t).mean((0, 2)),
}


@pytest.mark.parametrize("parts", [1, 4, 50])
@pytest.mark.parametrize("name", OPERATIONS)
def test_sums_in_another_order_round_differently_and_mean_the_same(name, parts):
    operation = OPERATIONS[name]
    with reordered_sums(parts):
        exact, rounded = operation(torch.float64), operation(torch.float32)
    torch.testing.assert_close(exact, operation(torch.float64), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(rounded, operation(torch.float32), rtol=1e-5, atol=1e-5)
    assert not torch.equal(rounded, operation(torch.float32)) or rounded.numel() == 1


def test_whole_numbers_are_added_as_ever():
    counts, nothing = torch.arange(6).reshape(2, 3), torch.ones(2, 0)
    with reordered_sums(2):
        assert counts.sum() == 15 and counts.sum(0).tolist() == [3, 5, 7]
        assert torch.equal(nothing @ torch.ones(0, 3), torch.zeros(2, 3))
        assert nothing.sum() == 0 and torch.tensor(2.0).sum() == 2


@pytest.mark.parametrize("preset", ["tiny", "llama_tiny"])
def test_a_training_in_another_order_is_the_same_training(preset):
    """Forward, backward and update: 1e-12 in float64, but other bits."""
    shape = {"layers": 1, "hidden": 16, "heads": 4, "kv_heads": 4, "seq_length": 8, "global_batch_size": 2}
    config = presets.get(preset).override({**shape, "train.steps": 6, "precision": "fp64"})
    usual, others = pretrain(config).losses, []
    for parts in ORDERS:
        with reordered_sums(parts):
            others.append(pretrain(config).losses)
        assert others[-1] == pytest.approx(usual, rel=1e-12)
    assert any(losses != usual for losses in others)
