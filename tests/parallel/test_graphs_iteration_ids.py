"""Ids outside the vocabulary under a graph of the whole iteration: the error of a run without, in every layout."""

from collections.abc import Iterator

import pytest
import torch

from labkit.config import RunConfig, presets
from labkit.launch import RankError
from labkit.train import pretrain
from labkit.train.forward_step import gpt_forward_step

FULL = {"graph.cuda_graph_impl": "full_iteration", "graph.cuda_graph_warmup_steps": 1}
MICROBATCHES, BAD_STEP = 2, 3


def small(**changes) -> RunConfig:
    shape = {
        "model.layers": 1, "model.hidden": 32, "model.heads": 4, "model.seq_length": 16,
        "train.global_batch_size": MICROBATCHES * changes.get("dp", 1), "train.steps": BAD_STEP + 2,
    }  # fmt: skip
    return presets.tiny().override(shape).override({key: x for key, x in changes.items() if key != "dp"})


def spoiled(batches: Iterator, key: str, value: int, first: int) -> Iterator:
    """The second microbatch of the `first` step gets a bad id."""
    for number, batch in enumerate(batches):
        if number == first * MICROBATCHES + 1:
            batch[key][0, 0 if key == "tokens_BS" else -1] = value  # tokens and labels share memory in between
        yield batch


def outcome(config: RunConfig, key: str, value: int, step: int, forward_step=gpt_forward_step) -> str:
    """The error that a rank sees. Only the last data-parallel replica has bad data."""
    import labkit.train.pretraining as pretraining

    plain = pretraining.data_iterator

    def made(dataset, config, groups, **options):
        batches = plain(dataset, config, groups, **options)
        return spoiled(batches, key, value, step) if groups.dp.rank == groups.dp.size - 1 else batches

    pretraining.data_iterator = made
    try:
        pretrain(config, forward_step=forward_step)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        pretraining.data_iterator = plain
    return "trained on"


CASES = {
    "one rank, token": (1, {}, "tokens_BS", 1100),
    "one rank, negative label": (1, {}, "labels_BS", -7),
    "tp2, token": (2, {"tp": 2}, "tokens_BS", -7),
    "tp2, label": (2, {"tp": 2}, "labels_BS", 1100),
    "tp2, sequence parallel, full recomputation": (
        2, {"tp": 2, "sequence_parallel": True, "recompute_granularity": "full"}, "tokens_BS", 1100,
    ),
    "cp2, label": (2, {"cp": 2}, "labels_BS", 1100),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_bad_id_is_the_error_of_a_run_without_graphs(on_ranks, name):
    world, changes, key, value = CASES[name]
    for step in (BAD_STEP, 1):  # a replay; the step that captures
        eager = on_ranks(outcome, world, small(**changes), key, value, step)
        graphs = on_ranks(outcome, world, small(**changes, **FULL), key, value, step)
        assert graphs == eager
        what = "token" if key == "tokens_BS" else "label"
        assert all(said.startswith(f"TokenIdError: {what} id {value} at position (0, ") for said in eager), eager


@pytest.mark.parametrize("optimizer", [{}, {"optim.distributed_optimizer": True, "optim.overlap_param_gather": True}])
def test_a_bad_id_of_one_replica_ends_the_run_by_its_own_error(on_ranks, optimizer):
    """The others wait for its gradients; nobody trains on."""
    with pytest.raises(RankError, match=r"token id 1100 at position \(0, 0\) of \(1, 16\) is outside the vocabulary"):
        on_ranks(spoiled_run, 2, small(dp=2, **FULL, **optimizer), "tokens_BS", 1100, BAD_STEP)


def spoiled_run(config: RunConfig, key: str, value: int, step: int) -> None:
    said = outcome(config, key, value, step)
    if said != "trained on":
        raise ValueError(said)


def rolled_forward_step(data_iterator, model):
    """Its own labels, made of the tokens inside the iteration."""
    batch = next(data_iterator)
    return gpt_forward_step(iter([batch | {"labels_BS": batch["other_BS"].roll(-1, dims=1)}]), model)


def other_ids(batches: Iterator) -> Iterator:
    for batch in batches:
        yield batch | {"other_BS": batch["tokens_BS"].clone()}


def computed(config: RunConfig) -> tuple[str, int]:
    """(the error, how many steps had ended by then)."""
    from labkit.train.pipeline import Pipeline
    from labkit.train.pretraining import build_data_iterators, initialize, setup_model_and_optimizer
    from labkit.train.stepping import train_step

    run = initialize(config)
    chunks, optimizer, _ = setup_model_and_optimizer(run)
    pipeline = Pipeline(config, run.groups, chunks, rolled_forward_step, run.schedule)
    batches = spoiled(other_ids(build_data_iterators(run).train(0)), "other_BS", 1100, BAD_STEP)
    ended = 0
    before = []
    try:
        for step in range(config.train.steps):
            before = [p.detach().clone() for chunk in chunks for p in chunk.parameters()]
            train_step(pipeline, optimizer, run.timers, batches, step=step, lr=1e-3, clip_grad=1.0)
            ended += 1
    except ValueError as error:
        after = [p for chunk in chunks for p in chunk.parameters()]
        assert all(map(torch.equal, before, after)), "no weight has changed"
        return f"{type(error).__name__}: {error}", ended
    return "trained on", ended


def test_ids_that_are_computed_inside_are_looked_at_before_the_update(on_ranks):
    eager, graphs = (on_ranks(computed, 2, small(tp=2, **more)) for more in ({}, FULL))
    assert graphs == eager
    said = "TokenIdError: label id 1100 at position (0, 14) of (1, 16)"
    assert all(error.startswith(said) and ended == BAD_STEP for error, ended in eager), eager
