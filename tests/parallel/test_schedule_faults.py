"""Mistakes at the edges of a schedule, planted on purpose: the parity microscope names the tensor that each spoils.

Without them the same layouts agree with one process (`test_schedule_parity.py`).
"""

import runpy
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from labkit.config import RunConfig
from labkit.models import ChunkSpec, build_model_chunk, stage_contents
from labkit.parallel.weight_grad_store import WeightGradStore
from labkit.plan.stages import configured_schedule
from labkit.train import TrainResult, compare, pretrain
from labkit.train.forward_step import gpt_forward_step

MATRIX = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "parity_matrix.py"))
MICROBATCHES = MATRIX["MICROBATCHES"]
_, _, INTERLEAVED, _, ZERO_BUBBLE_H1, ZBV, _ = MATRIX["SCHEDULES"]


def with_loss(change: Callable[[Any, int], Any]) -> Callable[..., Any]:
    """The usual forward step with the sum of losses of the n-th microbatch passed through `change(sum, n)`."""
    number = count()

    def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Any, Callable[..., Any]]:
        output, loss = gpt_forward_step(data_iterator, model)

        def changed(loss_BS: Any) -> tuple[Any, Any, Any]:
            loss_sum, tokens, report = loss(loss_BS)
            return change(loss_sum, next(number) % MICROBATCHES), tokens, report

        return output, changed

    return forward_step


def a_microbatch_without_gradient(config: RunConfig, observer: Any) -> TrainResult:
    """Microbatch 3 is reported, and nothing is learned from it."""
    return pretrain(config, observer=observer, forward_step=with_loss(lambda loss, n: loss * 0.0 if n == 3 else loss))


def a_loss_divided_by_m_twice(config: RunConfig, observer: Any) -> TrainResult:
    """The runtime divides by the number of microbatches already."""
    return pretrain(config, observer=observer, forward_step=with_loss(lambda loss, _: loss / MICROBATCHES))


def the_last_w_skipped(config: RunConfig, observer: Any) -> TrainResult:
    """Stage 1 never computes the weight gradients of its last microbatch."""
    run = WeightGradStore.run

    def skipping(store: WeightGradStore, key: Any) -> None:
        if key == (1, MICROBATCHES - 1):
            store._pending.pop(key)
        else:
            run(store, key)

    WeightGradStore.run = skipping  # type: ignore[method-assign]
    try:
        return pretrain(config, observer=observer)
    finally:
        WeightGradStore.run = run  # type: ignore[method-assign]


def two_chunks_exchanged(config: RunConfig, observer: Any) -> TrainResult:
    """On the middle ranks the second chunk runs before the first, so a microbatch meets layers in the wrong order."""

    def model_provider(config: RunConfig, groups: Any, *, chunk: ChunkSpec, **ends: Any) -> Any:
        if 0 < groups.pp.rank < groups.pp.size - 1:
            schedule = configured_schedule(config, groups.world_size)
            other = schedule.stages_of(groups.pp.rank)[1 - chunk.index]
            chunk = replace(chunk, layers=stage_contents(config, schedule.num_stages)[other].layers)
        return build_model_chunk(config, groups, chunk=chunk, **ends)

    return pretrain(config, observer=observer, model_provider=model_provider)


def a_v_that_keeps_two_copies(config: RunConfig, observer: Any) -> TrainResult:
    """First and last stage are on one rank, and each has a word embedding of its own."""

    def model_provider(config: RunConfig, groups: Any, *, chunk: ChunkSpec, **ends: Any) -> Any:
        return build_model_chunk(config, groups, chunk=replace(chunk, tied_weight_VH=None), **ends)

    return pretrain(config, observer=observer, model_provider=model_provider)


FAULTS = [
    (a_microbatch_without_gradient, {"pp": 2, **ZBV}, "final_norm.bias gradient"),
    (a_loss_divided_by_m_twice, {"pp": 2, **INTERLEAVED}, "final_norm.bias gradient"),
    (the_last_w_skipped, {"pp": 2, **ZERO_BUBBLE_H1}, "layers.3.mlp.fc2.bias gradient"),
    (two_chunks_exchanged, {"pp": 4, **INTERLEAVED}, "layers.1.attention output"),
    (a_v_that_keeps_two_copies, {"pp": 2, **ZBV}, "embedding.word.weight gradient"),
]


SWEPT = (a_loss_divided_by_m_twice, two_chunks_exchanged)


@pytest.mark.parametrize(
    ("fault", "layout", "named"),
    [pytest.param(*row, id=row[0].__name__, marks=pytest.mark.sweep if row[0] in SWEPT else ()) for row in FAULTS],
)
def test_a_mistake_at_the_edge_of_a_schedule_is_found_at_the_tensor_it_spoils(fault, layout, named):
    config = MATRIX["deep"]("tiny").override({"layers": 2 * layout["pp"]})
    report = compare(config, [layout], steps=1, pretrain=fault)
    assert not report.ok
    assert report.rows[0].first_difference == named, f"\n{report}"
