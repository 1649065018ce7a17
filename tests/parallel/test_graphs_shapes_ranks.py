"""Lengths that vary, on several ranks: the bits of a run without graphs, and captures on all ranks at once."""

from collections.abc import Iterator

import pytest
from graph_training import FULL, GRAPHS

from labkit.config import RunConfig, presets
from labkit.train.forward_step import gpt_forward_step

MICROBATCHES = 4
VARIABLE = {"schedule.variable_seq_lengths": True}
DISTRIBUTED = {"optim.distributed_optimizer": True, "optim.overlap_param_gather": True}
ROUTER = {"graph.cuda_graph_modules": ("attn", "moe_router", "moe_preprocess")}
STEADY = [[16] * 4] * 2 + [[8] * 4] * 3 + [[16, 8, 8, 16], [8] * 4, [16] * 4]
"""Lengths by step, on all replicas."""
ONE_REPLICA = [[16] * 4] * 8, [[16] * 4] * 2 + [[8] * 4] * 4 + [[16, 8, 16, 8], [8] * 4]
"""Of the first replica, and of the second."""
UNSETTLED = [[16, 8, 16, 8]] * 4 + [[16] * 4] * 4, [[16] * 4] * 2 + [[8] * 4] * 6
"""The second waits with its captures until the first has settled."""


def small(**changes) -> RunConfig:
    shape = {
        "model.layers": 4, "model.hidden": 32, "model.heads": 4, "model.seq_length": 16, "train.steps": 8,
        "train.global_batch_size": MICROBATCHES,
    }  # fmt: skip
    return presets.tiny().override(shape).override(changes)


def cut(batches: Iterator, lengths: list[list[int]]) -> Iterator:
    for batch, length in zip(batches, (length for step in lengths for length in step), strict=False):
        yield {key: x[:, :length] for key, x in batch.items()}


def losses(config: RunConfig, by_replica) -> tuple[list[float], list[int], list[int]]:
    """By step: the loss, captures so far, the sequence that this rank's graphs are of."""
    from labkit.train.pipeline import Pipeline
    from labkit.train.pretraining import build_data_iterators, initialize, setup_model_and_optimizer
    from labkit.train.stepping import train_step

    run = initialize(config)
    chunks, optimizer, _ = setup_model_and_optimizer(run)
    pipeline = Pipeline(config, run.groups, chunks, gpt_forward_step, run.schedule)
    lengths = by_replica if isinstance(by_replica, list) else by_replica[run.groups.dp.rank]
    batches, found = cut(build_data_iterators(run).train(0), lengths), ([], [], [])
    for step in range(config.train.steps):
        made = train_step(pipeline, optimizer, run.timers, batches, step=step, lr=1e-3, clip_grad=1.0)
        found[0].append(made.loss)
        graphs = pipeline.graphs
        helper = getattr(graphs, "helper", None)  # graphs of whole iterations have none
        found[1].append(0 if graphs is None else graphs.num_captures)
        found[2].append(helper.seq_length if helper is not None and helper.graphs_created() else 0)
    return found


CASES = {
    "pp2": (2, {"pp": 2}, STEADY),
    "pp2 vpp2": (2, {"pp": 2, "vpp": 2}, STEADY),
    "pp2, split backwards": (2, {"pp": 2, "schedule.name": "zero_bubble_h1"}, STEADY),
    "tp2, sequence parallel": (2, {"layers": 2, "tp": 2, "sequence_parallel": True, "hidden_dropout": 0.1}, STEADY),
    "dp2, distributed optimizer": (
        2, {"layers": 2, "global_batch_size": 8, "optim.bucket_size": 4000, **DISTRIBUTED}, STEADY,
    ),
    "ep2, router captured": (
        2, {"layers": 2, "global_batch_size": 8, "ep": 2, "moe.num_experts": 4, "moe.top_k": 2, **ROUTER}, STEADY,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_losses_are_bit_equal_to_eager_ones_and_all_ranks_capture_at_once(on_ranks, name):
    world, changes, lengths = CASES[name]
    graphed = small(**VARIABLE, **GRAPHS, **changes)
    without = {key: value for key, value in changes.items() if not key.startswith("graph.")}
    eager = on_ranks(losses, world, small(**VARIABLE, **without), lengths)
    graphs = on_ranks(losses, world, graphed, lengths)
    for (expected, _, _), (found, captures, sizes) in zip(eager, graphs, strict=True):
        assert found == expected
        assert captures == [0, 1, 1, 2, 2, 2, 2, 2]
        assert sizes == [0, 16, 16, 8, 8, 8, 8, 8]


def test_replicas_of_other_lengths_have_graphs_of_their_own_and_wait_for_each_other(on_ranks):
    config = small(**VARIABLE, global_batch_size=8)
    for by_replica, when in (ONE_REPLICA, 3), (UNSETTLED, 5):
        eager = on_ranks(losses, 2, config, by_replica)
        graphs = on_ranks(losses, 2, config.override(GRAPHS), by_replica)
        assert [found for found, _, _ in graphs] == [found for found, _, _ in eager]
        for rank, (_, captures, sizes) in enumerate(graphs):
            assert captures == [0] + [1] * (when - 1) + [2] * (8 - when), by_replica
            assert sizes == [0] + [16] * (when - 1) + [8 if rank else 16] * (8 - when)


def test_without_variable_lengths_ranks_do_not_ask_each_other_and_other_shapes_stay_eager(on_ranks, capfd):
    config = small(global_batch_size=8)
    eager = on_ranks(losses, 2, config, STEADY)
    graphs = on_ranks(losses, 2, config.override(GRAPHS), STEADY)
    for (expected, _, _), (found, captures, sizes) in zip(eager, graphs, strict=True):
        assert found == expected
        assert captures == [0] + [1] * 7 and sizes == [0] + [16] * 7
    said = [line for line in capfd.readouterr().err.splitlines() if "run eagerly" in line]
    assert said and all("set schedule.variable_seq_lengths to have layers captured again" in line for line in said)


def test_iterations_of_replicas_start_over_for_other_shapes(on_ranks):
    config = small(**VARIABLE, global_batch_size=8)
    eager, full = (on_ranks(losses, 2, config.override(more), STEADY) for more in ({}, GRAPHS | FULL))
    assert [found for found, _, _ in full] == [found for found, _, _ in eager]
