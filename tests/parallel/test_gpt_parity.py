"""The whole GPT under every layout against one process: loss, gradients, parameters over ten optimizer steps.

The full matrix {tp1, tp2, tp4} x {pp1, pp2, pp4} x {dp1, dp2} up to 8 ranks, both presets, both dtypes, is a sweep
(`make sweep`; its table is docs/parity.md, written by scripts/parity_matrix.py). The subset here has every size of
every axis, and every pair of axes.
"""

import runpy
from pathlib import Path

import pytest

from labkit.config import RunConfig
from labkit.train import ParityReport, compare

MATRIX = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "parity_matrix.py"))
SUBSET = {
    "tiny": [{"tp": 2, "pp": 2, "world_size": 8}, {"tp": 4}, {"pp": 4}],
    "llama_tiny": [{"tp": 4, "pp": 2}],
}
ZERO, SP = MATRIX["ZERO"], MATRIX["SEQUENCE_PARALLEL"]
PADDING_ALONE = {
    "tiny": [{"tp": 4, **SP}, {"tp": 2, "pp": 2}, {"tp": 2, "world_size": 4, **ZERO}],
    "llama_tiny": [{"tp": 2, "pp": 2, **SP}, {"tp": 4}],
}
"""Tied and untied; under `make_vocab_size_divisible_by` = the vocabulary, tp rank 0 owns all of it."""


def small(preset: str) -> RunConfig:
    return MATRIX["small"](preset)


def explain(report: ParityReport) -> str:
    return f"\n{report}"


@pytest.mark.parametrize("preset", ["tiny", "llama_tiny"])
def test_float64(preset):
    report = compare(small(preset), SUBSET[preset], steps=10, dtype="float64")
    assert report.ok, explain(report)
    assert max(row.largest for row in report.rows) <= 1e-10
    assert report.reference_losses[-1] < report.reference_losses[0]


@pytest.mark.parametrize("preset", ["tiny", "llama_tiny"])
def test_ranks_whose_part_of_the_vocabulary_is_all_padding(preset):
    config = small(preset)
    config = config.override({"make_vocab_size_divisible_by": config.model.vocab_size, "label_smoothing": 0.1})
    report = compare(config, PADDING_ALONE[preset], steps=3, dtype="float64")
    assert report.ok, explain(report)
    assert max(row.largest for row in report.rows) <= 1e-10


def test_float32():
    report = compare(small("tiny"), [{"tp": 2, "pp": 2}], steps=10, dtype="float32")
    assert report.ok, explain(report)
    assert report.rows[0].largest <= 1e-5


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("preset", ["tiny", "llama_tiny"])
def test_every_layout(preset, dtype):
    report = compare(small(preset), MATRIX["LAYOUTS"], steps=10, dtype=dtype)
    assert report.ok, explain(report)


FAULTS = [
    (
        {"operation": "all_reduce", "group": "tp", "phase": "forward", "layer": "layers.1.mlp"},
        {"tp": 2},
        "layers.1.mlp output",
    ),
    (
        {"operation": "all_reduce", "group": "tp", "phase": "forward", "layer": "layers.2.attention"},
        {"tp": 2, "pp": 2},
        "layers.2.attention output",
    ),
    (
        {"operation": "all_reduce", "group": "tp", "phase": "backward", "layer": "layers.1.mlp"},
        {"tp": 2},
        "layers.1.mlp.norm.bias gradient",
    ),
    ({"operation": "all_reduce", "group": "embd"}, {"pp": 2}, "embedding.word.weight gradient"),
    (
        {"operation": "all_reduce", "group": "dp_cp", "phase": "gradients"},
        {"world_size": 2},
        "final_norm.bias gradient",
    ),
]


EVERYDAY = ("layers.1.mlp output", "final_norm.bias gradient")
"""Of a forward, and of the gradients over replicas; the others are a sweep."""


@pytest.mark.parametrize(
    ("fault", "layout", "named"),
    [
        pytest.param(*row, id=row[-1].replace(" ", "-"), marks=() if row[-1] in EVERYDAY else pytest.mark.sweep)
        for row in FAULTS
    ],
)
def test_a_collective_left_out_is_found_at_the_tensor_it_should_have_completed(fault, layout, named):
    report = compare(small("tiny"), [layout], steps=2, fault=fault)
    assert not report.ok
    assert report.rows[0].first_difference == named, explain(report)
    assert f"first in {named}" in report.sentence
