"""Bad token ids that the device notes and the host reads when the step ends, as on a GPU: here on host tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.comm.capturing import GraphCaptureError
from labkit.config import RunConfig, presets
from labkit.graphs.emulated.host_syncs import refuse_uncapturable
from labkit.parallel import TokenIdError, VocabParallelEmbedding, check_token_ids, single_process_groups
from labkit.parallel import token_ids_checked_late as checked_late
from labkit.parallel.vocab import token_ids
from labkit.train.evaluation import collect_non_loss_data, evaluate
from labkit.train.forward_step import gpt_forward_step
from labkit.train.pipeline import Pipeline
from labkit.train.pretraining import build_data_iterators, initialize, setup_model_and_optimizer
from labkit.train.reporting.metrics import Timers
from labkit.train.stepping import train_step

MICROBATCHES, BAD_STEP = 2, 2
PLACE = {"tokens_BS": 0, "labels_BS": 15}
"""Of the bad id: tokens and labels share memory in between."""
FULL = {"graph.cuda_graph_impl": "full_iteration", "graph.cuda_graph_warmup_steps": 1}


@contextmanager
def as_on_a_gpu(late: bool = True) -> Iterator[None]:
    usual = set(token_ids.LATE_DEVICES)
    token_ids.LATE_DEVICES |= {"cpu"} if late else set()
    try:
        yield
    finally:
        token_ids.LATE_DEVICES = usual


def small(microbatches: int = MICROBATCHES, dp: int = 1, **changes: Any) -> RunConfig:
    shape = {
        "model.layers": 2, "model.hidden": 32, "model.heads": 4, "model.seq_length": 16,
        "train.global_batch_size": microbatches * dp, "train.micro_batch_size": 1,
    }  # fmt: skip
    return presets.tiny().override(shape).override(changes)


def pipeline_of(config: RunConfig) -> tuple[Pipeline, Any, Iterator[dict[str, Tensor]]]:
    run = initialize(config)
    chunks, optimizer, _ = setup_model_and_optimizer(run)
    pipeline = Pipeline(config, run.groups, chunks, gpt_forward_step, run.schedule)
    return pipeline, optimizer, build_data_iterators(run).train(0)


def spoiled(batches: Iterator[dict[str, Tensor]], key: str, value: int) -> Iterator[dict[str, Tensor]]:
    """The second microbatch of step `BAD_STEP` has a bad id."""
    for number, batch in enumerate(batches):
        if number == BAD_STEP * MICROBATCHES + 1:
            batch[key][0, PLACE[key]] = value
        yield batch


def outcome(config: RunConfig, key: str, value: int, late: bool) -> tuple[str, int, bool]:
    """(the error on this rank, how many steps had ended, whether the last one left the weights as they were).

    Only the last data-parallel replica has bad data."""
    with as_on_a_gpu(late):
        pipeline, optimizer, batches = pipeline_of(config)
        if pipeline.groups.dp.rank == pipeline.groups.dp.size - 1:
            batches = spoiled(batches, key, value)
        weights = [p for chunk in pipeline.chunks for p in chunk.parameters()]
        for step in range(BAD_STEP + 2):
            before = [p.detach().clone() for p in weights]
            try:
                train_step(pipeline, optimizer, Timers(0), batches, step=step, lr=1e-3, clip_grad=1.0)
            except TokenIdError as error:
                return str(error), step, all(map(torch.equal, before, weights))
    return "trained on", BAD_STEP + 2, False


CASES: dict[str, tuple[int, dict[str, Any], str, int]] = {
    "one rank, token": (1, {}, "tokens_BS", 1100),
    "one rank, label": (1, {}, "labels_BS", -7),
    "tp2, token": (2, {"tp": 2}, "tokens_BS", -7),
    "tp2, sequence parallel, label": (2, {"tp": 2, "sequence_parallel": True}, "labels_BS", 1100),
    "pp2, token": (2, {"pp": 2}, "tokens_BS", 2**40),
    "pp2, label": (2, {"pp": 2}, "labels_BS", 1024),
    "dp2, token": (2, {"dp": 2}, "tokens_BS", 1100),
    "dp2, distributed optimizer, label": (2, {"dp": 2, "optim.distributed_optimizer": True}, "labels_BS", -1),
    "full recomputation, token": (1, {"recompute_granularity": "full"}, "tokens_BS", 1100),
    "one rank, graph, token": (1, FULL, "tokens_BS", 1100),
    "tp2, graph, label": (2, {"tp": 2, **FULL}, "labels_BS", -7),
    "dp2, graph, token": (2, {"dp": 2, **FULL}, "tokens_BS", -7),
}


@pytest.mark.parametrize("name", CASES)
def test_every_rank_ends_with_the_error_of_a_check_at_once_and_no_weight_changes(on_ranks, name: str) -> None:
    world, changes, key, value = CASES[name]
    found = on_ranks(outcome, world, small(**changes), key, value, True)
    what = "token" if key == "tokens_BS" else "label"
    error = (
        f"{what} id {value} at position (0, {PLACE[key]}) of (1, 16) is outside the vocabulary 0..1023; "
        "check that the tokenizer and the model have the same vocabulary"
    )
    assert found == [(error, BAD_STEP, True)] * world
    [(at_once, *_)] = on_ranks(outcome, 1, small(), key, value, False)
    assert at_once == error


def outcome_of_validation(config: RunConfig, key: str, value: int, steps: int) -> str:
    """The error on this rank of an evaluation whose second microbatch is bad in the last replica."""
    with as_on_a_gpu():
        pipeline, _, batches = pipeline_of(config)
        given = [next(batches) for _ in range(steps * MICROBATCHES)]
        if pipeline.groups.dp.rank == pipeline.groups.dp.size - 1:
            given[1] = given[1] | {key: given[1][key].clone()}
            given[1][key][0, 5] = value
        with pytest.raises(TokenIdError) as error:
            evaluate(pipeline, iter(given), steps)
    return str(error.value)


@pytest.mark.parametrize(
    ("layout", "key"), [({"pp": 2}, "tokens_BS"), ({"pp": 2}, "labels_BS"), ({"dp": 2}, "labels_BS")], ids=str
)
def test_a_validation_ends_with_one_error_on_every_rank(on_ranks, layout: dict[str, int], key: str) -> None:
    """Only one rank has looked the bad id up."""
    found = on_ranks(outcome_of_validation, 2, small(**layout), key, 5000, 2)
    assert len(set(found)) == 1 and "id 5000 at position (0, 5) of (1, 16)" in found[0]


class Waits(TorchDispatchMode):
    """Counts what would make the host wait for a GPU: what no CUDA graph can hold."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.seen: list[str] = []
        for name in ("tolist", "cpu", "numpy"):
            monkeypatch.setattr(Tensor, name, self._counted(name, getattr(Tensor, name)))

    def _counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.seen.append(name)
            return method(tensor, *args, **kwargs)

        return counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            refuse_uncapturable(func, args, kwargs or {})
        except GraphCaptureError as error:
            self.seen.append(str(error))
        return func(*args, **(kwargs or {}))


def waits_of_a_step(microbatches: int, late: bool, changes: dict[str, Any]) -> tuple[int, int]:
    """(waits in the forwards and backwards of a step, waits in all of the step)."""
    with as_on_a_gpu(late), pytest.MonkeyPatch.context() as patch:
        pipeline, optimizer, batches = pipeline_of(small(microbatches, **changes))
        inside = 0
        run = pipeline.forward_backward

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            before = len(waits.seen)
            found = run(*args, **kwargs)
            inside = len(waits.seen) - before
            return found

        patch.setattr(pipeline, "forward_backward", counted)
        given, waits = [next(batches) for _ in range(3 * microbatches)], Waits(patch)
        batches = iter(given)  # the iterator pins what it copies to a GPU
        for step in range(3):  # with a graph: an eager step, a capture, a replay
            waits.seen.clear()
            with waits if step == 2 else nullcontext():
                train_step(pipeline, optimizer, Timers(0), batches, step=step, lr=1e-3, clip_grad=1.0)
    return inside, len(waits.seen)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "full iteration"])
def test_no_microbatch_makes_the_host_wait(graph: bool) -> None:
    changes = FULL if graph else {}
    assert waits_of_a_step(2, True, changes) == (0, 2), "the loss and the norm, once a step"
    assert waits_of_a_step(5, True, changes) == (0, 2)


def test_the_count_of_waits_sees_checks_at_once() -> None:
    assert waits_of_a_step(2, False, {}) == (2 * 2, 2 * 2 + 2), "two for each microbatch"


def test_validation_looks_where_it_has_waited_for_the_loss() -> None:
    with as_on_a_gpu():
        pipeline, _, batches = pipeline_of(small())
        assert evaluate(pipeline, batches, 1)["loss"] > 0
        for run in (lambda found: evaluate(pipeline, found, 2), lambda found: collect_non_loss_data(pipeline, found)):
            bad = [batch | {"labels_BS": batch["labels_BS"].clone()} for batch, _ in zip(batches, range(4))]
            bad[1]["labels_BS"][0, 5] = 5000
            with pytest.raises(TokenIdError, match=r"label id 5000 at position \(0, 5\) of \(1, 16\)"):
                run(iter(bad))
        assert evaluate(pipeline, batches, 1)["loss"] > 0, "nothing is left of the notes"


def test_a_model_by_itself_checks_at_once_on_any_device() -> None:
    embedding = VocabParallelEmbedding("e", 50, 4, group=single_process_groups().tp, divisible_by=1)
    bad = torch.tensor([[3, 50], [-1, 49]])
    with as_on_a_gpu(), pytest.raises(TokenIdError, match=r"token id 50 at position \(0, 1\) of \(2, 2\)"):
        embedding(bad)
    with as_on_a_gpu(), checked_late("cpu") as ids:
        first = embedding(bad.t())  # of (2, 2) in the order of the transpose: 3, -1, 50, 49
        embedding(bad)
    assert torch.equal(first[1, 0], embedding.weight[49]), "clamped: no lookup leaves the table"
    with pytest.raises(TokenIdError, match=r"token id -1 at position \(0, 1\) of \(2, 2\)"):
        ids.look()
    ids.look()  # told once
    with checked_late("cpu") as at_once, pytest.raises(TokenIdError):
        embedding(bad)
    assert not at_once.late and at_once.alarm() == []


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_notes_are_those_of_each_call_and_good_ids_pass_unchanged(dtype: torch.dtype) -> None:
    good = torch.tensor([0, 49], dtype=dtype)
    with as_on_a_gpu(), checked_late("cpu") as ids:
        assert torch.equal(check_token_ids(good, 50), good)
        empty = torch.empty(0, dtype=dtype)
        assert check_token_ids(empty, 50) is empty
        assert [float(x) for x in ids.alarm()] == [0.0] and ids.error() is None
        held = torch.tensor([1, 2**31 - 1, -5], dtype=dtype)
        assert check_token_ids(held, 50, "label").tolist() == [1, 49, 0]
        held.fill_(0)  # a loader that hands out the same memory again
        check_token_ids(torch.tensor([60], dtype=dtype), 61)
    assert all(x.isnan() for x in ids.alarm())
    with pytest.raises(TokenIdError, match=r"label id 2147483647 at position \(1,\) of \(3,\) .* 0\.\.49"):
        ids.look()


class OnGpu(Tensor):
    """A host tensor that says it lies on a GPU, where anybody may capture: torch.cuda.graph, Transformer Engine."""

    is_cuda = True  # type: ignore[assignment]


def test_ids_go_unchecked_in_a_capture_that_labkit_did_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_ids, "is_graph_capturing", lambda: True)
    ids = torch.tensor([-1, 50]).as_subclass(OnGpu)
    assert check_token_ids(ids, 50) is ids, "nobody can look, so the capture goes on"
    with as_on_a_gpu(), checked_late("cpu") as checks:
        assert check_token_ids(ids, 50) is ids
    assert checks.alarm() == [], "a note would be read from memory that no replay has written"
