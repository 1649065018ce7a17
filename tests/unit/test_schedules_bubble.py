"""The split of idle time: exact for any schedule, equal to the closed forms, and naming the cause of a gap."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.schedules import (
    Costs,
    Schedule,
    bubble_split,
    dualpipe_v,
    explain_gap,
    gpipe,
    interleaved,
    one_f_one_b,
    simulate,
    without_backward,
    zbv,
    zero_bubble_h1,
)
from labkit.schedules.bubble import PARTS, split_timeline

SIZES = {"pp": st.integers(1, 7), "microbatches": st.integers(1, 12)}
TIMES = {"f": st.integers(1, 9), "b": st.integers(1, 9)}
V_SPLIT = Schedule.from_csv(
    "0F0,0F1,3F0,3I0,0I0,3W0,0W0,3F1,3I1,0I1,3W1,0W1\n1F0,2F0,1F1,2F1,2I0,1I0,2W0,1W0,2I1,1I1,2W1,1W1"
)
"""pp 2, stages down and up again, every backward split."""


@st.composite
def timelines(draw):
    """A timeline of a known schedule under random costs, with messages or without."""
    pp, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    builders = (
        gpipe,
        one_f_one_b,
        zero_bubble_h1,
        zbv,
        lambda p, m: dualpipe_v(p, m + 2 * p),
        lambda p, m: interleaved(p, min(p, 2), m * p),
        lambda p, m: without_backward(one_f_one_b(p, m)),
    )
    schedule = draw(st.sampled_from(builders))(pp, microbatches)
    per_stage = st.lists(st.integers(0, 20), min_size=schedule.num_stages, max_size=schedule.num_stages)
    forward, inputs, weights = draw(per_stage), draw(per_stage), draw(per_stage)
    latency = draw(st.sampled_from([0, 0, 1, 7]))
    return simulate(schedule, Costs(forward=forward, input_grad=inputs, weight_grad=weights, latency=latency))


@given(timelines())
@settings(max_examples=150)
def test_the_parts_are_the_idle_time_and_none_is_negative(timeline):
    split = split_timeline(timeline)
    assert split.idle.tolist() == (timeline.makespan - timeline.busy).tolist()  # whole numbers, so exactly
    assert min(split.total.values()) >= 0
    assert sum(split.total.values()) == timeline.makespan * timeline.schedule.pp - timeline.busy.sum()
    if timeline.costs.latency == 0 or timeline.schedule.pp == 1:
        assert split.communication.tolist() == [0] * timeline.schedule.pp


@given(timelines())
@settings(max_examples=50)
def test_communication_is_what_vanishes_with_free_messages(timeline):
    free = simulate(timeline.schedule, replace(timeline.costs, latency=0))
    assert split_timeline(timeline).communication.tolist() == [timeline.makespan - free.makespan] * timeline.schedule.pp
    for part in ("warm_up", "steady", "cool_down"):
        assert getattr(split_timeline(timeline), part).tolist() == getattr(split_timeline(free), part).tolist()


@given(**SIZES, **TIMES)
def test_1f1b_by_its_closed_form(pp, microbatches, f, b):
    microbatches += pp - 1  # enough for a steady phase
    split = split_timeline(simulate(one_f_one_b(pp, microbatches), Costs(forward=f, backward=b)))
    ranks = np.arange(pp)
    assert split.warm_up.tolist() == (ranks * f + (pp - ranks - 1) * b).tolist()
    assert split.cool_down.tolist() == ((pp - ranks - 1) * f + ranks * b).tolist()
    assert split.steady.tolist() == [0] * pp


@given(**SIZES, **TIMES)
def test_gpipe_by_its_closed_form(pp, microbatches, f, b):
    split = split_timeline(simulate(gpipe(pp, microbatches), Costs(forward=f, backward=b)))
    ranks = np.arange(pp)
    assert split.warm_up.tolist() == (ranks * f + (pp - ranks - 1) * (f + b)).tolist()
    assert split.cool_down.tolist() == (ranks * b).tolist()


@pytest.mark.parametrize("latency", [0, 2, 5])
def test_one_microbatch_pays_for_each_message_on_its_way_down_and_up(latency):
    timeline = simulate(one_f_one_b(4, 1), Costs(forward=3, backward=4, latency=latency))
    assert split_timeline(timeline).communication.tolist() == [2 * 3 * latency] * 4
    assert (split_timeline(timeline).idle - split_timeline(timeline).communication).tolist() == [3 * (3 + 4)] * 4


@given(pp=st.integers(2, 5), vpp=st.integers(1, 4), rounds=st.integers(1, 4), **TIMES)
@settings(max_examples=50)
def test_interleaving_by_its_closed_form(pp, vpp, rounds, f, b):
    """(p - 1)(F + B) of one chunk on every rank, where 1F1B pays for the whole of its stage: v chunks."""
    chunks = split_timeline(simulate(interleaved(pp, vpp, rounds * pp), Costs(forward=f, backward=b)))
    whole = split_timeline(simulate(one_f_one_b(pp, rounds * pp), Costs(forward=vpp * f, backward=vpp * b)))
    assert chunks.idle.tolist() == [(pp - 1) * (f + b)] * pp
    assert whole.idle.tolist() == [vpp * (pp - 1) * (f + b)] * pp


def test_a_slow_stage_is_imbalance_elsewhere():
    even, slow = (simulate(one_f_one_b(4, 16), Costs(forward=[1, 1, f, 1], backward=2)) for f in (1, 3))
    assert split_timeline(even).steady.sum() == 0
    assert split_timeline(slow).steady[[0, 3]].min() > 15  # 2 more for each of the microbatches in the steady phase
    assert split_timeline(slow).steady[2] <= 4


@given(timelines(), st.integers(-5, 5))
@settings(max_examples=30)
def test_measured_events_of_a_prediction_split_alike(timeline, origin):
    events = [replace(e, start=e.start + origin, end=e.end + origin) for e in reversed(timeline.events)]
    split = bubble_split(events, timeline.schedule)
    assert {part: pytest.approx(time) for part, time in split.total.items()} == split_timeline(timeline).total


def stretched(timeline, factor_of):
    """What would be measured if actions took longer: the same schedule simulated with other durations."""
    table = timeline.costs.table(timeline.schedule.num_stages)
    for (kind, stage), factor in factor_of.items():
        table["FBIW".index(kind), stage] *= factor
    forward, backward, inputs, weights = table.tolist()
    costs = replace(timeline.costs, forward=forward, backward=backward, input_grad=inputs, weight_grad=weights)
    return simulate(timeline.schedule, costs)


@pytest.mark.parametrize("schedule", [one_f_one_b(4, 8), gpipe(4, 8), interleaved(4, 2, 8)])
@pytest.mark.parametrize(("kind", "stage"), [("F", 0), ("B", 1), ("F", 3), ("B", 3)])
def test_a_slower_kind_on_a_stage_is_named(schedule, kind, stage):
    predicted = simulate(schedule, Costs(forward=0.01, backward=0.02))
    measured = stretched(predicted, {(kind, stage): 1.5})
    gap = explain_gap(predicted, measured.events)
    assert (gap.part, gap.rank, gap.stage, gap.kind) == ("computation", schedule.placement(stage), stage, kind)
    extra = schedule.num_microbatches * (0.005 if kind == "F" else 0.01)
    assert gap.difference == pytest.approx(extra)
    assert gap.detail == pytest.approx(extra)
    word = "forward" if kind == "F" else "backward"
    assert f"computation on rank {gap.rank}: +{extra * 1e3:.1f} ms, of it +{extra * 1e3:.1f} ms in the {word}" in str(
        gap
    )


def test_a_cause_is_named_before_idle_time_that_is_hardly_longer():
    """Stage 2 is slower; rank 0 waits for it, and a little longer than that, since it is faster itself."""
    predicted = simulate(one_f_one_b(4, 32), Costs(forward=0.01, backward=0.02))
    measured = stretched(predicted, {("B", 2): 1.5, ("F", 0): 0.8})
    added = {
        part: float(getattr(split_timeline(measured), part)[0] - getattr(split_timeline(predicted), part)[0])
        for part in PARTS
    }
    assert 0.32 < max(added.values()) < 0.32 / 0.9
    gap = explain_gap(predicted, measured.events)
    assert (gap.part, gap.rank, gap.kind) == ("computation", 2, "B")
    much = explain_gap(predicted, stretched(predicted, {("B", 2): 1.5, ("F", 0): 0.5}).events)
    assert (much.part, much.rank) == ("steady", 0)
    assert "what differs most is the steady-phase wait on rank 0: +" in str(much)


def test_split_backwards_are_named_by_half():
    predicted = simulate(V_SPLIT, Costs(forward=0.01, input_grad=0.01, weight_grad=0.01))
    gap = explain_gap(predicted, stretched(predicted, {("W", 2): 3.0}).events)
    assert (gap.rank, gap.stage, gap.kind) == (1, 2, "W")
    assert "in the weight gradient of stage 2" in str(gap)


def test_a_slow_link_is_named_by_the_rank_that_waits():
    schedule = one_f_one_b(4, 8)
    costs = Costs(forward=0.01, backward=0.02)
    slow = [[0.0] * 4 for _ in range(4)]
    slow[1][2] = 0.03
    measured = simulate(schedule, replace(costs, latency=slow))
    gap = explain_gap(simulate(schedule, costs), measured.events)
    assert (gap.part, gap.rank) == ("communication", 2)
    assert gap.difference == pytest.approx(measured.makespan - 11 * 0.03)
    assert "what differs most is the communication wait on rank 2: +" in str(gap)
    assert str(gap).startswith(f"the step took {measured.makespan / 0.33:.2f} of the predicted time")


def test_faster_than_predicted_is_said_with_a_minus():
    predicted = simulate(one_f_one_b(2, 4), Costs(forward=0.01, backward=0.02))
    gap = explain_gap(predicted, stretched(predicted, {("B", 1): 0.5}).events)
    assert (gap.stage, gap.kind) == (1, "B")
    assert "-40.0 ms, of it -40.0 ms in the backward of stage 1" in str(gap)


def test_refusals_name_the_action():
    schedule = one_f_one_b(2, 2)
    events = simulate(schedule).events
    with pytest.raises(ValueError, match="1B1 was not measured"):
        bubble_split([e for e in events if e.name != "1B1"], schedule)
    with pytest.raises(ValueError, match="0F0 was measured twice"):
        bubble_split([*events, events[0]], schedule)
    with pytest.raises(ValueError, match="2F0 was measured but is not in 1F1B"):
        bubble_split([*events, replace(events[0], name="2F0")], schedule)
    other = simulate(gpipe(2, 2)).events
    with pytest.raises(ValueError, match="rank 1 ran 1F1 before 1B0, which is not the order of 1F1B"):
        explain_gap(simulate(schedule), other)


def test_the_split_prints_its_parts():
    split = split_timeline(simulate(one_f_one_b(2, 2)))
    assert str(split) == "idle 6 over 2 ranks: warm-up 3, steady-phase wait 0, communication wait 0, cool-down 3"


def test_equal_stages_may_wait_in_the_steady_phase_too():
    """Interleaved on 4 ranks: 3F4 on the last rank ends at 20, rank 0 has ended 4B1 at 19 and runs 4F4 next. That is no
    imbalance, so the part must not be called one."""
    timeline = simulate(interleaved(4, 2, 8))
    cells = [str(action) for rank in range(4) for action in timeline.schedule.actions(rank)]
    ended = dict(zip(cells, timeline.end.tolist(), strict=True))
    assert cells[13:15] == ["4B1", "4F4"]
    assert (ended["4B1"], ended["3F4"], ended["4F4"]) == (19, 20, 21)
    assert split_timeline(timeline).steady.tolist() == [1, 0, 0, 0]
    assert split_timeline(timeline).idle.tolist() == [3 * (1 + 2)] * 4
    assert ", steady-phase wait 1, " in str(split_timeline(timeline))
