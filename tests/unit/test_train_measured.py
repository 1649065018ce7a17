"""A step cut out of a run's Events, and its costs: a simulated step put into a run must come back as it was."""

import random
from dataclasses import replace

import pytest

from labkit.events import Event
from labkit.schedules import one_f_one_b, simulate
from labkit.schedules.simulator import Costs
from labkit.train.measured import follows, pipeline_events, stage_costs, step_events

SCHEDULE = one_f_one_b(2, 4)
TIMELINE = simulate(SCHEDULE, Costs(forward=[1.0, 2.0], backward=[2.0, 5.0]))


def run_events(rank: int, steps: int = 3) -> list[Event]:
    """What pipeline rank `rank` (global rank 2 x rank) records: a step every 100 s, with other Events around."""
    events = []
    for step in range(steps):
        start = 1000.0 + 100.0 * step
        for event in (e for e in TIMELINE.events if e.rank == rank):
            begin, end = start + 1 + event.start, start + 1 + event.end
            events.append(replace(event, rank=2 * rank, start=begin, end=end))
            events.append(Event(2 * rank, "all_reduce tp", "collective", begin, end))
        events.append(Event(2 * rank, "optimizer", "optimizer", start + 60, start + 61))
        events.append(Event(2 * rank, "step", "timer", start, start + 70))
    return events


def test_the_last_step_comes_back_as_simulated():
    measured = pipeline_events([run_events(0), run_events(1)])
    back, expected = (sorted(events, key=lambda e: (e.rank, e.start)) for events in (measured, TIMELINE.events))
    assert [(e.rank, e.name, e.kind) for e in back] == [(e.rank, e.name, e.kind) for e in expected]
    assert [e.start for e in back] == pytest.approx([e.start for e in expected])
    assert [e.end for e in back] == pytest.approx([e.end for e in expected])
    costs = stage_costs(measured, 2)
    assert (costs.forward, costs.backward) == (pytest.approx([1.0, 2.0]), pytest.approx([2.0, 5.0]))
    assert simulate(SCHEDULE, costs).makespan == pytest.approx(TIMELINE.makespan)


def test_a_step_holds_what_ran_inside_it_and_no_timers():
    events = step_events(run_events(0), 1)
    assert {event.kind for event in events} == {"forward", "backward", "collective", "optimizer"}
    assert all(event.start >= 1100 and event.end <= 1170 for event in events)


def test_following_a_schedule_is_about_order_not_time():
    measured = pipeline_events([run_events(0), run_events(1)])
    random.Random(0).shuffle(measured)
    assert follows(measured, SCHEDULE)
    assert not follows(measured[1:], SCHEDULE)
    first = min(measured, key=lambda event: event.start)
    late = [replace(event, start=99.0, end=100.0) if event is first else event for event in measured]
    assert not follows(late, SCHEDULE)


def test_costs_of_several_steps_are_medians_so_one_disturbed_action_changes_nothing():
    several = [event for step in (0, 1) for event in pipeline_events([run_events(0), run_events(1)], step)]
    slow = [replace(e, end=e.end + 100.0) if n == 0 else e for n, e in enumerate(several)]
    costs = stage_costs(slow, 2)
    assert (costs.forward, costs.backward) == (pytest.approx([1.0, 2.0]), pytest.approx([2.0, 5.0]))


def test_refusals():
    with pytest.raises(ValueError, match="step 3 is not among the 3 recorded steps"):
        step_events(run_events(0), 3)
    with pytest.raises(ValueError, match="record_events"):
        pipeline_events([[], []])
    with pytest.raises(ValueError, match="no forward of stage 1"):
        stage_costs(pipeline_events([run_events(0)]), 2)
