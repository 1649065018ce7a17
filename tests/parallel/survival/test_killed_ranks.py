"""Rows F1 and F2: a rank killed at any moment of a step is named, nothing of the launch stays, and the restarted run
ends with the same bits."""

import contextlib
import time
from pathlib import Path

import pytest
from patience import on_this_machine
from step_faults import Plant, count_calls, killed_at_call, kills_the_one_that_waits, planted_run
from survival_runs import Course, alive, open_ports

from labkit.launch import RankError, run

LAYOUT_OF_ROW = ("tp2", "pp2", "dp2 zero")
END = 2.0
"""Seconds in which the survivors must have ended."""


@contextlib.contextmanager
def told_of_the_kill(tally, told: Path, rank: int):
    """The block raises: the rank and the signal are named in time, and neither process nor port stays."""
    for old in told.iterdir():
        old.unlink()
    with pytest.raises(RankError) as error:
        yield
    ended = time.monotonic()
    died, _, part = (told / "died").read_text().partition(" ")
    assert error.value.kind == "died" and error.value.ranks == [rank], error.value
    assert f"1 of 2 ranks died: rank {rank} was ended by SIGKILL" in error.value.summary, error.value.summary
    numbers = [list(map(int, path.read_text().split())) for path in told.glob("rank-*")]
    assert len(numbers) == 2 and alive([pid for pid, *_ in numbers]) == []
    assert not {port for _, *ports in numbers for port in ports} & open_ports(), "a port is still open"
    assert ended - float(died) < on_this_machine(END), f"the survivors ended {ended - float(died):.2f} s after the kill"
    tally.saw("seconds until the survivors ended", ended - float(died))
    tally.counts[part] += 1


def kill_and_restart(row_1, row_2, course: Course, folder: Path, rank: int, moments: range, of: int) -> None:
    """Kill `rank` at some of `of` moments that are spread over the calls of a step, and start the run again."""
    told = folder / "told"
    told.mkdir()
    calls = run(count_calls, course.ranks, course.copy(folder / "run"), rank, told)[rank]
    assert calls > 1000
    for moment in moments:
        at = round(0.98 * calls * (moment + 0.5) / of)
        config = course.copy(folder / "run")
        with row_1.attempt(f"rank {rank}, call {at} of {calls}"), told_of_the_kill(row_1, told, rank):
            run(killed_at_call, course.ranks, config, rank, at, told)
        with row_2.attempt(f"rank {rank}, call {at} of {calls}"):
            row_2.counts[f"went on after step {course.finish(config)}"] += 1


@pytest.mark.parametrize(("layout", "rank"), [("tp2", 1), ("pp2", 0)])
def test_a_rank_killed_at_some_moments_of_a_step(tally, course, tmp_path, layout, rank):
    rows = tally("F1", layout), tally("F2", f"started again, {layout}")
    kill_and_restart(*rows, course(layout), tmp_path, rank, range(1, 3), 4)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUT_OF_ROW)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("part", range(5))
def test_a_rank_killed_at_fifty_moments_of_a_step(tally, course, tmp_path, layout, rank, part):
    """25 moments of each rank, in parts of five."""
    rows = tally("F1", layout), tally("F2", f"started again, {layout}")
    kill_and_restart(*rows, course(layout), tmp_path, rank, range(5 * part, 5 * part + 5), 25)


@pytest.mark.parametrize("attempts", [1, pytest.param(20, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_inside_an_all_reduce(tally, course, tmp_path, victim, attempts):
    """The other rank comes late, and kills the one that waits for it."""
    found, told = course("tp2"), tmp_path / "told"
    told.mkdir()
    row_1, row_2 = tally("F1", "inside an all-reduce, tp2"), tally("F2", "started again, all-reduce cut off")
    for number in range(attempts):
        config = found.copy(tmp_path / "run")
        plant = Plant(kills_the_one_that_waits(str(told), victim), 1 - victim, str(told), forward=2 + number % 2)
        with row_1.attempt(f"{number}"), told_of_the_kill(row_1, told, victim):
            run(planted_run, 2, config, plant)
        with row_2.attempt(f"{number}"):
            found.finish(config)
