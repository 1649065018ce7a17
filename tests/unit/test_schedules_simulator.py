"""The builders' formulas hold in the simulator, and what cannot run is refused with its picture."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.schedules import Costs, Schedule, ScheduleError, gpipe, one_f_one_b, simulate, without_backward

SIZES = {"pp": st.integers(1, 9), "microbatches": st.integers(1, 20)}
TIMES = {"f": st.integers(1, 9), "b": st.integers(1, 9)}


@given(builder=st.sampled_from([gpipe, one_f_one_b]), **SIZES, **TIMES)
def test_bubble_formulas(builder, pp, microbatches, f, b):
    timeline = simulate(builder(pp, microbatches), Costs(forward=f, backward=b))
    assert timeline.makespan == (microbatches + pp - 1) * (f + b)
    assert timeline.bubble_fraction == pytest.approx((pp - 1) / (microbatches + pp - 1))
    assert timeline.bubble_ratio == pytest.approx((pp - 1) / microbatches)


@given(**SIZES)
def test_peak_in_flight_formulas(pp, microbatches):
    assert simulate(gpipe(pp, microbatches)).peak_in_flight == [microbatches] * pp
    assert simulate(one_f_one_b(pp, microbatches)).peak_in_flight == [min(pp - r, microbatches) for r in range(pp)]


@given(**SIZES)
def test_1f1b_program_string(pp, microbatches):
    for rank in range(pp):
        w = min(pp - rank - 1, microbatches)
        kinds = "".join(action.kind for action in one_f_one_b(pp, microbatches).actions(rank))
        assert kinds == "F" * w + "FB" * (microbatches - w) + "B" * w


@given(builder=st.sampled_from([gpipe, one_f_one_b]), latency=st.floats(0, 3), **SIZES, **TIMES)
@settings(max_examples=50)
def test_no_action_starts_before_what_it_needs(builder, pp, microbatches, f, b, latency):
    schedule = builder(pp, microbatches)
    when = {e.name: e for e in simulate(schedule, Costs(forward=f, backward=b, latency=latency)).events}
    for stage in range(pp):
        for microbatch in range(microbatches):
            forward, backward = when[f"{stage}F{microbatch}"], when[f"{stage}B{microbatch}"]
            assert backward.start >= forward.end
            if stage:
                assert forward.start >= when[f"{stage - 1}F{microbatch}"].end + latency
                assert when[f"{stage - 1}B{microbatch}"].start >= backward.end + latency
    for rank in range(pp):
        row = [when[str(action)] for action in schedule.actions(rank)]
        assert all(first.end <= second.start for first, second in itertools.pairwise(row))


def test_costs_per_stage_and_message():
    slow_last = simulate(one_f_one_b(2, 1), Costs(forward=[1, 5], backward=[2, 7], latency=0.5))
    assert [(e.name, e.start, e.end) for e in slow_last.events] == [
        ("0F0", 0, 1), ("0B0", 14, 16), ("1F0", 1.5, 6.5), ("1B0", 6.5, 13.5),
    ]  # fmt: skip
    by_size = Costs(latency=1, seconds_per_byte=0.25, message_bytes=8)
    assert simulate(one_f_one_b(2, 1), by_size).makespan == (1 + 3 + 1) + (2 + 3 + 2)


def test_messages_by_link_and_direction():
    """0F0 ends at 1, 4 + 8/2 later at rank 1; its backward takes 3 + 2, and its message 6 + 2/4."""
    links = Costs(
        latency=[[9, 4], [6, 9]],
        seconds_per_byte=[[9, 1 / 2], [1 / 4, 9]],
        message_bytes=8,
        gradient_bytes=2,
        backward=3,
    )
    events = {e.name: (e.start, e.end) for e in simulate(one_f_one_b(2, 1), links).events}
    assert events == {"0F0": (0, 1), "1F0": (9, 10), "1B0": (10, 13), "0B0": (19.5, 22.5)}
    assert links.messages(2).tolist() == [[[0, 8], [8, 0]], [[0, 5], [6.5, 0]]]


V = "0F0,0F1,3F0,3I0,0I0,3W0,0W0,3F1,3I1,0I1,3W1,0W1\n1F0,2F0,1F1,2F1,2I0,1I0,2W0,1W0,2I1,1I1,2W1,1W1"
MIXED = "0F0,2F0,0F1,2I0,2F1,0B0,2B1,0B1,2W0\n1F0,1F1,1I0,1W0,1B1"


@given(
    st.sampled_from([one_f_one_b(3, 4), gpipe(4, 3), Schedule.from_csv(V), Schedule.from_csv(MIXED)]),
    st.lists(st.floats(0.01, 9), min_size=12, max_size=12),
    st.sampled_from([0.0, 0.3, 5.0]),
)
def test_times_are_those_of_a_plain_relaxation(schedule, durations, latency):
    """Judge: dictionaries, one action after another, over and over until no start moves."""
    stages = schedule.num_stages
    costs = Costs(forward=durations[:stages], input_grad=durations[-stages:], weight_grad=0.7, latency=latency)
    table = dict(zip("FBIW", costs.table(stages).tolist(), strict=True))
    rows = [schedule.actions(rank) for rank in range(schedule.pp)]
    start = {str(action): 0.0 for row in rows for action in row}
    end = dict.fromkeys(start, 0.0)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            for previous, a in zip([None, *row], row, strict=False):
                needs = [f"{a.stage}I{a.microbatch}"] if a.kind == "W" else []
                needs += [f"{a.stage}F{a.microbatch}"] if a.kind in "BI" else []
                ready = [end[need] for need in needs] + ([end[str(previous)]] if previous else [])
                other = a.stage + {"F": -1, "W": stages}.get(a.kind, 1)
                if 0 <= other < stages:
                    kinds = "F" if a.kind == "F" else "BI"
                    made = next(f"{other}{k}{a.microbatch}" for k in kinds if f"{other}{k}{a.microbatch}" in end)
                    ready.append(end[made] + (latency if schedule.placement(other) != rank else 0.0))
                begin = max(ready, default=0.0)
                moved |= begin != start[str(a)] or end[str(a)] != begin + table[a.kind][a.stage]
                start[str(a)], end[str(a)] = begin, begin + table[a.kind][a.stage]
    assert {e.name: (e.start, e.end) for e in simulate(schedule, costs).events} == {
        name: (start[name], end[name]) for name in start
    }


def test_a_message_within_a_rank_is_free():
    v = Schedule.from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0")
    assert simulate(v, Costs(latency=10)).makespan == 4 * 1 + 4 * 2 + 4 * 10  # 0>1, 2>3 and back


def test_split_backward_keeps_activations_until_the_weight_gradient():
    late = Schedule.from_csv("0F0,0F1,0I0,0I1,0W0,0W1")
    soon = Schedule.from_csv("0F0,0I0,0W0,0F1,0I1,0W1")
    assert simulate(late).peak_in_flight == [2]
    assert simulate(soon).peak_in_flight == [1]
    assert [e.kind for e in simulate(soon).events[:3]] == ["forward", "input_grad", "weight_grad"]


def test_memory_is_weighed_by_stage_and_freed_by_halves():
    """Stage 0 weighs 2, of which I frees a quarter; stage 1 weighs 5."""
    schedule = Schedule.from_csv("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1")
    timeline = simulate(schedule, Costs(activation=[2, 5], freed_by_input_grad=[0.25, 0]))
    assert timeline.memory(0)[1].tolist() == [0, 2, 4, 3.5, 2, 1.5, 0]
    assert timeline.memory(1)[1].tolist() == [0, 5, 5, 10, 10, 5, 0]
    assert timeline.peak_memory == [4, 10]
    assert timeline.peak_in_flight == [2, 2]
    events = {event.name: event for event in timeline.events}
    assert timeline.memory(0)[0].tolist() == [0, 0, 1, *(events[name].end for name in ("0I0", "0W0", "0I1", "0W1"))]


@given(**SIZES)
def test_memory_of_equal_stages_counts_what_is_in_flight(pp, microbatches):
    timeline = simulate(one_f_one_b(pp, microbatches))
    assert timeline.peak_memory == timeline.peak_in_flight
    assert simulate(without_backward(one_f_one_b(pp, microbatches))).peak_memory == [0] * pp


def test_forward_only_keeps_nothing():
    timeline = simulate(without_backward(one_f_one_b(4, 6)))
    assert timeline.makespan == 6 + 4 - 1
    assert timeline.peak_in_flight == [0, 0, 0, 0]


def test_in_flight_curve_matches_events():
    times, counts = simulate(one_f_one_b(4, 8)).in_flight(0)
    assert counts.max() == 4
    assert counts[-1] == 0
    assert (np.diff(times) >= 0).all()


@pytest.mark.parametrize(
    ("text", "needles"),
    [
        ("0F0,0B0\n1B0,1F0", ["rank 1 waits for a later action of its own", r"\[1B0\]", "1B0 waits for 1F0"]),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", ["rank 0 -> rank 1 -> rank 0", r"\[0B0\]", r"\[1F1\]",
                                              "0B0 waits for 1B0, which rank 1 runs after 1F1"]),
        ("0F0,0B0,0F1\n1F0,1B0,1F1,1B1", ["0B1 is missing"]),
        ("0F0,0B0,0F1,0B1\n1F0,1B0,1B1", ["1F1 is missing"]),
        ("0F0,0I0\n1F0,1B0", ["0W0 is missing"]),
        ("0F0,0B0,0I0,0W0", ["0B0 is a full backward, although there is a split one"]),
        ("0F0,0F0,0B0", [r"\[0F0\]", "0F0 appears more than once"]),
        ("0F0,0B0,1B0\n1F0,1F1,1B1,0F1,0B1", ["1B0 is on a rank that does not hold its stage"]),
    ],
)  # fmt: skip
def test_what_cannot_run_is_drawn_and_named(text, needles):
    for needle in needles:
        with pytest.raises(ScheduleError, match=needle):
            simulate(Schedule.from_csv(text))


def test_mistyped_sizes_are_refused_without_a_table_of_gigabytes():
    with pytest.raises(ScheduleError, match="0F1 is missing\n0F2 is missing"):
        simulate(Schedule("mistyped", 2, 10**9, [["0F0", "0B0"], ["1F0", "1B0"]]))


@given(st.permutations(list(range(8))), st.permutations(list(range(8))))
def test_a_shuffled_schedule_runs_or_is_refused(first, second):
    rows = [[list(one_f_one_b(2, 4).actions(rank))[i] for i in order] for rank, order in enumerate((first, second))]
    schedule = Schedule("shuffled", 2, 4, rows)
    done: set[str] = set()  # an independent judge: tokens, one rank at a time
    heads = [0, 0]
    moved = True
    while moved:
        moved = False
        for rank in range(2):
            while heads[rank] < 8:
                a = rows[rank][heads[rank]]
                needs = [f"0F{a.microbatch}"] if a.stage else []
                if a.kind == "B":
                    needs = [f"{a.stage}F{a.microbatch}", *([] if a.stage else [f"1B{a.microbatch}"])]
                if not all(need in done for need in needs):
                    break
                done.add(str(a))
                heads[rank] += 1
                moved = True
    if len(done) == 16:
        assert simulate(schedule).makespan > 0
    else:
        with pytest.raises(ScheduleError, match="cannot run, "):
            simulate(schedule)


@pytest.mark.parametrize(
    ("costs", "problem"),
    [
        (Costs(forward=[1, 2, 3]), "forward has shape .3,.: give one number, or one for each of the 2 stages"),
        (Costs(backward=-1), "backward is -1: costs are finite and not negative"),
        (Costs(forward=float("nan")), "forward is nan"),
        (Costs(latency=[[0, 1]]), "latency has shape .1, 2.: give one number, or 2 x 2"),
        (Costs(seconds_per_byte=-1), "seconds_per_byte is -1"),
        (Costs(gradient_bytes=-5), "gradient_bytes is -5"),
        (Costs(message_bytes=float("inf")), "message_bytes is inf"),
        (Costs(activation=[1]), "activation has shape"),
        (Costs(freed_by_input_grad=1.5), "freed_by_input_grad is 1.5: it is a share"),
    ],
)
def test_bad_costs_are_refused(costs, problem):
    with pytest.raises(ValueError, match=problem):
        simulate(gpipe(2, 2), costs).memory(0)


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (2, -1), (1.5, 2), ("4", 2)])
def test_bad_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="whole number"):
        one_f_one_b(*sizes)


def test_large_schedules_stay_columns():
    timeline = simulate(one_f_one_b(64, 2048))
    assert timeline.makespan == (2048 + 63) * 3
    assert timeline.schedule.stages.nbytes < 64 * 4096 * 4 + 1
