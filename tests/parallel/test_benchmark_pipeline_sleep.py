"""The benchmark of sleeping pipelines in tiny form: that it runs, what its bounds are, how it reads a bubble."""

from __future__ import annotations

import pipeline_sleep
import pytest
from pipeline_sleep import BUILDERS, BY_HAND, TORCH, Case

from labkit.events import Event
from labkit.schedules import simulate


@pytest.mark.parametrize("case", pipeline_sleep.cases([2, 4, 8], list(BUILDERS)), ids=str)
def test_the_bounds_are_what_the_simulator_says_of_free_messages(case: Case) -> None:
    expected = simulate(case.schedule, pipeline_sleep.costs(case.schedule, case.unit)).makespan
    assert pipeline_sleep.bound(case.name, case.pp, case.microbatches, case.unit) == pytest.approx(expected)


@pytest.mark.parametrize(
    "name", [name if name == "zbv" else pytest.param(name, marks=pytest.mark.sweep) for name in BUILDERS]
)
def test_a_tiny_run_is_no_faster_than_its_bound(name: str) -> None:
    case = Case(name, pp=2, microbatches=4, unit=0.002)
    found = pipeline_sleep.run_case(case, repetitions=2, max_hop=float("inf"))
    beside = {"1F1B": [TORCH, BY_HAND], "interleaved": [TORCH]}.get(name, ["labkit 1F1B"])
    assert list(found.seconds)[1:] == beside
    slept = pipeline_sleep.bound(name, 2, 4, case.unit)
    assert 1e-3 * found.facts["bound_ms"] > slept, "passes take their sleep and more"
    assert all(seconds >= slept for seconds in found.seconds[found.ours])
    kinds = {"forward", "backward"} if name in pipeline_sleep.BESIDE_TORCH else {"forward", "input_grad", "weight_grad"}
    assert set(found.facts["pass_ms"]) == kinds
    assert "bubble" not in found.facts and found.rejected, "two repetitions are not quoted"


def test_a_row_of_a_disturbed_machine_is_not_quoted() -> None:
    found = pipeline_sleep.run_case(Case("1F1B", 2, 2, 0.001), repetitions=15, max_hop=0.0)
    assert found.rejected and "bare message" in found.rejected
    assert "over_bound" not in found.facts and found.facts["bare_message_us"] > 0


def test_the_bound_is_that_of_the_passes_and_the_last_stage_has_the_loss() -> None:
    schedule = Case("interleaved", 2, 2).schedule  # four stages on two ranks
    first = {
        "forward": [3.0, 1.0, 2.0, 2.0, 90.0, 1.0],
        "backward": [5.0, 5.0, 4.0, 6.0, 5.0, 4.0],
    }  # three steps of two
    last = {"forward": [9.0, 1.0, 2.5, 2.5, 2.0, 1.0], "backward": [4.5, 4.5, 1.0, 1.0, 7.0, 7.0]}
    table = pipeline_sleep.measured_costs(schedule, [first, last]).table(4)
    assert table[0].tolist() == [2.0, 2.0, 2.0, 2.5]  # a step is its mean pass; of the steps, the median
    assert table[1].tolist() == [5.0, 5.0, 5.0, 4.5]


def test_the_bubble_is_the_idle_share_over_all_ranks() -> None:
    def busy(*spans: tuple[float, float]) -> list[Event]:
        return [Event(0, "0F0", "forward", start, end) for start, end in spans]

    # 10 s from first start to last end on both ranks; they work 6 and 9 of 20 s
    step = [busy((5.0, 8.0), (10.0, 13.0)), busy((6.0, 15.0))]
    assert pipeline_sleep.measured_bubble([[rank] for rank in step]) == pytest.approx(0.25)
