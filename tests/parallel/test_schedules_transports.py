"""Random legal schedules through the runtime, over every transport: none hangs, gradients are those of one process."""

from functools import cache
from itertools import count, islice

import pytest
import torch
from pipeline_stages import SHAPE, Stage, forward_step, microbatches, reference
from random_schedules import random_legal_schedule

from labkit.config import ParallelConfig
from labkit.parallel import initialize_model_parallel
from labkit.schedules import PipelineRuntime, ScheduleError, verify

EACH = 25
"""Schedules per transport and number of ranks: 200 in all."""


def _accepted(schedule, transport):
    try:
        verify(schedule, transport)
    except ScheduleError:
        return False
    return True


def _drawn(pp, transport, first=0):
    """Random schedules that `verify` accepts for `transport`; over blocking transfers three of four cannot run."""
    seeds = count(first + 1000 * pp)
    drawn = (random_legal_schedule(seed, pp=pp, microbatches=1 + seed % 5) for seed in seeds)
    return list(islice((schedule for schedule in drawn if _accepted(schedule, transport)), EACH))


def run_all(schedules, transport):
    """Inside a rank: losses and gradients by stage, of each schedule; one layout for all of them."""
    groups = initialize_model_parallel(ParallelConfig(pp=schedules[0].pp))
    results = []
    for schedule in schedules:
        chunks = {stage: Stage(stage) for stage in schedule.stages_of(groups.pp.rank)}
        runtime = PipelineRuntime(
            schedule,
            list(chunks.values()),
            groups,
            forward_step_func=forward_step,
            tensor_shape=SHAPE,
            transport=transport,
        )
        reports = runtime.run([iter(microbatches(schedule.num_microbatches)) for _ in chunks])
        gradients = {stage: [p.grad for p in chunk.parameters()] for stage, chunk in chunks.items()}
        results.append(([report["loss"] for report in reports], gradients))
    return results


@cache
def _in_one_process(stages, number):
    return reference(stages, number)


@pytest.mark.parametrize("transport", ["posted", "batched", "even_odd", "blocking"])
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("first", [0, *(pytest.param(n * 10**5, marks=pytest.mark.sweep) for n in range(1, 6))])
def test_random_schedules_run_and_agree_with_one_process(first, pp, transport, on_ranks):
    schedules = _drawn(pp, transport, first)
    assert len(schedules) == EACH
    results = on_ranks(run_all, pp, schedules, transport)
    for number, schedule in enumerate(schedules):
        losses, gradients = _in_one_process(schedule.num_stages, schedule.num_microbatches)
        reported = [results[rank][number][0] for rank in range(pp)]
        assert [r for r in reported if r] == [pytest.approx(losses, rel=1e-12)], schedule
        seen = {stage: g for rank in range(pp) for stage, g in results[rank][number][1].items()}
        assert sorted(seen) == list(range(schedule.num_stages))
        for stage, wanted in enumerate(gradients):
            for mine, other in zip(seen[stage], wanted, strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-13, msg=lambda m, s=schedule: f"{m}\n{s}")


def test_the_draw_has_every_kind_of_placement_and_backward():
    schedules = [schedule for pp in (2, 4) for schedule in _drawn(pp, "batched")]
    placements = [tuple(schedule.placement_of_stages.tolist()) for schedule in schedules]
    looped = [p == tuple(s % max(p, default=0) for s in range(len(p))) for p in placements]
    kinds = {frozenset(action.kind for r in range(s.pp) for action in s.actions(r)) for s in schedules}
    assert {frozenset("FB"), frozenset("FIW"), frozenset("FBIW")} <= kinds
    assert (0, 1, 1, 0) in placements and (0, 1, 2, 3, 3, 2, 1, 0) in placements
    assert not all(looped)
    assert any(p[s] == p[s + 1] for p in placements for s in range(len(p) - 1)), "a message stays on its rank"
