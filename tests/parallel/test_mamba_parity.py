"""Mamba models under every layout against one process: loss, gradients, parameters over optimizer steps."""

import runpy
from pathlib import Path

import pytest

from labkit.train import compare

MATRIX = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "parity_matrix.py"))
ZERO, SP, FULL, MEGATRON = (MATRIX[name] for name in ("ZERO", "SEQUENCE_PARALLEL", "FULL", "MEGATRON"))
SCOPE = MATRIX["SCOPE_MAMBA"]
SUBSET = {
    "MM*-": [
        {"tp": 2},
        {"pp": 2},
        {"tp": 2, "pp": 2, **SP, **FULL},
        {"world_size": 2, **ZERO},
        {"tp": 2, "world_size": 4, **MEGATRON},
        {"pp": 2, "schedule.name": "zero_bubble_h1"},
        {"tp": 2, **SCOPE},
    ],
    None: [{"tp": 4, **SP}, {"pp": 2, "vpp": 2, "schedule.name": "interleaved", **SCOPE}],
}
"""Pattern of the layers -> layouts; together every axis and option that a Mamba model has."""


small = MATRIX["scanned"]


@pytest.mark.parametrize("pattern", SUBSET, ids=["hybrid", "Mamba alone"])
def test_float64(pattern):
    report = compare(small(pattern), SUBSET[pattern], steps=3, dtype="float64")
    assert report.ok, f"\n{report}"
    assert max(row.largest for row in report.rows) <= 1e-10


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("pattern", SUBSET, ids=["hybrid", "Mamba alone"])
def test_every_layout(pattern):
    report = compare(small(pattern), MATRIX["MAMBA_LAYOUTS"], steps=MATRIX["MAMBA_STEPS"], dtype="float64")
    assert report.ok, f"\n{report}"


def test_a_collective_left_out_is_found_at_the_mixer():
    fault = {"operation": "all_reduce", "group": "tp", "phase": "forward", "layer": "layers.1.mamba"}
    report = compare(small("MM*-"), [{"tp": 2}], steps=2, fault=fault)
    assert not report.ok and report.rows[0].first_difference == "layers.1.mamba output", f"\n{report}"
