"""examples/slurm/train.sbatch on two "nodes" of this machine: two agents of torchrun meet on loopback.

`srun`, `scancel` and `scontrol` are small scripts on the path. Everything else is real: the agents, their ranks, the
signals, the exit codes.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "slurm" / "train.sbatch"
SMALL = ["--preset", "tiny", "--layers", "2", "--hidden", "16", "--heads", "2", "--seq-length", "16",
         "--global-batch-size", "4"]  # fmt: skip
STUBS = {
    "srun": """
while [[ $1 == --* ]]; do shift; done
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
    "$@" &
    echo $! >>"$JOB/agents"
done
code=0
for agent in $(<"$JOB/agents"); do
    wait "$agent" || code=$?
done
exit $code
""",
    "scancel": """
[[ $* == "--signal=TERM $SLURM_JOB_ID" ]] && kill -TERM $(<"$JOB/agents")
""",
    "scontrol": """
case "$*" in
"show hostnames $SLURM_JOB_NODELIST") printf '%s\\n' 127.0.0.1 127.0.0.2 ;;
"requeue $SLURM_JOB_ID") echo "$SLURM_JOB_ID" >>"$JOB/requeued" ;;
*) exit 1 ;;
esac
""",
}


class Job:
    """The script as a job of two nodes with a rank each."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder, self.metrics = folder, folder / "run" / "metrics.jsonl"
        (folder / "bin").mkdir()
        for name, body in STUBS.items():
            (folder / "bin" / name).write_text(f"#!/bin/bash{body}")
            (folder / "bin" / name).chmod(0o755)
        environment = {
            **os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "JOB": str(folder), "OMP_NUM_THREADS": "1",
            "PYTHON": sys.executable, "RANKS_PER_NODE": "1", "PET_LOCAL_ADDR": "127.0.0.1", "SLURM_JOB_ID": free_job(),
            "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2",
        }  # fmt: skip
        self.process = subprocess.Popen(
            ["bash", str(SCRIPT), *SMALL, "--output-dir", str(folder / "run"), "--overwrite", *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True,
        )  # fmt: skip

    def steps(self) -> int:
        """Lines of metrics so far."""
        try:
            return self.metrics.read_text().count("\n")
        except FileNotFoundError:
            return 0

    def wait_for_steps(self, count: int) -> None:
        """Return once the present attempt has finished so many steps."""
        deadline = time.monotonic() + 120
        while self.steps() < count:
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)

    def ranks(self) -> list[int]:
        """Process ids of the ranks: the children of the agents."""
        agents = (self.folder / "agents").read_text().split()
        children = [Path(f"/proc/{agent}/task/{agent}/children").read_text() for agent in agents]
        return [int(pid) for text in children for pid in text.split()]

    @property
    def requeued(self) -> bool:
        return (self.folder / "requeued").exists()


def free_job() -> str:
    """Number of a job whose port is free."""
    while True:
        number = random.randrange(1, 20000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 10000 + number)):
                return str(number)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for one job, of which no process is left in the end."""
    yield tmp_path
    agents = (tmp_path / "agents").read_text().split() if (tmp_path / "agents").exists() else []
    left = [pid for pid in agents if Path(f"/proc/{pid}").exists()]
    for pid in left:
        os.kill(int(pid), signal.SIGKILL)
    assert left == []


def test_two_nodes_train_together_and_the_job_is_done(folder: Path) -> None:
    job = Job(folder, "--steps", "3")
    out, err = job.process.communicate(timeout=120)
    assert job.process.returncode == 0, err
    assert out.count("2 ranks: tp 1 x cp 1 x dp 2 x pp 1") == 1 and "step 3 of 3: training loss" in out
    assert not job.requeued


@pytest.mark.sweep
@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_the_warning_ends_all_ranks_after_a_step_and_queues_the_job_again(
    folder: Path, number: signal.Signals, requeued: bool
) -> None:
    """A job that was cancelled or preempted is not queued again by the script."""
    job = Job(folder, "--steps", "100000")
    job.wait_for_steps(2)
    job.process.send_signal(number)
    out, err = job.process.communicate(timeout=120)
    assert job.process.returncode == 75, err
    (last,) = re.findall(r"^stopped by SIGTERM after step ([\d,]+) of 100,000; nothing was saved$", out, re.M)
    assert job.steps() == int(last.replace(",", "")), "every rank left after the same step"
    assert json.loads((folder / "run" / "run.json").read_text())["state"] == "unfinished"
    assert job.requeued == requeued


@pytest.mark.sweep
def test_a_rank_that_is_killed_on_one_node_starts_all_ranks_again(folder: Path) -> None:
    """The agents count their restarts separately. The ranks of both find each other all the same."""
    job = Job(folder, "--steps", "100000")
    job.wait_for_steps(2)
    before = job.ranks()
    assert len(before) == 2
    job.metrics.rename(folder / "metrics of the first attempt")
    os.kill(before[0], signal.SIGKILL)
    job.wait_for_steps(3)
    assert len(job.ranks()) == 2 and not set(job.ranks()) & set(before)
    job.process.send_signal(signal.SIGUSR1)
    assert job.process.communicate(timeout=120) and job.process.returncode == 75 and job.requeued
