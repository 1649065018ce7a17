"""Schedules as data: text, CSV, numpy columns, placement, TE's order."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.config import RunConfig, ScheduleConfig
from labkit.schedules import Action, Schedule, ScheduleError, build_schedule, gpipe, one_f_one_b, simulate
from labkit.schedules.ir import read_schedule
from labkit.train.run_schedule import schedule_problem

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
        ("0F0,0B0\n1F0,1G0\n", "rank 1, position 1: '1G0'"),
        ("0F0,,0B0", "rank 0, position 1 is blank"),
        ("0F0,0B0\n\n1F0,1B0", "rank 1 has an empty line"),
        ("  \n", "no rows"),
        ("rank,0F0", "rank 0, position 0: 'rank'"),
        ("0F-1", "rank 0, position 0: '0F-1'"),
        ("0F0,0B0\u20281F0,1B0", "rank 0, position 1"),  # which ends no line of a file
        ("0F0 0B0", "rank 0, position 0.*; separate actions by commas"),
        ("0F0;0B0", "rank 0, position 0: '0F0;0B0' is not an action.*; separate actions by commas, without quotes"),
        ("0F0\t0B0", "rank 0, position 0.*; separate actions by commas"),
        ('"0F0","0B0"', "rank 0, position 0.*; separate actions by commas, without quotes"),
        ("\u0660F0,0B0", "rank 0, position 0: '\u0660F0' is not an action"),  # a digit, and no number of ours
        ("0F0" * 1000, "rank 0, position 0: '(0F0){13}0' is not an action"),
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


def test_a_stage_on_several_ranks_belongs_to_the_one_with_most_of_it():
    rows = [["0F0", "2F0", "2F1"], ["0F1", "2F2", "2F3", "0F2"], ["0F3", "0F4", "2F4"]]
    broken = Schedule("broken", 5, 5, rows)
    assert broken.placement_of_stages.tolist() == [2, 1, 1, 0, 1]  # ties to the last rank; nobody's s to s mod pp


def test_thousands_of_ranks_take_megabytes():
    tracemalloc.start()
    try:
        timeline = simulate(one_f_one_b(4096, 1))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert timeline.makespan == 3 * 4096
    assert most < 32 * 2**20  # a table of ranks and stages alone would take 128 MiB


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf0F0,0B0\r\n1F0,1B0\r\n\r\n",
        b"0F0,0B0\r1F0,1B0",
        b"\xef\xbb\xbfmine\r\nrank 0: 0F0 0B0\r\nrank 1: 1F0 1B0\r\n",
    ],
    ids=["csv-of-excel", "old-line-ends", "text"],
)
def test_files_are_read_with_any_line_ends_and_a_byte_order_mark(tmp_path, content):
    path = tmp_path / "mine.csv"
    path.write_bytes(content)
    mine = read_schedule(path)
    assert mine == one_f_one_b(2, 1) and mine.name == "mine"
    assert build_schedule(ScheduleConfig(path=str(path)), pp=2, microbatches=1) == mine
    assert Schedule.from_csv("0F0,0B0\r\n1F0,1B0\r\n\r\n") == mine


def test_what_cannot_be_read_is_one_sentence(tmp_path):
    latin = tmp_path / "latin.csv"
    latin.write_bytes("0F0,0B0,Größe".encode("latin-1"))
    (tmp_path / "empty.csv").write_bytes(b"\xef\xbb\xbf\r\n")
    for path, rule in ((tmp_path, "is a folder; give a file"), (tmp_path / "none.csv", "no such file"),
                       (latin, "not UTF-8 text: save it as CSV UTF-8")):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{rule}$"):
            read_schedule(path)
        with pytest.raises(ValueError, match=f"^{path}: {rule}$"):
            build_schedule(ScheduleConfig(path=str(path)), pp=2, microbatches=1)
    with pytest.raises(ScheduleError, match="the text has no rows"):
        read_schedule(tmp_path / "empty.csv")


def test_a_configuration_says_that_a_path_is_a_directory(tmp_path):
    problems = RunConfig(schedule=ScheduleConfig(path=str(tmp_path))).problems()
    assert [p for p in problems if "schedule.path" in p and "is a folder; give a file" in p]
    assert not [p for p in problems if "no such file" in p]


def test_a_file_with_one_stage_a_rank_is_refused_in_good_english(tmp_path):
    path = tmp_path / "d_mixed.csv"
    path.write_text(one_f_one_b(2, 4).to_csv())
    config = RunConfig().replaced({
        "parallel.pp": 2, "parallel.vpp": 2, "train.global_batch_size": 4, "train.micro_batch_size": 1,
        "schedule.path": str(path),
    })  # fmt: skip
    assert "d_mixed has 1 stage per rank, but parallel.vpp is 2" in schedule_problem(config, 2)


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
