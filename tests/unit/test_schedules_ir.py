"""Schedules as data: text, CSV, numpy columns, placement, TE's order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.schedules import Action, Schedule, ScheduleError, gpipe, one_f_one_b

SIZES = {"pp": st.integers(1, 8), "microbatches": st.integers(1, 12)}


@given(stage=st.integers(0, 10**6), kind=st.sampled_from("FBIW"), microbatch=st.integers(0, 10**6))
def test_an_action_prints_and_parses_back(stage, kind, microbatch):
    action = Action(stage, kind, microbatch)
    assert Action.parse(str(action)) == action
    assert str(Action(2, "F", 0)) == "2F0"


@given(builder=st.sampled_from([gpipe, one_f_one_b]), **SIZES)
def test_csv_round_trip(builder, pp, microbatches):
    schedule = builder(pp, microbatches)
    again = Schedule.from_csv(schedule.to_csv())
    assert again == schedule
    assert (again.pp, again.num_stages, again.num_microbatches) == (pp, pp, microbatches)
    assert "" not in [cell for line in schedule.to_csv().splitlines() for cell in line.split(",")]


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("0F0,0B0\n1F0,1G0\n", "row 2, column 2: '1G0'"),
        ("0F0,,0B0", "row 1, column 2 is blank"),
        ("0F0,0B0\n\n1F0,1B0", "row 2 is empty"),
        ("  \n", "no rows"),
        ("rank,0F0", "row 1, column 1: 'rank'"),
        ("0F-1", "row 1, column 1: '0F-1'"),
        ("0F0 0B0", "row 1, column 1"),
        (
            "0F0,0B0\n1F0,1B999999999",
            "1B999999999 makes 2 stages x 1000000000 microbatches of 4 actions: is it mistyped",
        ),
    ],
)
def test_a_malformed_cell_is_named(text, needle):
    with pytest.raises(ScheduleError, match=needle):
        Schedule.from_csv(text)


def test_what_lies_outside_the_schedule_is_refused():
    with pytest.raises(ScheduleError, match="rank 1, position 1: 1F3 is outside 2 stages and 3 microbatches"):
        Schedule("mine", 2, 3, [["0F0"], ["1F0", "1F3"]])
    with pytest.raises(ScheduleError, match="rank 1 has no action"):
        Schedule("mine", 2, 3, [["0F0"], []])
    with pytest.raises(ValueError, match="rank 2 is not in this schedule"):
        gpipe(2, 2).actions(2)


def test_placement_follows_the_rows_looped_and_v():
    looped = Schedule.from_csv("0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0")
    v = Schedule.from_csv("0F0,3F0,3I0,0I0,3W0,0W0\n1F0,2F0,2I0,1I0,2W0,1W0")
    assert [looped.placement(stage) for stage in range(4)] == [0, 1, 0, 1]
    assert [v.placement(stage) for stage in range(4)] == [0, 1, 1, 0]
    assert v.stages_of(0) == [0, 3]
    assert v.chunk(3) == 1
    assert looped.order(1) == [1, 2, -2, -1]
    assert v.order(1) == [1, 2, -2, -1, -2.5, -1.5]


def test_order_matches_the_sources_for_1f1b():
    assert one_f_one_b(4, 4).order(0) == [1, 1, 1, 1, -1, -1, -1, -1]
    assert one_f_one_b(4, 4).order(3) == [1, -1] * 4


def test_actions_and_columns_tell_the_same_story():
    schedule = one_f_one_b(3, 4)
    listed = [a for rank in range(3) for a in schedule.actions(rank)]
    assert np.array_equal(schedule.stages, [a.stage for a in listed])
    assert Schedule(schedule.name, 3, 4, [schedule.actions(rank) for rank in range(3)]) == schedule
    assert schedule.actions(1)[2] == Action(1, "B", 0)


def test_importing_schedules_leaves_torch_alone():
    import subprocess
    import sys

    code = "import sys, labkit.schedules as s; s.simulate(s.one_f_one_b(2, 2)); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
