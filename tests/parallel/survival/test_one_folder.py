"""Two runs and one folder of checkpoints: the first one has it, the second one is told so and changes nothing."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from patience import on_this_machine, soon
from survival_runs import TINY, alive, complete_steps, saving

from labkit.config import ConfigError
from labkit.launch import RankError, run
from labkit.train import pretrain
from labkit.train.run_folder.lock import PATIENCE

MANY = 60
BUSY = "is writing into this folder; name another"


def held(config, go: Path):
    """`pretrain` that waits in its second step until the file `go` is there."""

    class Held:
        def on_model(self, groups, chunks, schedule): ...
        def on_gradients(self, step, chunks): ...
        def on_update(self, step, chunks):
            while step == 1 and not go.exists():
                time.sleep(0.02)

    return pretrain(config, observer=Held())


def without_a_look(config):
    """`pretrain` that nothing checks before the launch."""
    return pretrain(config)


def test_a_second_run_is_refused_and_the_first_one_ends_as_if_alone(tmp_path):
    alone = run(pretrain, 1, saving(TINY, tmp_path / "alone"))[0].losses
    shared, go = saving(TINY, tmp_path / "shared"), tmp_path / "go"
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(run, held, 1, shared, go)
        try:
            assert soon(lambda: (tmp_path / "shared" / "latest").exists(), 30)
            with pytest.raises(ConfigError, match=BUSY):  # before any process starts
                run(pretrain, 2, shared)
            with pytest.raises(RankError, match=f"ConfigError: .*{BUSY}"):  # in the ranks, which look again
                run(without_a_look, 2, shared)
        finally:
            go.touch()
        assert first.result()[0].losses == alone
    assert complete_steps(tmp_path / "shared") == [3]


def trained_or_refused(config) -> tuple[list[float], str]:
    """Losses of the run, or why it was refused."""
    try:
        return run(without_a_look, 1, config)[0].losses, ""
    except (ConfigError, RankError) as error:
        return [], str(error)


@pytest.mark.parametrize("attempts", [1, pytest.param(10, marks=pytest.mark.sweep)])
def test_of_two_runs_that_start_at_once_one_trains(tally, tmp_path, attempts):
    """The other one is refused; or it waits for the lock until the first has ended, and has nothing left to do."""
    counts = tally("two runs", "started at once on one folder")
    for number in range(attempts):
        with counts.attempt(f"{number}"), ThreadPoolExecutor(2) as threads:
            config = saving(TINY, tmp_path / str(number), steps=3)
            results = [result.result() for result in [threads.submit(trained_or_refused, config) for _ in range(2)]]
            assert sorted(len(losses) for losses, _ in results) == [0, 3], results
            refused = [why for _, why in results if why]
            assert all(BUSY in why for why in refused), refused
            assert complete_steps(tmp_path / str(number)) == [3]
            counts.counts["refused" if refused else "waited for the other"] += 1


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("attempts", [20])
def test_a_run_whose_launcher_was_killed_can_be_started_again_at_once(tally, tmp_path, attempts):
    """The kernel lets go of the lock as the ranks end; the next run waits for that moment."""
    losses = run(pretrain, 2, saving(TINY, tmp_path / "alone", tp=2, steps=MANY, interval=10))[0].losses
    counts = tally("F2", "labkit train killed with its launcher, started again at once")
    for number in range(attempts):
        with counts.attempt(f"{number}"):
            folder = tmp_path / str(number)
            config = saving(TINY, folder, tp=2, steps=MANY, interval=10)
            path = tmp_path / "config.yaml"
            path.write_text(config.to_yaml())
            process = subprocess.Popen(
                [sys.executable, "-m", "labkit", "train", "--config", str(path), "--nproc", "2"],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            assert soon(lambda folder=folder: (folder / "latest").exists(), 60)
            time.sleep(0.01 * number)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            result = run(pretrain, 2, config)[0]
            assert 0 < result.resumed_after < MANY
            assert result.losses == losses[result.resumed_after :]
            assert soon(lambda pid=process.pid: alive(members_of(pid)) == [], 2.0)


def members_of(session: int) -> list[int]:
    """Processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if int((entry / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.parametrize("attempts", [1, pytest.param(5, marks=pytest.mark.sweep)])
def test_a_stopped_run_keeps_its_folder(tally, tmp_path, attempts):
    """A rank that SIGSTOP holds has the lock still: a second run that took the folder would meet it later."""
    counts = tally("two runs", "the first one is stopped (SIGSTOP)")
    for number in range(attempts):
        with counts.attempt(f"{number}"):
            config, pids, ended = saving(TINY, tmp_path / str(number), steps=3), [], []
            thread = threading.Thread(
                target=lambda config=config, pids=pids, ended=ended: ended.extend(
                    run(stopped_after_a_step, 1, config, progress=lambda values: pids.append(values.get("pid")))
                )
            )
            thread.start()
            assert soon(lambda pids=pids: any(pids), 30)
            pid = next(filter(None, pids))
            start = time.monotonic()
            with pytest.raises(ConfigError, match=BUSY):
                run(pretrain, 1, config)
            assert time.monotonic() - start < on_this_machine(PATIENCE + 1.0)
            os.kill(pid, signal.SIGCONT)
            thread.join()
            assert len(ended[0].losses) == 3 and complete_steps(tmp_path / str(number)) == [3]


def stopped_after_a_step(config):
    """`pretrain` that stops itself by SIGSTOP after the second step."""
    from labkit.launch import report_progress

    class Stopping:
        def on_model(self, groups, chunks, schedule): ...
        def on_gradients(self, step, chunks): ...
        def on_update(self, step, chunks):
            if step == 1:
                report_progress({"pid": os.getpid()})
                os.kill(os.getpid(), signal.SIGSTOP)

    return pretrain(config, observer=Stopping())
