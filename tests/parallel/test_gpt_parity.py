"""The whole GPT under every layout against one process: loss, gradients, parameters over optimizer steps.

The full matrix {tp1, tp2, tp4} x {pp1, pp2, pp4} x {dp1, dp2} up to 8 ranks, both presets, both dtypes, over ten
steps, is a sweep (`make sweep`; its table is docs/parity.md, written by scripts/parity_matrix.py). The subset here has
every size of every axis, and every pair of axes, over two or three steps: a gradient, an update, and what follows.
"""

import random
import runpy
from pathlib import Path
from typing import Any

import pytest

from labkit.config import RunConfig, presets
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
MEGATRON = MATRIX["MEGATRON"]
FEW_KV_HEADS = {
    ("llama_tiny", 1): [{"tp": 4, **SP}, {"tp": 2, "cp": 2}],
    ("tiny", 1): [{"tp": 2, "pp": 2, "pipeline_layout": "E | t*4 L"}, {"tp": 2, "world_size": 4, **MEGATRON}],
    ("tiny", 2): [{"tp": 4}],
    ("tiny_moe", 1): [{"tp": 2, "ep": 2, **SP}],
}
"""(preset, key/value heads) -> layouts with more ranks of tp; of 4 query heads, 8 in llama_tiny. One layout has a stage
without a layer, which makes its groups all the same."""
MORE_FEW_KV_HEADS = {
    ("llama_tiny", 2): [
        {"tp": 4, "cp": 2, "cp_comm_type": "all_gather", **SP},
        {"tp": 4, "world_size": 8, **ZERO, "num_distributed_optimizer_instances": 2},
        {"tp": 4, "pp": 2, "schedule.name": "zbv"},
    ],
    ("tiny", 1): [
        {"tp": 4, "pp": 2, "schedule.name": "zero_bubble_h1", **MATRIX["FULL"], **SP},
        {"tp": 2, "world_size": 4, "calculate_per_token_loss": True, "bucket_size": 10_000},
        {"tp": 4, "pp": 2, "schedule.name": "interleaved", "vpp": 2},
        {"tp": 2, "graph.cuda_graph_impl": "full_iteration"},
        {"tp": 2, "graph.cuda_graph_impl": "emulated", "graph.cuda_graph_modules": ["attn"]},
    ],
    ("deepseek_tiny", 1): [{"tp": 2, "etp": 1, "ep": 2, **SP, **ZERO, "world_size": 4}],
}
SEQUENCE_PARALLEL = {"tp": 2, "sequence_parallel": True}


def small(preset: str) -> RunConfig:
    return MATRIX["small"](preset)


def explain(report: ParityReport) -> str:
    return f"\n{report}"


@pytest.mark.parametrize("preset", ["tiny", "llama_tiny"])
def test_float64(preset):
    report = compare(small(preset), SUBSET[preset], steps=3, dtype="float64")
    assert report.ok, explain(report)
    assert max(row.largest for row in report.rows) <= 1e-10
    assert report.reference_losses[-1] < report.reference_losses[0]


@pytest.mark.parametrize("preset", [pytest.param("tiny", marks=pytest.mark.sweep), "llama_tiny"])
def test_ranks_whose_part_of_the_vocabulary_is_all_padding(preset):
    config = small(preset)
    config = config.override({"make_vocab_size_divisible_by": config.model.vocab_size, "label_smoothing": 0.1})
    report = compare(config, PADDING_ALONE[preset], steps=2, dtype="float64")
    assert report.ok, explain(report)
    assert max(row.largest for row in report.rows) <= 1e-10


def few_kv_heads(preset, kv_heads, layouts):
    config = MATRIX["sparse" if presets.get(preset).moe.num_experts else "small"](preset)
    report = compare(config.override({"kv_heads": kv_heads}), layouts, steps=2, dtype="float64")
    assert report.ok, explain(report)
    assert max(row.largest for row in report.rows) <= 1e-10


@pytest.mark.parametrize(("preset", "kv_heads"), FEW_KV_HEADS)
def test_fewer_key_value_heads_than_ranks(preset, kv_heads):
    """Copies agree bit for bit, and together they are the head of one process."""
    few_kv_heads(preset, kv_heads, FEW_KV_HEADS[preset, kv_heads])


@pytest.mark.sweep
@pytest.mark.parametrize(("preset", "kv_heads"), MORE_FEW_KV_HEADS)
def test_fewer_key_value_heads_than_ranks_under_more_layouts(preset, kv_heads):
    few_kv_heads(preset, kv_heads, MORE_FEW_KV_HEADS[preset, kv_heads])


def test_float32():
    report = compare(small("tiny"), [{"tp": 2, "pp": 2}], steps=5, dtype="float32")
    assert report.ok, explain(report)


def rounds(seed: int) -> tuple[RunConfig, dict[str, Any], int]:
    """A random configuration with biases, a layout and steps: what float32 rounds in all manners."""
    draw = random.Random(seed)
    shape = {"layers": draw.choice([2, 4]), "hidden": draw.choice([16, 32]), "seq_length": draw.choice([16, 32])}
    batch = {"global_batch_size": 8, "micro_batch_size": draw.choice([1, 2]), "train.seed": draw.randrange(1000)}
    rounding = {"clip_grad": draw.choice([0.0, 1.0]), "init_std": draw.choice([0.02, 0.1, 0.2])}
    layout = draw.choice([{"tp": 2}, SEQUENCE_PARALLEL, {"cp": 2}, {"pp": 2}, {"world_size": 2}, {"tp": 2, "cp": 2}])
    return small("tiny").override(shape | batch | rounding), layout, draw.choice([3, 10, 20])


EVERYDAY_SEEDS = (8, 30)
"""Sequence parallelism, and tp 2 with cp 2; three steps each."""


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed in EVERYDAY_SEEDS else pytest.mark.sweep) for seed in range(40)]
)
def test_float32_is_equal_or_rounding_over_seeds(seed):
    config, layout, steps = rounds(seed)
    report = compare(config, [layout], steps=steps, dtype="float32")
    assert report.ok, explain(report)


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
