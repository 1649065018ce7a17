"""Whole programs: scripts without a guard, torchrun, Ctrl-C, and a launcher that is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.fixture
def script(tmp_path, family):
    """Start `body` as a script of its own; everything it starts carries the family's token."""
    path, started = tmp_path / "script.py", []

    def start(body, *launcher, environment=None):
        path.write_text(body)
        process = subprocess.Popen(
            [sys.executable, *launcher, str(path)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
            env={**family.environment, **(environment or {})}, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:  # one that a failed test left would fail the next test too, as a warning
        process.kill()
        process.communicate()


def finish(process, seconds=90):
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def test_a_script_needs_no_guard(script):
    code, out, err = finish(
        script("""
from labkit.launch import run
import torch.distributed as dist
print("imported once")
scale = 10
def task(): return scale * dist.get_rank()
print(run(task, 3))
""")
    )
    assert (code, out, err) == (0, "imported once\n[0, 10, 20]\n", "")


POOR_MACHINES = {
    "long": ("import tempfile; tempfile.tempdir = os.path.abspath('x' * 120); os.mkdir(tempfile.tempdir)", "[1, 1]"),
    "no text": (r"import tempfile; tempfile.tempdir = os.path.abspath('\udcff'); os.mkdir(tempfile.tempdir)", "[1, 1]"),
    "few files": (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))",
        "ranks 0, 1 of 2 could not connect: too many open files in a rank; ",
    ),
    "no network": (
        "import ctypes; ctypes.CDLL(None).unshare(0x50000000) and print('not allowed here')",
        "network interface lo is not up (Network is unreachable), and gloo connects",
    ),
}
"""What the machine lacks -> (how a script comes to lack it, what it prints)."""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own calls")
@pytest.mark.parametrize("name", POOR_MACHINES)
def test_what_a_machine_lacks_is_said_in_a_line(script, name):
    lacking, printed = POOR_MACHINES[name]
    code, out, err = finish(
        script(f"""
import os
{lacking}
from labkit.launch import RankError, run
def groups():
    import torch.distributed as dist
    return len({{dist.new_group([0, 1]) is None for _ in range(8)}})
try: print(run(groups, 2, timeout=30))
except RankError as error: print(error)
""")
    )
    if "not allowed here" in out:
        pytest.skip("this system lets nobody leave the network")
    if name == "few files" and "terminate called" in err:  # by gloo's listening thread, which may meet the limit first
        err = ""
    assert (code, err, out.count("\n")) == (0, "", 1) and out.startswith(printed), out


def test_an_error_ends_the_script_with_a_status(script):
    code, out, err = finish(
        script("""
from labkit.launch import run
def task(): raise ValueError("in the rank")
run(task, 2)
""")
    )
    assert code == 1
    assert "2 of 2 ranks raised, first rank" in err
    assert 'def task(): raise ValueError("in the rank")' in err
    assert out == ""


BUSY = """
import sys, time
from labkit.launch import run, Ranks
def task():
    import ctypes, os, signal, torch.distributed as dist
    open(f"up-{dist.get_rank()}", "w").close()
    if dist.get_rank() == 1: os.kill(os.getpid(), signal.SIGSTOP)
    if dist.get_rank() == 2: ctypes.PyDLL(None).sleep(600)
    os.system("sleep 600")
run(task, 4, timeout=500)
"""


def wait_for_ranks(tmp_path, wait_until):
    assert wait_until(lambda: len(list(Path(tmp_path).glob("up-*"))) == 4, 60)
    time.sleep(0.3)


def test_ctrl_c_ends_everything_within_two_seconds(script, tmp_path, wait_until, family, limit):
    """As in a terminal: the signal goes to the whole process group."""
    process = script(BUSY)
    wait_for_ranks(tmp_path, wait_until)
    assert len(family.pids()) >= 6
    start = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    code, _, err = finish(process, 20)
    assert time.monotonic() - start < limit(2.0)
    assert code == -signal.SIGINT and err == "interrupted\n"
    assert wait_until(lambda: family.pids() == [], 2.0)


@pytest.mark.parametrize("after", [0.05, 0.6, 1.5])
@pytest.mark.parametrize("times", [1, 3])
def test_ctrl_c_while_ranks_start_ends_in_a_line(script, family, wait_until, after, times):
    """However often it is pressed; also the fork server ends at once, in the middle of its imports."""
    process = script(
        "from labkit.launch import run\nimport time, cloudpickle\nprint('up', flush=True)\nrun(time.sleep, 2, 60)"
    )
    assert process.stdout.readline() == "up\n"
    for _ in range(times):
        time.sleep(after)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
    code, _, err = finish(process, 20)
    assert (code, err) == (-signal.SIGINT, "interrupted\n")
    assert wait_until(lambda: family.pids() == [], 1.0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_fork_server_is_never_interrupted(script):
    """Ctrl-C in the first seconds: the server still imports torch, and would print a traceback of its own. A scheduler
    sends SIGTERM to all processes: the ranks of a server that dies could not end their step."""
    code, out, err = finish(
        script("""
from labkit.launch import forkserver
import signal
forkserver.ensure_running()
status = open(f"/proc/{forkserver._server._forkserver_pid}/status").read()
blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
print([bool(blocked >> (number - 1) & 1) for number in (signal.SIGINT, signal.SIGTERM)])
print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
""")
    )
    assert (code, out, err) == (0, "[True, True]\nset()\n", "")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_rank_outlives_a_launcher_that_dies(script, tmp_path, wait_until, family, limit, number):
    """Nor do a stopped rank, one that holds the GIL, and the children of ranks."""
    process = script(BUSY)
    wait_for_ranks(tmp_path, wait_until)
    assert len(family.pids()) >= 6
    start = time.monotonic()
    process.send_signal(number)
    process.communicate(timeout=20)
    assert wait_until(lambda: family.pids() == [], 2.0), "a process outlived its launcher by two seconds"
    assert time.monotonic() - start < limit(2.5)


def test_ranks_left_open_end_with_the_script(script):
    code, out, err = finish(
        script("""
from labkit.launch import Ranks
import os, signal
def stop_one():
    import torch.distributed as dist
    return dist.get_rank()
ranks = Ranks(3)
print(ranks.run(stop_one))
os.kill(ranks._pool.handles[1].pid, signal.SIGSTOP)
""")
    )
    assert (code, out, err) == (0, "[0, 1, 2]\n", "")


def test_the_fork_server_may_die(script):
    """Its ranks lose their parent but not their launcher; the next launch starts another server."""
    code, out, err = finish(
        script("""
from labkit.launch import Ranks, RankError, forkserver, run
import os, signal, time
with Ranks(2) as ranks:
    pids = ranks.run(os.getpid)
    os.kill(forkserver._server._forkserver_pid, signal.SIGKILL)
    try:
        ranks.run(time.sleep, 5)
    except RankError as error:
        print(error.kind, error.ranks)
end = time.monotonic() + 5
while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < end:
    time.sleep(0.02)
print([os.path.exists(f"/proc/{pid}") for pid in pids])
print(run(lambda: 7, 2))
""")
    )
    assert code == 0, err
    assert out == "died [0, 1]\n[False, False]\n[7, 7]\n"


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
COMMON = """
import os, sys, torch, torch.distributed as dist
from labkit.launch import run, Ranks, rank_info, report_progress
def task(scale):
    x = torch.tensor([scale * dist.get_rank()]); dist.all_reduce(x)
    report_progress({"rank": dist.get_rank()})
    return dist.get_rank(), x.item()
def say(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


def test_torchrun_ranks_are_used_and_all_get_the_results(script):
    """Another number of ranks than torchrun's is refused before anything runs, and costs none of them."""
    code, out, err = finish(
        script(
            COMMON
            + """
try: run(task, 4, 1.0)
except ValueError as error: refused = str(error)
seen = []
results = run(task, 2, 10.0, progress=seen.append)
with Ranks(2) as ranks:
    results += ranks.run(task, 1.0)
info = rank_info()
say(info.rank, info.world_size, info.local_rank, info.device, info.backend, results, seen, dist.get_world_size())
say("refused:", refused)
""",
            *TORCHRUN,
        )
    )
    assert code == 0, err
    results = "[(0, 10.0), (1, 10.0), (0, 1.0), (1, 1.0)]"
    first, second, *refused = sorted(out.splitlines())
    assert first == f"0 2 0 cpu gloo {results} [{{'rank': 0}}] 2"
    assert second == f"1 2 1 cpu gloo {results} [] 2"
    assert len(refused) == 2
    assert all(
        line.startswith("refused: the launch: run() was asked for 4 ranks, but torchrun started 2") for line in refused
    )


PRETRAIN = """
import os
from labkit.config import presets
from labkit.train import pretrain
result = pretrain(presets.tiny().override({"pp": 2, "train.steps": 2, "train.eval_steps": 0}))
import torch.distributed as dist
line = f"{dist.get_rank()} of {dist.get_world_size()}: {[round(loss, 6) for loss in result.losses]}"
os.write(1, (line + chr(10)).encode())
"""


def test_torchrun_with_a_bare_pretrain_trains_on_all_its_ranks_and_ends_cleanly(script):
    code, out, err = finish(script(PRETRAIN, *TORCHRUN), 180)
    assert code == 0, err
    lines = sorted(out.splitlines())
    assert [line.partition(":")[0] for line in lines] == ["0 of 2", "1 of 2"]
    assert len({line.partition(":")[2] for line in lines}) == 1, "both ranks saw the same losses"
    for word in ("terminate", "SIGABRT", "Traceback", "destroy_process_group"):
        assert word not in err


def test_torchrun_ends_when_one_rank_raises(script):
    code, _, err = finish(
        script(
            COMMON
            + """
def half():
    if dist.get_rank() == 1: raise ValueError("only one")
    dist.barrier()
run(half, 2)
""",
            *TORCHRUN,
        )
    )
    assert code != 0
    assert "ValueError: only one" in err


@pytest.mark.sweep
@pytest.mark.timeout(1200)
def test_torchrun_ends_cleanly_many_times(script):
    """gloo aborts at random if a rank closes its sockets while another still talks."""
    for _ in range(20):
        code, _, err = finish(script(COMMON + "run(task, 2, 1.0)\n", *TORCHRUN))
        assert code == 0, err
        assert "terminate" not in err
