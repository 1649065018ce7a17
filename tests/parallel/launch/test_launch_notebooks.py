"""Real Jupyter kernels: two at once, interrupted, killed, restarted, and with cells out of order."""

import contextlib
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
from jupyter_client.manager import KernelManager

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
SETUP = """
from labkit.launch import run, Ranks, RankError, forkserver
import torch, torch.distributed as dist
def total(x):
    t = torch.tensor([float(x)]); dist.all_reduce(t); return t.item()
def asleep():
    import os, time
    os.system("sleep 600")
print(run(total, 2, 1))
"""


class Kernel:
    """One kernel and its client; `execute` returns what a person would see."""

    def __init__(self, family, folder):
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(env={**family.environment, "IPYTHONDIR": str(folder)}, cwd=str(folder))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.pid = self.manager.provisioner.pid

    def send(self, code):
        return self.client.execute(code)

    def result(self, message_id, seconds=90):
        """(text shown, error name or None) of one executed cell."""
        shown, error, deadline = [], None, time.monotonic() + seconds
        while time.monotonic() < deadline:
            message = self.client.get_iopub_msg(timeout=seconds)
            if message["parent_header"].get("msg_id") != message_id:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                shown.append(content["text"])
            elif message["msg_type"] == "execute_result":
                shown.append(content["data"]["text/plain"])
            elif message["msg_type"] == "error":
                error = content["ename"]
                shown.append(content["evalue"])
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return "".join(shown), error
        raise TimeoutError("the cell did not end")

    def execute(self, code):
        return self.result(self.send(code))

    def close(self):
        self.client.stop_channels()
        with contextlib.suppress(Exception):
            self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


@pytest.fixture
def kernel(family, tmp_path):
    """Start kernels; all are shut down at the end, and `family` then looks for survivors."""
    started = []

    def start():
        started.append(Kernel(family, tmp_path))
        return started[-1]

    yield start
    for each in started:
        each.close()


def test_the_same_notebook_twice_at_once(kernel):
    kernels = [kernel(), kernel()]
    cells = [SETUP, "ranks = Ranks(2)\nranks.run(total, 2)", "ranks.run(total, 3)", "ranks.close(); run(total, 3, 1)"]
    shown = []
    for cell in cells:
        sent = [(each, each.send(cell)) for each in kernels]
        shown.append([each.result(message) for each, message in sent])
    assert shown == [
        [("[2.0, 2.0]\n", None)] * 2,
        [("[4.0, 4.0]", None)] * 2,
        [("[6.0, 6.0]", None)] * 2,
        [("[3.0, 3.0, 3.0]", None)] * 2,
    ]


def test_interrupt_cells_out_of_order_and_errors(kernel, family, wait_until, limit):
    """One kernel through a learner's afternoon."""
    session = kernel()
    assert session.execute(SETUP) == ("[2.0, 2.0]\n", None)
    idle = len(family.pids())

    # a cell is run before the one that it needs, then again
    assert session.execute("later.run(total, 1)")[1] == "NameError"
    assert session.execute("later = Ranks(2)\nlater.run(total, 1)") == ("[2.0, 2.0]", None)
    assert session.execute("later.timeout") == ("60.0", None), "a notebook has the shorter limit"
    # the cell that makes the ranks is run again: the first ones go
    assert session.execute("later = Ranks(2)\nlater.run(total, 5)") == ("[10.0, 10.0]", None)
    assert wait_until(lambda: len(family.pids()) == idle + 2, 5), "the ranks of the first object are still there"
    # a function is defined anew: the new one travels
    assert session.execute("def total(x):\n    return -x\nlater.run(total, 1)") == ("[-1, -1]", None)

    # an exception quotes the cell, and the ranks stay
    shown, error = session.execute("def bad():\n    raise ValueError('in my cell')\nlater.run(bad)")
    assert error == "RankError"
    assert "raise ValueError('in my cell')" in shown
    assert session.execute("later.run(total, 2)") == ("[-2, -2]", None)

    # interrupt: Jupyter signals the kernel's whole process group
    message = session.send("later.run(asleep)")
    assert wait_until(lambda: len(family.pids()) >= idle + 4, 20)
    time.sleep(0.3)
    start = time.monotonic()
    session.manager.interrupt_kernel()
    assert session.result(message)[1] == "KeyboardInterrupt"
    assert time.monotonic() - start < limit(2.0)
    assert wait_until(lambda: len(family.pids()) == idle, 2.0), "an interrupted rank or its child is still there"

    # the kernel is whole: the same object starts new ranks and says that their memory is new
    shown, error = session.execute("later.run(total, 3)")
    assert error is None
    assert shown == "labkit: new ranks started; what earlier calls left in memory is gone\n[-3, -3]"

    # the same for a cell that runs on the ranks, and for one that ends them
    assert session.execute("%load_ext labkit\nlater.close()") == ("", None)
    message = session.send("%%ranks 2\nasleep()")
    assert wait_until(lambda: len(family.pids()) >= idle + 4, 20)
    session.manager.interrupt_kernel()
    assert session.result(message)[1] == "KeyboardInterrupt"
    assert wait_until(lambda: len(family.pids()) == idle, 2.0), "an interrupted rank or its child is still there"
    shown, error = session.execute("%%ranks --close\ndist.get_rank()")
    assert error is None and shown.endswith("is gone\n[rank 0] 0\n[rank 1] 1")
    assert len(family.pids()) == idle


@pytest.mark.parametrize("how", ["killed", "ended", "restarted", "restarted now", "shut down"])
def test_no_rank_and_no_folder_survives_its_kernel(kernel, family, wait_until, how):
    with tempfile.TemporaryDirectory(prefix="lk", dir="/tmp") as temporary:  # short, for sockets
        family.environment["TMPDIR"] = temporary
        session = kernel()
        session.execute(SETUP)
        before = len(family.pids())
        if how == "shut down":
            session.execute("ranks = Ranks(3)\nranks.run(total, 1)")
        else:
            session.send("ranks = Ranks(3)\nranks.run(asleep)")
            assert wait_until(lambda: len(family.pids()) >= before + 6, 30)
        known = set(family.pids())
        assert list(Path(temporary).glob("labkit-fork-*/listener-*"))
        if how in ("killed", "ended"):
            os.kill(session.pid, signal.SIGKILL if how == "killed" else signal.SIGTERM)
        elif how == "shut down":
            session.client.stop_channels()
            session.manager.shutdown_kernel(now=False)
        else:
            session.manager.restart_kernel(now=how == "restarted now")
        wait_until(lambda: not known & set(family.pids()), 2.0)
        assert {pid: family.command(pid) for pid in known & set(family.pids())} == {}, "outlived their kernel by 2 s"
        assert not [path for path in Path(temporary).iterdir() if path.name.startswith(("labkit", "pymp"))]
