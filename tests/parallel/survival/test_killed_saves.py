"""Row F4: kill -9 at any moment of a save leaves a complete checkpoint, and the run started again has the same bits."""

import os
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from save_faults import SaveFault, announced_run, calls_of_a_save, watched_run
from survival_runs import LAYOUTS, TINY, Course, complete_steps, saving, undisturbed

from labkit.launch import RankError, run
from labkit.train import pretrain

sweep = pytest.mark.sweep
MARK = "damaged"
"""A file in a checkpoint that a test has damaged."""
MANNERS = {"synchronous": {}, "asynchronous": {"checkpoint.asynchronous": True}}


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """`course(layout, manner)`: an undisturbed run, and how many seconds its save after step 2 takes."""
    made: dict[tuple[str, str], tuple[Course, float]] = {}

    def get(layout: str, manner: str) -> tuple[Course, float]:
        if (layout, manner) not in made:
            ranks, changes = LAYOUTS[layout]
            folder = tmp_path_factory.mktemp("course")
            config = TINY.override({**changes, "checkpoint.dir": "later", **MANNERS[manner]})
            found = undisturbed(folder, ranks, config)
            timed = run(announced, ranks, found.copy(folder / "timed"), 2, folder, False)
            made[layout, manner] = found, max(result.seconds for result in timed)
        return made[layout, manner]

    return get


def announced(config, step, pids, hold):
    return announced_run(config, step, str(pids), hold=hold)


def check_what_is_left(course: Course, folder: Path, *, damaged: str = "") -> str:
    """After a kill every checkpoint is complete, and a restart ends as the undisturbed run. Say where the kill came.

    damaged: a checkpoint that was damaged before.
    """
    left, steps = {path.name for path in folder.iterdir()}, complete_steps(folder, but=damaged)
    assert steps and steps[0] in (1, 2), f"checkpoints of steps {steps}"
    assert steps[0] == 2 or damaged or "step_00000002" not in left, "a complete checkpoint is passed over"
    after = course.finish(saving(course.config, folder))
    assert after == steps[0]
    if any(name.endswith((".partial", ".old")) for name in left):
        return "in the save"
    return "before it" if after == 1 else "after it"


# ---- at every call that changes the disk ----


def kill_at_every_call(tally, course: Course, folder: Path, rank: int, *, damaged: str = "") -> tuple[str, ...]:
    """Kill the rank before each call of its save, and once more with files that have lost what was not synced."""
    calls, unsynced = calls_of_a_save(course, folder / "counted", rank)
    moments = [(at, False) for at in range(len(calls))] + [(at, True) for at in unsynced]
    for at, torn in moments:
        with tally.attempt(f"rank {rank} killed before call {at}, {calls[at]}{', files torn' * torn}"):
            config = course.copy(folder / "run")
            with pytest.raises(RankError, match=f"rank {rank} was ended by SIGKILL"):
                run(watched_run, course.ranks, config, SaveFault(2, rank, at, torn))
            old = folder / "run" / damaged
            still = damaged if damaged and old.is_dir() and (old / MARK).exists() else ""
            tally.counts[check_what_is_left(course, folder / "run", damaged=still)] += 1
    return calls


@sweep
def test_a_save_may_end_at_each_of_its_calls(tally, course, tmp_path):
    calls = kill_at_every_call(
        tally("F4", "every call of a save, 1 rank"), course("1 rank", "synchronous")[0], tmp_path, 0
    )
    kinds = {call.split()[0] for call in calls}
    assert kinds >= {"mkdir", "save_file", "fsync", "open", "rename", "replace", "unlink", "rmdir"}, calls


@pytest.mark.parametrize(
    ("layout", "manner", "rank"),
    [
        pytest.param("1 rank", "asynchronous", 0, marks=sweep),
        pytest.param("dp2 zero", "synchronous", 0, marks=sweep),
        pytest.param("dp2 zero", "synchronous", 1, marks=sweep),
        pytest.param("pp2", "asynchronous", 0, marks=sweep),
        pytest.param("pp2", "asynchronous", 1, marks=sweep),
    ],
)
def test_a_save_of_several_ranks_may_end_at_each_call_of_one(tally, course, tmp_path, layout, manner, rank):
    found = course(layout, manner)[0]
    calls = kill_at_every_call(tally("F4", f"every call of a save, {layout}, {manner}"), found, tmp_path, rank)
    assert any(call.startswith("rename") for call in calls) == (rank == 0), "rank 0 commits"


@pytest.mark.sweep
def test_a_save_in_the_place_of_a_damaged_checkpoint_may_end_at_each_of_its_calls(tally, course, tmp_path):
    """Step 2 was there before and is damaged, so the save after step 2 first moves it away."""
    whole, begun, other = course("1 rank", "synchronous")[0], tmp_path / "begun", tmp_path / "other"
    run(pretrain, 1, whole.copy(other).override({"steps": 2}))
    shutil.copytree(other, begun)
    shutil.copytree(whole.begun / "step_00000001", begun / "step_00000001")
    os.truncate(next((begun / "step_00000002").glob("*.safetensors")), 1000)
    (begun / "step_00000002" / MARK).touch()
    counts = tally("F4", "every call of a save in the place of a damaged checkpoint")
    again = replace(whole, begun=begun)
    calls = kill_at_every_call(counts, again, tmp_path, 0, damaged="step_00000002")
    assert sum(call.startswith("rename") for call in calls) == 3, calls


# ---- at random moments ----


def kill_at_random(tally, course: Course, seconds: float, folder: Path, seed: str) -> None:
    """Kill a random rank from outside, at a random moment of the save after step 2 or shortly after it."""
    chance = random.Random(seed)
    victim, moment = chance.randrange(course.ranks), chance.uniform(0.0, 1.2 * seconds)
    with tally.attempt(f"seed {seed}: rank {victim} killed after {1e3 * moment:.1f} ms of {1e3 * seconds:.1f}"):
        pids = folder / "pids"
        pids.mkdir(exist_ok=True)

        def kill(values: dict) -> None:
            if "saving" in values:
                time.sleep(moment)
                os.kill(int((pids / f"rank-{victim}").read_text()), signal.SIGKILL)

        config = course.copy(folder / "run")
        with pytest.raises(RankError, match=f"rank {victim} was ended by SIGKILL"):
            run(announced, course.ranks, config, 2, pids, True, progress=kill)
        tally.counts[check_what_is_left(course, folder / "run")] += 1


RANDOM = {"1 rank, synchronous": 7, "1 rank, asynchronous": 7, "dp2 zero, synchronous": 3, "tp2, asynchronous": 3}
"""Run -> moments without the sweep, 20 in all."""
BATCHES = [
    *(pytest.param(name, 0, count) for name, count in RANDOM.items()),
    *(pytest.param(name, batch, 10, marks=sweep) for name in RANDOM for batch in range(1, 6)),
]


@pytest.mark.parametrize(("name", "batch", "count"), BATCHES)
def test_a_rank_killed_in_a_save_leaves_a_complete_checkpoint(tally, course, tmp_path, name, batch, count):
    """20 moments without the sweep, 200 in it."""
    found, seconds = course(*name.split(", "))
    counts = tally("F4", f"random moments, {name}")
    for number in range(count):
        kill_at_random(counts, found, seconds, tmp_path, f"{name} {batch} {number}")
