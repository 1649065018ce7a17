"""GPT under sequence, context and data parallelism, recomputation and the distributed optimizer against one process.

Every option alone and with tp, pp and the others, up to 8 ranks, both presets, both dtypes, ten steps, is a sweep
(`make sweep`; its tables are in docs/parity.md, written by scripts/parity_matrix.py). The subset here has every option
and every pair that meets in one tensor: parts of a sequence that are cut twice (cp, sp), gradients that are summed
twice (sp, buckets), weights that two stages share (pp, zero; a V), forwards that run again (recomputation).
"""

import runpy
from pathlib import Path
from typing import Any

import pytest

from labkit.comm.collectives import gather_objects
from labkit.config import RunConfig
from labkit.parallel.data_parallel.optimizer import named_parameters
from labkit.train import TrainResult, compare
from labkit.train.forward_step import gpt_forward_step
from labkit.train.pretraining import build_data_iterators, initialize, setup_model_and_optimizer, train

MATRIX = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "parity_matrix.py"))
SP, FULL, ZERO, MEGATRON = (MATRIX[name] for name in ("SEQUENCE_PARALLEL", "FULL", "ZERO", "MEGATRON"))
PARTIAL = {**FULL, "num_microbatches_with_partial_activation_checkpoints": 1}
SEQUENCES = {
    "tiny": [
        {"tp": 2, "pp": 2, "cp": 2, **SP, **FULL},
        {"cp": 4},
        {"pp": 2, **PARTIAL, "schedule.name": "zero_bubble_h1"},
    ],
    "llama_tiny": [{"tp": 2, "cp": 2, "cp_comm_type": "all_gather", **SP, "recompute_granularity": "selective"}],
}
REPLICAS = [
    {"pp": 2, "world_size": 4, "bucket_size": 10_000, "schedule.name": "interleaved", "vpp": 2},
    {"cp": 2, "world_size": 4, "bucket_size": 10_000, "calculate_per_token_loss": True},
]
SHARDS = [
    {"pp": 2, "world_size": 4, **MEGATRON, **FULL},
    {"cp": 2, "world_size": 4, **ZERO},
    {"pp": 2, "world_size": 4, **MEGATRON, "schedule.name": "zbv"},
    {"world_size": 4, **ZERO, "num_distributed_optimizer_instances": 2},
]

WIDE_BUCKET = 40_000


def wide(preset: str, **changes: Any) -> RunConfig:
    return MATRIX["wide"](preset).override({"global_batch_size": 8, **changes})


@pytest.mark.parametrize("preset", ["tiny", pytest.param("llama_tiny", marks=pytest.mark.sweep)])
def test_parts_of_the_sequence_and_recomputation(preset):
    report = compare(wide(preset), SEQUENCES[preset], steps=2)
    assert report.ok, f"\n{report}"
    assert max(row.largest for row in report.rows) <= 1e-10


def test_gradients_in_buckets():
    report = compare(wide("tiny"), REPLICAS, steps=2)
    assert report.ok, f"\n{report}"


def weighing(config: RunConfig, observer: Any) -> TrainResult:
    """`pretrain`, and a look at what the optimizer keeps: the state of every element once over the replicas of an
    instance, shared equally but for the padding of buckets."""
    run = initialize(config)
    chunks, optimizer, lr_schedule = setup_model_and_optimizer(run)
    result = train(run, chunks, optimizer, lr_schedule, build_data_iterators(run), gpt_forward_step, None, observer)
    own, replicas = optimizer.state_bytes(), run.groups.dp_cp
    instances = config.optim.num_distributed_optimizer_instances
    everybody = gather_objects(own, replicas)
    elements = sum(parameter.numel() for parameter in named_parameters(chunks).values())
    width, d = (8 if config.optim.precision == "fp64" else 4), replicas.size // instances
    assert d >= 2, "nothing is shared"
    assert own["parameter"] == own["gradient"] == width * elements
    assert own["master"] == 0, "weights of full precision are their own masters"
    assert sum(state["moments"] for state in everybody) == instances * 2 * width * elements
    padding = own["padding"] // (2 * width)  # of two buffers: gradients and parameters
    for state in everybody:
        assert abs(state["moments"] - 2 * width * elements / d) <= 2 * width * padding, "no equal share"
    least = config.optim.bucket_size == WIDE_BUCKET  # smaller buckets of a smaller model are aligned, too
    assert own["padding"] <= (0.01 if least else 0.2) * (own["parameter"] + own["gradient"])
    return result


def test_the_distributed_optimizer_and_its_bytes():
    """Weights of 64 features, so that the alignment of buffers does not outweigh so small a model."""
    layouts = [{**layout, "bucket_size": WIDE_BUCKET} for layout in SHARDS]
    report = compare(wide("tiny", hidden=64), layouts, steps=2, pretrain=weighing)
    assert report.ok, f"\n{report}"
    assert max(row.largest for row in report.rows) <= 1e-10


def test_float32():
    layout = {"tp": 2, "world_size": 4, **MEGATRON, **SP, **FULL}
    report = compare(wide("llama_tiny"), [layout], steps=2, dtype="float32")
    assert report.ok, f"\n{report}"


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("title", MATRIX["DATA_SWEEPS"])
def test_every_row(title):
    config, layouts, dtype = MATRIX["DATA_SWEEPS"][title]
    how = {"pretrain": weighing} if title.startswith("Distributed optimizer") else {}
    report = compare(config, layouts, steps=MATRIX["DATA_STEPS"], dtype=dtype, **how)
    assert report.ok, f"\n{report}"
    assert len(report.rows) == len(layouts)
