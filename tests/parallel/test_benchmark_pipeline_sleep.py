"""The benchmark of sleeping pipelines in tiny form: that it runs, what its bounds are, how it reads a bubble."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from labkit.config import ParallelConfig
from labkit.events import Event
from labkit.launch import run
from labkit.models.sleeping import Overhead
from labkit.parallel import initialize_model_parallel
from labkit.schedules import simulate

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import pipeline_sleep
from pipeline_sleep import BUILDERS, BY_HAND, SHAPE, TORCH, Case, Quiet
from sleep_by_hand import MOST, measured_overhead


@pytest.mark.parametrize("case", pipeline_sleep.cases([2, 4, 8], list(BUILDERS)), ids=str)
def test_the_bounds_are_what_the_simulator_says_of_free_messages(case: Case) -> None:
    expected = simulate(case.schedule, pipeline_sleep.costs(case.schedule, case.unit)).makespan
    assert pipeline_sleep.bound(case.name, case.pp, case.microbatches, case.unit) == pytest.approx(expected)


@pytest.mark.parametrize("name", list(BUILDERS))
def test_a_tiny_run_is_no_faster_than_its_bound(name: str) -> None:
    case = Case(name, pp=2, microbatches=4, unit=0.002)
    found = pipeline_sleep.run_case(case, repetitions=2, quiet=Quiet(load=float("inf"), hop=float("inf")))
    beside = {"1F1B": [TORCH, BY_HAND], "interleaved": [TORCH]}.get(name, ["labkit 1F1B"])
    assert list(found.seconds)[1:] == beside
    bound_ms = found.facts["bound_ms"]
    assert bound_ms == pytest.approx(1e3 * pipeline_sleep.bound(name, 2, 4, case.unit))
    least = (1 - MOST) * 1e-3 * bound_ms  # a disturbed calibration takes no more than that from a sleep
    assert all(seconds >= least for times in found.seconds.values() for seconds in times)
    assert "bubble" not in found.facts and found.rejected, "two repetitions are not quoted"


def test_a_row_of_a_disturbed_machine_is_not_quoted() -> None:
    found = pipeline_sleep.run_case(Case("1F1B", 2, 2, 0.001), repetitions=15, quiet=Quiet(float("inf"), hop=0.0))
    assert found.rejected and "bare message" in found.rejected
    assert "over_bound" not in found.facts and found.facts["bare_message_us"] > 0


def overhead_of_a_stage() -> Overhead:
    """On a rank."""
    groups = initialize_model_parallel(ParallelConfig(pp=2))
    return measured_overhead(groups, 0.005, SHAPE, microbatches=4, steps=2)


def test_what_autograd_takes_is_measured_and_no_disturbance_shortens_a_sleep_by_more_than_a_tenth() -> None:
    for overhead in run(overhead_of_a_stage, 2):
        assert 0 < overhead.forward <= MOST * 0.005
        assert 0 < overhead.backward <= MOST * 0.010
        assert 0 < overhead.input_grad <= MOST * 0.005
        assert 0 < overhead.weight_grad <= MOST * 0.005


def test_the_bubble_is_the_idle_share_over_all_ranks() -> None:
    def busy(*spans: tuple[float, float]) -> list[Event]:
        return [Event(0, "0F0", "forward", start, end) for start, end in spans]

    # 10 s from first start to last end on both ranks; they work 6 and 9 of 20 s
    step = [busy((5.0, 8.0), (10.0, 13.0)), busy((6.0, 15.0))]
    assert pipeline_sleep.measured_bubble([[rank] for rank in step]) == pytest.approx(0.25)
