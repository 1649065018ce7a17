"""BERT under every layout against one process, in both layouts of its norms: loss, gradients, parameters over steps."""

import runpy
from pathlib import Path

import pytest

from labkit.config import RunConfig, presets
from labkit.train import compare

MATRIX = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "parity_matrix.py"))
ZERO, SP, FULL, MEGATRON = (MATRIX[name] for name in ("ZERO", "SEQUENCE_PARALLEL", "FULL", "MEGATRON"))
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp")}
SUBSET = {
    "pre": [
        {"tp": 2, "pp": 2, "world_size": 8, **SP, **MEGATRON},
        {"pp": 2, "vpp": 2, "schedule.name": "interleaved", **SELECTIVE},
    ],
    "post": [
        {"pp": 2, "world_size": 4, **ZERO, **FULL},
        {"pp": 2, "schedule.name": "zbv", **SP, "tp": 2},
    ],
}
"""Every axis and every option, in few layouts; `make sweep` has them all."""


def small(placement: str) -> RunConfig:
    changes = {"layers": 4, "hidden": 32, "heads": 4, "seq_length": 32, "global_batch_size": 8}
    return presets.bert_tiny().override({"model.norm_placement": placement, **changes})


def check(config, layouts, steps):
    report = compare(config, layouts, steps=steps, dtype="float64")
    assert report.ok, f"\n{report}"
    assert max(row.largest for row in report.rows) <= 1e-10


@pytest.mark.parametrize("placement", ["pre", pytest.param("post", marks=pytest.mark.sweep)])
def test_float64(placement):
    check(small(placement), SUBSET[placement], steps=2)


def test_padding_of_the_vocabulary_rotary_positions_an_untied_output_and_no_order():
    """One of four ranks has no real column of the vocabulary."""
    config = small("pre").override({"position": "rope", "untie_embeddings_and_output_weights": True})
    config = config.override({"make_vocab_size_divisible_by": 384, "bert_binary_head": False, "label_smoothing": 0.1})
    check(config, [{"tp": 4, **SP}], steps=2)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_every_layout(placement):
    check(small(placement), MATRIX["BERT_LAYOUTS"], steps=5)


FAULTS = [
    ({"operation": "all_gather", "layer": "binary_head"}, {"tp": 2, **SP}, "binary_head.pooler.weight gradient (tp"),
    ({"operation": "all_reduce", "layer": "finalize"}, {"tp": 2, **SP}, "lm_head.norm.bias gradient"),
    ({"operation": "all_reduce", "group": "embd"}, {"pp": 2}, "embedding.word.weight gradient"),
]


@pytest.mark.parametrize(("fault", "layout", "named"), FAULTS, ids=["first position", "partial sums", "tied words"])
def test_a_collective_left_out_is_found_at_the_tensor_it_should_have_completed(fault, layout, named):
    report = compare(small("post"), [layout], steps=2, fault=fault)
    assert not report.ok and report.rows[0].first_difference.startswith(named), f"\n{report}"
