"""Microbatches of other shapes than the graphs of layers: eager or captured anew, and the bits of a run without graphs.

Several ranks are in tests/parallel/test_graphs_shapes_ranks.py.
"""

from collections import Counter

import pytest
import torch
from graph_training import DROPOUT, FULL, GRAPHS, LAYERS, MICROBATCHES, Training, small

from labkit.events import recording
from labkit.graphs import GraphCaptureError
from labkit.schedules import build_schedule
from labkit.train.forward_step import gpt_forward_step
from labkit.train.pipeline import Pipeline

pytestmark = pytest.mark.usefixtures("one_thread")

PATIENT = GRAPHS | {"graph.cuda_graph_warmup_steps": 2}
LENGTHS = [
    [16] * 4, [16] * 4,  # warm-up
    [16] * 4,  # captured
    [8] * 4, [16] * 4,  # an odd batch: the graphs stay
    [8] * 4, [12] * 4,  # not the same twice
    [8] * 4, [8] * 4,
    [8] * 4,  # captured
    [16, 8, 8, 12],  # within a step: two replay
    [8] * 4,
]  # fmt: skip
CAPTURES = [0, 0, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2]
REPLAYED = [0, 0, 4, 0, 4, 0, 0, 0, 0, 4, 2, 4]
"""Microbatches of each step that graphs ran."""


def cut(batches, lengths):
    """The first tokens of each microbatch, as many as `lengths` says."""
    for batch, length in zip(batches, lengths, strict=False):
        yield {key: x[:, :length] for key, x in batch.items()}


def flat(steps: list[list[int]]) -> list[int]:
    return [length for lengths in steps for length in lengths]


def losses_of(run: Training, lengths=LENGTHS) -> tuple[list[float], list[int], list[int]]:
    """By step: the loss, captures so far, microbatches that replayed in the first layer."""
    batches, found = cut(run.batches, flat(lengths)), ([], [], [])
    for _ in lengths:
        with recording(0) as recorder:
            found[0].extend(run.losses(1, batches))
        replays = [event for event in recorder.events if event.kind == "graph_replay"]
        forwards = Counter(e.name.split(" microbatch")[0] for e in replays if e.name.endswith("forward"))
        graphs = run.pipeline.graphs
        found[1].append(0 if graphs is None else graphs.num_captures)
        found[2].append(forwards["chunk 0 layer 0"])
    return found


CASES = {
    "gpt": {},
    "dropout": DROPOUT,
    "rotary positions": {"model.position": "rope"},
    "attention alone": {"graph.cuda_graph_modules": ("attn",), **DROPOUT},
    "mlp alone": {"graph.cuda_graph_modules": ("mlp",), "model.position": "rope"},
    "no fusion": {"optim.gradient_accumulation_fusion": False},
    "naive data parallelism": {"optim.data_parallel": "naive"},
    "fp8, delayed scales": {"optim.fp8": "hybrid"},
    "fp8, current scales": {"optim.fp8": "e4m3", "optim.fp8_recipe": "current"},
    "all forwards first": {"schedule.name": "gpipe"},
    "split backwards": {"schedule.name": "zero_bubble_h1", **DROPOUT},
    "experts, router and attention": {
        "moe.num_experts": 4, "moe.top_k": 2, "graph.cuda_graph_modules": ("attn", "moe_router", "moe_preprocess"),
    },
    "experts in fp8": {
        "moe.num_experts": 4, "optim.fp8": "hybrid", "graph.cuda_graph_modules": ("attn", "moe_router"),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_losses_are_bit_equal_to_eager_ones_whatever_the_lengths(name):
    eager = {key: value for key, value in CASES[name].items() if not key.startswith("graph.")}
    losses, captures, replayed = losses_of(Training(small(**PATIENT | CASES[name])))
    assert losses == losses_of(Training(small(**eager)))[0]
    assert captures == CAPTURES
    assert replayed == REPLAYED


def test_another_micro_batch_size_is_another_shape():
    def stacked(batches):
        """Sequences of two microbatches in one."""
        while True:
            pair = [next(batches), next(batches)]
            yield {key: torch.cat([one[key] for one in pair]) for key in pair[0]}

    eager, graphs = Training(small()), Training(small(**GRAPHS))
    assert eager.losses(2) == graphs.losses(2)
    assert graphs.helper.micro_batch_size == 1
    sources = [stacked(run.batches) for run in (eager, graphs)]
    assert eager.losses(4, sources[0]) == graphs.losses(4, sources[1])
    assert (graphs.helper.micro_batch_size, graphs.helper.seq_length) == (2, 16)
    assert graphs.pipeline.graphs.num_captures == 2


def test_shapes_are_those_that_layers_see_whatever_a_forward_step_makes_of_the_batch():
    def halving(data_iterator, model):
        return gpt_forward_step(cut(data_iterator, [8]), model)

    eager, graphs = Training(small(), halving), Training(small(**GRAPHS), halving)
    assert eager.losses(5) == graphs.losses(5)
    assert graphs.helper.seq_length == 8 and graphs.pipeline.graphs.num_captures == 2


def test_a_run_says_once_for_each_shape_that_it_runs_eagerly(capsys):
    losses_of(Training(small(**PATIENT)))
    said = capsys.readouterr().err.splitlines()
    assert [line.split(" run eagerly")[0] for line in said] == [
        f"CUDA graphs: microbatches of shape [{length}, 1, 32]" for length in (8, 12, 16)
    ]
    assert "have [16, 1, 32]; after 2 whole steps in a row of that shape, layers are captured again" in said[0]


def test_shapes_that_layers_cannot_be_captured_for_stay_eager(capsys):
    """Positions of each sequence's own make tables of their own."""
    changes = {"model.position": "rope", "train.micro_batch_size": 2, "train.global_batch_size": 8}

    def with_positions(batches):
        for batch in batches:
            rows, length = batch["tokens_BS"].shape
            yield batch | {"position_ids_BS": torch.arange(length).expand(rows, -1).clone()}

    eager, graphs = Training(small(**changes)), Training(small(**changes, **GRAPHS))
    sources = [with_positions(run.batches) for run in (eager, graphs)]
    assert eager.losses(5, sources[0]) == graphs.losses(5, sources[1])
    assert graphs.pipeline.graphs.num_captures == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.endswith("layers cannot be captured for it")


def test_validation_may_have_any_shape_and_changes_nothing():
    graphs = Training(small(**GRAPHS))
    graphs.losses(3)
    for chunk in graphs.pipeline.chunks:
        chunk.eval()
    graphs.pipeline.forward_backward(cut(graphs.batches, [8] * 8), forward_only=True)
    for chunk in graphs.pipeline.chunks:
        chunk.train()
    assert graphs.losses(2) and graphs.pipeline.graphs.num_captures == 1


def test_a_full_iteration_starts_over_for_other_shapes():
    lengths = [[16] * 4] * 3 + [[8] * 4] * 3 + [[8, 16, 16, 8]] * 3
    eager, full = Training(small()), Training(small(**GRAPHS | FULL))
    assert losses_of(eager, lengths)[0] == losses_of(full, lengths)[0]


def test_layers_by_themselves_refuse_what_does_not_fit_their_graphs():
    """Nobody listens who would say that they run eagerly."""
    graphs = Training(small(**GRAPHS))
    graphs.losses(2)
    layer = graphs.helper.layers[0].layer
    with pytest.raises(GraphCaptureError, match="shapes of a graph are fixed"):
        layer(torch.zeros(8, 1, 32, requires_grad=True))


# ---- the number of microbatches ----


def with_microbatches(training: Training, count: int) -> Pipeline:
    """Go on with another number of microbatches a step, on the same model; what it ran by until then."""
    pipeline = training.pipeline
    config = pipeline.config.override({"train.global_batch_size": count})
    schedule = build_schedule(config.schedule, pp=1, vpp=1, microbatches=count)
    training.pipeline = Pipeline(config, pipeline.groups, pipeline.chunks, gpt_forward_step, schedule)
    return pipeline


def test_another_number_of_microbatches_gets_graphs_of_its_own():
    changes = {"schedule.name": "gpipe"}  # all forwards first: a graph for each microbatch
    eager, graphs = Training(small(**changes)), Training(small(**changes, **GRAPHS))
    assert eager.losses(3) == graphs.losses(3)
    old = [with_microbatches(run, 6) for run in (eager, graphs)]
    first = old[1].graphs
    assert not first.helper.graphs_created(), "the old pipeline's graphs are gone"
    assert eager.losses(3) == graphs.losses(3)
    assert (first.helper.num_microbatches, graphs.helper.num_microbatches) == (MICROBATCHES, 6)
    second = graphs.helper
    for run, pipeline in zip((eager, graphs), old, strict=True):  # and back
        run.pipeline = pipeline
    assert eager.losses(2) == graphs.losses(2)
    assert first.helper.graphs_created() and not second.graphs_created()
    held = first.helper.memory()
    assert held is not None and held.graphs == 2 * LAYERS * MICROBATCHES
