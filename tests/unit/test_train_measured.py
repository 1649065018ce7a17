"""A step cut out of a run's Events, and its costs: a simulated step put into a run must come back as it was."""

import random
from dataclasses import replace

import pytest

from labkit.events import Event
from labkit.schedules import Schedule, one_f_one_b, simulate
from labkit.schedules.simulator import Costs
from labkit.train.reporting.measured import (
    follows,
    judge_prediction,
    pipeline_events,
    ratios_by_kind,
    stage_costs,
    step_events,
)

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


def test_ratios_are_medians_by_stage_and_kind_so_a_slow_kind_stands_out_and_one_disturbed_box_does_not():
    events = pipeline_events([run_events(0), run_events(1)])
    slow = [e.duration * (3 if e.name == "0B1" else 4 if (e.rank, e.kind) == (1, "forward") else 1) for e in events]
    found = ratios_by_kind([replace(e, end=e.start + each) for e, each in zip(events, slow)], TIMELINE.events)
    expected = {"stage 0 forward": 1, "stage 0 backward": 1, "stage 1 forward": 4, "stage 1 backward": 1}
    assert list(found) == list(expected) and found == pytest.approx(expected)


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


V = Schedule.from_csv("0F0,0F1,3F0,3I0,0B0,3W0,3F1,3I1,0B1,3W1\n1F0,2F0,1F1,2F1,2I0,1B0,2W0,2I1,1B1,2W1", "V")


def test_several_stages_a_rank_and_split_backwards():
    """A rank's Events hold two stages; layers inside an I or W report theirs under other names."""
    told = Costs(forward=[1, 2, 3, 4], backward=[3, 5, 9, 9], input_grad=[9, 9, 2, 3], weight_grad=[9, 9, 1, 2])
    timeline = simulate(V, told)
    by_rank: list[list[Event]] = [[], []]
    for event in timeline.events:
        by_rank[event.rank].append(event)
        if event.kind in ("input_grad", "weight_grad"):
            by_rank[event.rank].append(replace(event, name="layers.0.mlp", end=(event.start + event.end) / 2))
    for rank, events in enumerate(by_rank):
        events.append(Event(rank, "step", "timer", 0.0, timeline.makespan))
    measured = pipeline_events(by_rank)
    assert follows(measured, V)
    costs = stage_costs(measured, 4)
    assert (costs.forward, costs.backward) == ([1, 2, 3, 4], [3, 5, 3, 5])
    assert (costs.input_grad, costs.weight_grad) == ([1.5, 2.5, 2, 3], [1.5, 2.5, 1, 2])
    assert [(e.start, e.end) for e in simulate(V, costs).events] == [(e.start, e.end) for e in timeline.events]


def test_refusals():
    with pytest.raises(ValueError, match="index 3: 3 steps recorded"):
        step_events(run_events(0), 3)
    with pytest.raises(ValueError, match="record_events"):
        pipeline_events([[], []])
    with pytest.raises(ValueError, match="no forward of stage 1"):
        stage_costs(pipeline_events([run_events(0)]), 2)


@pytest.mark.parametrize(
    ("ratio", "load", "cores", "said"),
    [
        (1.19, 14.0, 2, ", which is within 20%"),
        (0.81, 1.0, 2, ", which is within 20%"),
        (1.52, 14.2, 2, "; this machine was busy: load 14 on 2 cores, at most 4 of it by this run"),
        (0.61, 5.0, 2, "; this machine was busy: load 5 on 2 cores, at most 4 of it by this run"),
        # four ranks alone make a load of 4, and 64 cores have room for 14
        (1.52, 4.4, 2, ", and the load shows no other program (load 4 on 2 cores)"),
        (0.7, 14.0, 64, ", and the load shows no other program (load 14 on 64 cores)"),
    ],
)
def test_a_prediction_that_misses_names_the_load_of_others(monkeypatch, ratio, load, cores, said):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert judge_prediction(ratio, ranks=4) == f"one step took {ratio:.2f} of its predicted time{said}"
