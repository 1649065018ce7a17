"""Splitting and merging backwards, and the text forms, on schedules of builders and random ones."""

import pytest
from broken_schedules import broken_schedule
from hypothesis import given
from hypothesis import strategies as st
from random_schedules import random_legal_schedule

from labkit.schedules import (
    Schedule,
    ScheduleError,
    one_f_one_b,
    simulate,
    split_backward,
    verify,
    zero_bubble_h1,
)

SEEDS = st.integers(0, 10**9)
WEIGHTS = st.sampled_from(["after", "end"])


def _rows(schedule):
    return [" ".join(map(str, schedule.actions(rank))) for rank in range(schedule.pp)]


def test_what_the_passes_do():
    whole = Schedule.from_csv("0F0,0B0,0F1,0B1")
    assert _rows(split_backward(whole, weight="after")) == ["0F0 0I0 0W0 0F1 0I1 0W1"]
    assert _rows(split_backward(whole, weight="end")) == ["0F0 0I0 0F1 0I1 0W0 0W1"]
    mixed = Schedule.from_csv("0F0,0F1,0I0,0B1,0W0")
    assert _rows(split_backward(mixed, weight="end")) == ["0F0 0F1 0I0 0I1 0W0 0W1"]


@given(SEEDS, WEIGHTS)
def test_splitting_leaves_no_whole_backward_and_stays_legal(seed, weight):
    drawn = random_legal_schedule(seed)
    split = split_backward(drawn, weight=weight)
    assert "B" not in "".join(_rows(split))
    assert verify(split).schedule.placement_of_stages.tolist() == drawn.placement_of_stages.tolist()


def test_splitting_alone_sends_gradients_earlier_and_filling_gaps_needs_a_schedule():
    """Units, 4 stages, 8 microbatches: 1F1B takes (m + p - 1) * 3 = 33, ZB-H1 3m + p - 1 = 27; W after I is between."""
    plain, after = one_f_one_b(4, 8), split_backward(one_f_one_b(4, 8), weight="after")
    assert simulate(plain).makespan == 33
    assert simulate(zero_bubble_h1(4, 8)).makespan == 27
    assert 27 < simulate(after).makespan <= 33
    assert simulate(split_backward(plain, weight="end")).peak_in_flight == [8] * 4


def test_another_place_for_weight_gradients_is_refused():
    with pytest.raises(ValueError, match="'before': put weight gradients 'after' their input gradient or at the 'end'"):
        split_backward(one_f_one_b(2, 2), weight="before")


# ---- text ----
@given(SEEDS, st.text(st.characters(exclude_categories=["Cc", "Cs", "Z"]), min_size=1))
def test_text_and_csv_round_trips(seed, name):
    schedule = random_legal_schedule(seed)
    schedule.name = name
    assert str(schedule) == schedule.to_text()
    for again in (Schedule.from_text(str(schedule)), Schedule.from_csv(schedule.to_csv(), name)):
        assert again == schedule
        assert (again.name, again.num_stages) == (name, schedule.num_stages)
        assert again.num_microbatches == schedule.num_microbatches


@given(SEEDS)
def test_broken_rows_travel_unchanged_too(seed):
    _, rows, stages, microbatches = broken_schedule(seed)
    if all(rows):
        schedule = Schedule("broken", stages, microbatches, rows)
        assert [row.split() for row in _rows(Schedule.from_text(str(schedule)))] == rows
        assert [row.split() for row in _rows(Schedule.from_csv(schedule.to_csv()))] == rows


def test_text_may_be_aligned_and_have_no_name():
    text = "rank 0 |  0F0  0B0\nrank 1 |  1F0  1B0\n"
    assert Schedule.from_text(text) == one_f_one_b(2, 1)
    assert Schedule.from_text(text).name == "text"


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("mine\nrank 0: 0F0 0X0", "rank 0, position 1: '0X0' is not an action"),
        ("mine\nrank 0: 0F0\nrank 2: 1F0", "'rank 2: 1F0' is where the line of rank 1 must be"),
        ("mine\nrank 0: 0F0\n\nrank 1: 1F0", "'' is where the line of rank 1 must be"),
        ("mine\nrank 0: 0F0 0B0\nrank 1:", "rank 1 has no action"),
        ("", "at least one rank"),
        ("mine", "at least one rank"),
    ],
)
def test_what_is_no_schedule_is_named(text, needle):
    with pytest.raises(ScheduleError, match=needle):
        Schedule.from_text(text)
