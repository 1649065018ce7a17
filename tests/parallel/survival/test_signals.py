"""Rows SIGTERM, F2 under torchrun, and F24: a run that is asked to stop saves, torchrun restarts one that was killed,
and a slow rank is named."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import soon
from survival_runs import TINY, Course, differing_files, saving, undisturbed

from labkit.config import presets
from labkit.launch import rank_info, run
from labkit.train import RunInterrupted, pretrain
from labkit.train.forward_step import gpt_forward_step

sweep = pytest.mark.sweep
QUICK = presets.tiny().override(
    {"layers": 4, "hidden": 16, "heads": 2, "seq_length": 16, "global_batch_size": 4, "record_events": False}
)
LONG = 240
"""Steps of the runs that a command trains: several seconds, longer than the wait for a random moment in them."""


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> Course:
    """An undisturbed run of three steps on two ranks."""
    return undisturbed(tmp_path_factory.mktemp("course"), 2, TINY.override({"tp": 2}))


@pytest.fixture(scope="module")
def long(tmp_path_factory) -> Course:
    """An undisturbed run of many steps on two ranks."""
    config = TINY.override({"tp": 2, "steps": LONG, "decay_steps": LONG})
    return undisturbed(tmp_path_factory.mktemp("course"), 2, config)


class Asked:
    """An observer that sends SIGTERM to its own rank in one step."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step, self.mine = rank, step, False

    def on_model(self, groups, chunks, schedule) -> None:
        """Find out whether this is the rank."""
        self.mine = groups.world.rank == self.rank

    def on_gradients(self, step, chunks) -> None:
        """Ask before the update."""
        if self.mine and step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_update(self, step, chunks) -> None:
        """Nothing to do."""


def asked_to_stop(config, rank: int, step: int) -> tuple[int, str | None]:
    """(steps that were done, checkpoint) of a run that is asked to stop."""
    try:
        pretrain(config, observer=Asked(rank, step))
    except RunInterrupted as stopped:
        return stopped.step, stopped.checkpoint
    raise AssertionError("the run went on")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_sigterm_saves_the_step_that_was_running(tally, short, tmp_path, asynchronous):
    """`checkpoint.interval` would save only after the last step."""
    counts = tally("SIGTERM", "one rank is asked to stop")
    for rank in (0, 1):
        with counts.attempt(f"rank {rank}"):
            config = short.copy(tmp_path / "run")
            seldom = config.override({"checkpoint.interval": 100, "checkpoint.asynchronous": asynchronous})
            ends = run(asked_to_stop, 2, seldom, rank, 1)
            assert ends == [(2, str(tmp_path / "run" / "step_00000002"))] * 2
            assert short.finish(config) == 2


def start(config, folder: Path, *launcher: str) -> subprocess.Popen[str]:
    """`labkit train`, and wait for its first checkpoint."""
    path = folder.parent / f"{folder.name}.yaml"
    path.write_text(config.to_yaml())
    process = subprocess.Popen(
        [sys.executable, *launcher, "train", "--config", str(path)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    assert soon(lambda: (folder / "latest").exists() or process.poll() is not None, 60)
    return process


COMMAND = ("-m", "labkit")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3", "-m", "labkit.cli")


@sweep
@pytest.mark.timeout(900)  # ten runs, each finished in a second one
@pytest.mark.parametrize("launcher", [COMMAND, TORCHRUN], ids=["labkit train", "torchrun"])
def test_a_command_that_gets_sigterm_can_be_run_again(tally, long, tmp_path, launcher):
    name = "labkit train" if launcher is COMMAND else "torchrun"
    counts = tally("SIGTERM", f"to {name} at random times")
    for number in range(10):
        with counts.attempt(f"{number}"):
            folder = tmp_path / str(number)
            config = saving(long.config, folder, interval=100 if number % 2 else 5)
            if number % 2:  # otherwise there would be nothing to wait for
                run(pretrain, 2, config.override({"steps": 1}))
            process = start(config, folder, *launcher)
            time.sleep(random.Random(number).uniform(0, 1.5))
            process.send_signal(signal.SIGTERM)
            said, _ = process.communicate(timeout=60)
            if process.returncode == -signal.SIGTERM and not said:  # Python was still importing
                counts.counts["stopped before they listened"] += 1
                assert number % 2 and long.finish(saving(long.config, folder)) == 1
                continue
            match = re.search(rf"stopped by SIGTERM after step (\d+) of {LONG}; checkpoint: (\S+)", said)
            assert match, said
            assert (
                process.returncode == (75 if launcher is COMMAND else 1) and "Traceback" not in said.split("torch")[0]
            ), said
            assert Path(match[2]) == folder / f"step_{int(match[1]):08d}"
            assert long.finish(saving(long.config, folder)) == int(match[1])


def killed_twice(course: Course, folder: Path, chance: random.Random) -> None:
    """Train under torchrun, and kill a rank at two random times."""
    process = start(saving(course.config, folder), folder, *TORCHRUN)
    try:
        for _ in range(2):
            time.sleep(chance.uniform(0, 1.0))
            before = ranks_of(process.pid)
            assert len(before) == 2, "two ranks run"
            os.kill(chance.choice(before), signal.SIGKILL)
            assert soon(lambda old=before: len(set(ranks_of(process.pid)) - set(old)) == 2, 30)
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0, said
    finally:
        process.kill()
        process.communicate()
    assert differing_files(course.end, folder / course.end.name) == []


@sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(5))
def test_torchrun_starts_a_killed_run_again_and_it_ends_with_the_same_bits(tally, long, tmp_path, part):
    counts = tally("F2", "torchrun --max-restarts, a rank killed twice")
    for number in range(5):
        with counts.attempt(f"{part} {number}"):
            killed_twice(long, tmp_path / str(number), random.Random(f"{part} {number}"))


def ranks_of(agent: int) -> list[int]:
    """Process ids of the ranks that an agent of torchrun has started."""
    found = []
    for task in Path(f"/proc/{agent}/task").iterdir():
        try:
            children = (task / "children").read_text().split()
        except OSError:  # the thread has ended
            continue
        for child in map(int, children):
            try:
                if b"labkit.cli" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(child)
            except OSError:
                continue
    return found


def slower(config, slow: int) -> list[tuple[int, str]]:
    """A run whose ranks take 20 ms more for each microbatch, and rank `slow` 50% longer than the others in all."""

    def forward_step(batches, model):
        begun = time.monotonic()
        result = gpt_forward_step(batches, model)
        time.sleep(0.02)
        if rank_info().rank == slow:
            time.sleep(0.5 * (time.monotonic() - begun))
        return result

    result = pretrain(config, forward_step=forward_step)
    return [(step, said) for step, texts in result.series("slow_ranks") for said in texts]


@sweep
def test_a_rank_that_is_half_slower_is_named(tally):
    counts = tally("F24", "one of two ranks is 50% slower")
    for number in range(10):
        with counts.attempt(f"{number}"):
            ((step, said),) = run(slower, 2, QUICK.override({"steps": 40}), number % 2)[0]
            assert said.startswith(f"rank {number % 2} computes")
            counts.saw("steps until the rank was named", step)


@sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 2}], ids=str)
def test_no_rank_is_named_falsely(tally, layout):
    counts = tally("F24", "1,000 steps of four equal ranks")
    with counts.attempt(f"{layout}"):
        result = run(pretrain, 4, QUICK.override({"steps": 1000, "global_batch_size": 8, **layout}))[0]
        assert result.series("slow_ranks") == []
