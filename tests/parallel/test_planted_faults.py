"""Planted faults are found, and by name: a subset here, all of them in `make sweep` (table: docs/faults.md).

A mechanism that calls everything a fault would find them all, too; so a harmless change has to be found by nothing.
"""

from dataclasses import replace

import pytest
from faults import every_fault
from planting import Comparison, Fault, find

FAULTS = {fault.name: fault for fault in every_fault()}
SUBSET = [
    "the gradients of norms are not summed over tp",
    "gradients of an expert are divided by its own replicas only",
    "the two copies of the word embedding keep their own gradients",
    "every rank rotates by the positions of the first rank",
    "updated parameters are not gathered",
]
HARMLESS = Fault(
    "a sum in another order of words",
    "_RowLinear.forward",
    "reduce(partial, plan.group)",
    "reduce(partial, group=plan.group)",
    Comparison({"tp": 2, "sequence_parallel": True}, "nothing"),
)


@pytest.mark.parametrize("name", SUBSET)
def test_a_fault_is_named(name, tmp_path):
    found, what = find(FAULTS[name], tmp_path / "tree")
    assert found, f"{name}: {what} was named first"


def test_a_harmless_change_is_found_by_no_comparison(tmp_path):
    assert find(HARMLESS, tmp_path / "tree") == (False, "nothing")


def in_float32(fault: Fault, **changes: float) -> Fault:
    """The same where rounding spreads widely: large weights, many steps (fewer of the larger models with experts)."""
    found = fault.found_by
    changes = {"init_std": 0.1, **found.changes, **changes}
    steps = max(found.steps, 4 if "tiny" != found.preset != "llama_tiny" else 10)
    return replace(fault, found_by=replace(found, dtype="float32", steps=steps, changes=changes))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (HARMLESS, "rounding"),
        (FAULTS["norms and biases get weight decay"], "layers.0.attention.norm.weight parameter"),
    ],
    ids=["harmless", "harmful"],
)
def test_a_wide_spread_of_float32_hides_no_fault(fault, named, tmp_path):
    """The fault that changes the least, where rounding alone is beyond the tolerance: unclipped gradients of keys'
    biases, which are zero but for rounding, move these biases."""
    assert find(in_float32(fault, clip_grad=0.0, init_std=0.2), tmp_path / "tree")[1] == named


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if isinstance(fault.found_by, Comparison)])
def test_every_fault_is_found_in_float32(name, tmp_path):
    """Over more steps than one, where a step other than the first may be named first."""
    fault = in_float32(FAULTS[name])
    _, what = find(fault, tmp_path / "tree")
    assert what not in ("nothing", "rounding")
    assert what == fault.found_by.names or FAULTS[name].found_by.steps > 1


@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_a_harmless_change_is_found_by_no_test(tmp_path):
    suite = "tests/parallel/test_layers.py -k row_parallel"
    assert find(replace(HARMLESS, found_by=suite), tmp_path / "tree") == (False, "nothing")


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_found(name, tmp_path):
    found, what = find(FAULTS[name], tmp_path / "tree")
    assert found, f"{name}: {what}"
