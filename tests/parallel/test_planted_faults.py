"""Planted faults are found, and by name: a subset here, all of them in `make sweep` (table: docs/faults.md).

A mechanism that calls everything a fault would find them all, too; so a harmless change has to be found by nothing.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from faults import every_fault
from planting import Comparison, Fault, find

FAULTS = {fault.name: fault for fault in every_fault()}
SUBSET = [
    "nobody adds up the gradients of norms over tp",
    "gradients of an expert are divided by its own replicas only",
    "the two copies of the word embedding keep their own gradients",
    "every rank rotates by the positions of the first",
    "updated parameters are not gathered",
]
HARMLESS = Fault(
    "a sum in another order of words",
    "parallel/layers.py",
    "y = reduce(partial, plan.group)",
    "y = reduce(partial, group=plan.group)",
    Comparison({"tp": 2, "sequence_parallel": True}, "nothing"),
)


@pytest.mark.parametrize("name", SUBSET)
def test_a_fault_is_named(name, tmp_path):
    found, what = find(FAULTS[name], tmp_path / "tree")
    assert found, f"{name}: {what} was named first"


def test_a_harmless_change_is_found_by_no_comparison(tmp_path):
    assert find(HARMLESS, tmp_path / "tree") == (False, "nothing")


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
