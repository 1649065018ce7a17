"""The benchmark of sleeping pipelines in tiny form: that it runs, what its bounds are, how it reads a bubble."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from labkit.events import Event
from labkit.schedules import simulate

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import pipeline_sleep
from pipeline_sleep import BUILDERS, TORCH, Case


@pytest.mark.parametrize("case", pipeline_sleep.cases([2, 4, 8], list(BUILDERS)), ids=str)
def test_the_bounds_are_what_the_simulator_says_of_free_messages(case: Case) -> None:
    expected = simulate(case.schedule, pipeline_sleep.costs(case.schedule, case.unit)).makespan
    assert pipeline_sleep.bound(case.name, case.pp, case.microbatches, case.unit) == pytest.approx(expected)


@pytest.mark.parametrize("name", list(BUILDERS))
def test_a_tiny_run_is_no_faster_than_its_bound(name: str) -> None:
    case = Case(name, pp=2, microbatches=4, unit=0.002)
    found = pipeline_sleep.run_case(case, repetitions=2, max_load=float("inf"))
    peer = TORCH if name in ("1F1B", "interleaved") else "labkit 1F1B"
    assert list(found.seconds)[1] == peer
    bound_ms = found.facts["bound_ms"]
    assert bound_ms == pytest.approx(1e3 * pipeline_sleep.bound(name, 2, 4, case.unit))
    assert all(seconds >= 1e-3 * bound_ms for seconds in found.seconds[found.ours])
    assert "bubble" not in found.facts and found.rejected, "two repetitions are not quoted"


def test_the_bubble_is_the_idle_share_over_all_ranks() -> None:
    def busy(*spans: tuple[float, float]) -> list[Event]:
        return [Event(0, "0F0", "forward", start, end) for start, end in spans]

    # 10 s from first start to last end on both ranks; they work 6 and 9 of 20 s
    step = [busy((5.0, 8.0), (10.0, 13.0)), busy((6.0, 15.0))]
    assert pipeline_sleep.measured_bubble([[rank] for rank in step]) == pytest.approx(0.25)
