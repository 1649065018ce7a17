"""T5 under every layout against one process, in both forms: loss, gradients, parameters over steps."""

import runpy
from pathlib import Path

import pytest

from labkit.config import RunConfig
from labkit.train import compare

MATRIX = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "parity_matrix.py"))
ZERO, SP, FULL, MEGATRON = (MATRIX[name] for name in ("ZERO", "SEQUENCE_PARALLEL", "FULL", "MEGATRON"))
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm", "mlp")}
SUBSET = {
    "learned": [
        {"tp": 2, "pp": 2, "split_rank": 1, "world_size": 8, **SP, **MEGATRON},
        {"pp": 4, "split_rank": 2, **FULL},
        {"tp": 4, **SELECTIVE},
    ],
    "relative": [
        {"tp": 2, "pp": 4, "split_rank": 2, **SP, **FULL},
        {"pp": 3, "split_rank": 1, "world_size": 6, **ZERO},
        {"pp": 2, "split_rank": 1, "schedule.name": "zero_bubble_h1", **SELECTIVE},
        {"tp": 2, "optim.data_parallel": "naive", "world_size": 4},
    ],
}
"""Every axis and every option, in few layouts."""


def small(form: str) -> RunConfig:
    return MATRIX["encoder_decoder"](form)


def check(config, layouts, steps):
    report = compare(config, layouts, steps=steps, dtype="float64")
    assert report.ok, f"\n{report}"
    assert max(row.largest for row in report.rows) <= 1e-10


@pytest.mark.parametrize("form", [pytest.param("learned", marks=pytest.mark.sweep), "relative"])
def test_float64(form):
    check(small(form), SUBSET[form], steps=2)


def test_an_output_of_its_own_and_more_layers_in_the_decoder():
    """Last stage and decoder's first are two ranks, and only the second holds a copy of the words."""
    changes = {"untie_embeddings_and_output_weights": True, "decoder_layers": 4, "label_smoothing": 0.1}
    check(small("relative").override(changes), [{"pp": 3, "split_rank": 1}], steps=2)


def test_rounding_that_large_weights_amplify_is_no_fault_in_float64():
    """At init_std 0.5 tp2 pp2 differs by 7e-10, one process with its sums in other orders by as much."""
    report = compare(small("relative").override({"init_std": 0.5}), [{"tp": 2, "pp": 2, "split_rank": 1}], steps=3)
    assert report.ok, f"\n{report}"


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("form", ["learned", "relative"])
def test_every_layout(form):
    check(small(form), MATRIX["T5_LAYOUTS"], steps=MATRIX["T5_STEPS"])


FAULTS = [
    ({"operation": "all_reduce", "group": "pos_embd"}, "embedding.position.weight gradient"),
    ({"operation": "all_reduce", "group": "pp_half"}, "decoder.relative_bias.weight gradient"),
]


@pytest.mark.parametrize(("fault", "named"), FAULTS, ids=["positions", "relative biases"])
def test_a_sum_over_copies_left_out_is_found(fault, named):
    form = "learned" if fault["group"] == "pos_embd" else "relative"
    report = compare(small(form), [{"pp": 4, "split_rank": 2}], steps=1, fault=fault)
    assert not report.ok and report.rows[0].first_difference.startswith(named), f"\n{report}"
