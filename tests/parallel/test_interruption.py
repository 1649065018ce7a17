"""SIGTERM on real ranks: all leave after the same step, whoever was asked, and the command exits with 75."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from labkit.config import RunConfig, presets
from labkit.launch import rank_info
from labkit.train import RunInterrupted, pretrain

SMALL = ["--preset", "tiny", "--layers", "2", "--hidden", "16", "--heads", "2", "--seq-length", "16",
         "--global-batch-size", "4"]  # fmt: skip
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


class Asks:
    """Sends SIGTERM to its own rank in one step, and counts the updates that it sees."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step, self.updates = rank, step, 0

    def on_model(self, groups: Any, chunks: Sequence[nn.Module], schedule: Any) -> None:
        """Nothing to do."""

    def on_gradients(self, step: int, chunks: Sequence[nn.Module]) -> None:
        if (rank_info().rank, step) == (self.rank, self.step):
            os.kill(os.getpid(), signal.SIGTERM)

    def on_update(self, step: int, chunks: Sequence[nn.Module]) -> None:
        self.updates += 1


def interrupted(config: RunConfig, rank: int, step: int) -> tuple[int, int]:
    """(step of the exception, updates). The signal comes to this rank once more when the run has ended."""
    asks = Asks(rank, step)
    try:
        pretrain(config, observer=asks)
    except RunInterrupted as stopped:
        os.kill(os.getpid(), signal.SIGTERM)
        return stopped.step, asks.updates
    raise AssertionError("the run went on")


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"tp": 2}),
    (2, {"distributed_optimizer": True, "overlap_param_gather": True}),
    (2, {"cuda_graph_impl": "full_iteration", "cuda_graph_warmup_steps": 1}),
    (4, {"tp": 2, "pp": 2}),
]


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=lambda value: str(value))
def test_all_ranks_leave_after_the_step_in_which_one_was_asked(on_ranks, world_size: int, layout: dict) -> None:
    shape = {"layers": 2, "hidden": 32, "heads": 4, "seq_length": 16, "global_batch_size": 4, "steps": 50}
    config = presets.tiny().override(shape | {"record_events": False} | layout)
    for rank in (0, world_size - 1):
        assert on_ranks(interrupted, world_size, config, rank, 3) == [(4, 4)] * world_size


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a command that trains into a folder, and return once it has finished a step."""
    started: list[subprocess.Popen[str]] = []

    def begin(command: list[str], folder: Path) -> subprocess.Popen[str]:
        words = [*command, *SMALL, "--steps", "100000", "--output-dir", str(folder), "--overwrite"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        started.append(process)
        while not steps_in(folder):
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def steps_in(folder: Path) -> list[int]:
    """Numbers of the steps in metrics.jsonl."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]


def check_stopped(out: str, folder: Path) -> None:
    """The command said once where it stopped, and wrote nothing after that step."""
    (said,) = re.findall(r"^stopped by SIGTERM after step ([\d,]+) of 100,000; nothing was saved$", out, re.M)
    steps = steps_in(folder)
    assert steps == list(range(1, int(said.replace(",", "")) + 1))
    assert json.loads((folder / "run.json").read_text())["state"] == "unfinished"


def test_sigterm_to_labkit_train_ends_its_ranks_after_the_step(start, tmp_path: Path) -> None:
    process = start([sys.executable, "-m", "labkit.cli", "train", "--nproc", "2"], tmp_path)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    check_stopped(out, tmp_path)
    assert "Traceback" not in err


def test_sigterm_to_every_process_of_the_run_is_one_request(start, tmp_path: Path) -> None:
    """As `scancel` and a time limit do: the launching process and each rank get the signal."""
    process = start([sys.executable, "-m", "labkit.cli", "train", "--nproc", "2"], tmp_path)
    family = [*descendants(process.pid), process.pid]
    assert len(family) >= 4, "the command, the fork server, two ranks"
    for pid in family:
        os.kill(pid, signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    check_stopped(out, tmp_path)


def descendants(pid: int) -> list[int]:
    """Process ids of all children and their children. A thread may end while this looks at it."""
    found: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError):
            children = Path(f"/proc/{pid}/task/{task}/children").read_text()
            for child in map(int, children.split()):
                found += [child, *descendants(child)]
    return found


def ranks_of(agent: int) -> list[int]:
    """Process ids of the ranks that a torchrun agent has started."""
    return [pid for pid in descendants(agent) if b"labkit.cli" in Path(f"/proc/{pid}/cmdline").read_bytes()]


HANGS = """
import sys, time
import labkit.cli.train_command as train
train.train_on_rank = lambda config: (print("here"), open(sys.argv[1], "w").close(), time.sleep(600))
from labkit.cli import main
sys.exit(main(["train", "--preset", "tiny", "--nproc", "1"]))
"""


def test_a_second_sigterm_kills_ranks_that_do_not_end(tmp_path: Path) -> None:
    script, up = tmp_path / "script.py", tmp_path / "up"
    script.write_text(HANGS)
    process = subprocess.Popen([sys.executable, str(script), str(up)], stderr=subprocess.PIPE, text=True)
    try:
        while not up.exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        time.sleep(1.5)
        assert process.poll() is None, "one request waits"
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130 and re.search(r"^the ranks were killed \d s after SIGTERM", err, re.M), err


@pytest.mark.parametrize("which", ["rank", pytest.param("agent", marks=pytest.mark.sweep)])
def test_sigterm_to_torchrun_or_to_one_of_its_ranks(start, tmp_path: Path, which: str) -> None:
    """torchrun passes the signal on and waits for its ranks. A rank that is asked alone takes the others with it."""
    process = start([*TORCHRUN, "-m", "labkit.cli", "train"], tmp_path)
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2
    os.kill(process.pid if which == "agent" else ranks[1], signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    check_stopped(out, tmp_path)
    if which == "rank":
        codes = set(re.findall(r"exitcode  : (-?\d+)", err))  # torchrun may end a rank that is on its way out
        assert "75" in codes and codes <= {"75", "-15"}, err


@pytest.mark.timeout(1800)
@pytest.mark.sweep
def test_after_kill_9_of_a_rank_torchrun_starts_all_again(start, tmp_path: Path) -> None:
    """At any point of a step. `test_slurm.py` kills one rank of two agents every day."""
    for run in range(6):
        folder = tmp_path / str(run)
        agent = start([*TORCHRUN, "--max-restarts", "3", "-m", "labkit.cli", "train"], folder)
        for attempt in range(3):
            before = ranks_of(agent.pid)
            assert len(before) == 2
            (folder / "metrics.jsonl").rename(folder / f"metrics-{attempt}")
            os.kill(before[(run + attempt) % 2], signal.SIGKILL)
            began = time.monotonic()
            while any(Path(f"/proc/{pid}").exists() for pid in before):
                assert time.monotonic() < began + 20, "the other rank hangs"
                time.sleep(0.02)
            while not steps_in(folder):
                assert agent.poll() is None and time.monotonic() < began + 120, "the ranks do not find each other"
                time.sleep(0.05)
            print(f"run {run}, restart {attempt}: a step after {time.monotonic() - began:.1f} s")
        agent.send_signal(signal.SIGTERM)
        check_stopped(agent.communicate(timeout=60)[0], folder)
