"""Fixtures that look at processes from outside, so that a launcher's own word is never taken for it."""

import contextlib
import os
import tempfile
import uuid
from pathlib import Path

import pytest
from patience import on_this_machine, soon

from labkit.launch import Ranks, forkserver


def processes():
    """Every process of this machine: {pid: (parent, state)}; ended ones that nobody has reaped are left out."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                found[int(entry.name)] = (int(parent), state)
    return found


def living_ranks():
    """Process ids of the ranks that this process's fork server has started and that still run."""
    server = forkserver._server._forkserver_pid
    return [pid for pid, (parent, _) in processes().items() if parent == server] if server else []


def launch_folders():
    """Folders of launches of this process."""
    return set(Path(tempfile.gettempdir()).glob(f"labkit-launch-{os.getpid()}-*"))


def marked(token):
    """Process ids whose environment carries the token, which children inherit however often they fork."""
    found = []
    for pid in processes():
        try:
            if token.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


@pytest.fixture(scope="session")
def living():
    """The function `living_ranks`."""
    return living_ranks


@pytest.fixture
def rank_pids():
    """The function that lists the ranks which live now and did not when the test began."""
    before = set(living_ranks())
    return lambda: sorted(set(living_ranks()) - before)


@pytest.fixture
def limit():
    """The function `on_this_machine`."""
    return on_this_machine


@pytest.fixture
def wait_until():
    """The function `soon`."""
    return soon


@pytest.fixture
def no_rank_left():
    """After the test no rank lives that it has started, and no folder of a launch of this process remains."""
    before, folders = set(living_ranks()), launch_folders()
    yield
    assert set(living_ranks()) <= before, "a rank is still there"
    assert launch_folders() <= folders, "a launch's folder is still there"


class Marked:
    """An environment whose descendants can be counted."""

    def __init__(self):
        self.token = f"LABKIT_TEST_TOKEN={uuid.uuid4().hex}"
        name, _, value = self.token.partition("=")
        self.environment = {**os.environ, name: value}

    def pids(self):
        """Process ids of all descendants that live."""
        return marked(self.token)

    @staticmethod
    def command(pid):
        """Command line of a process, parent and state."""
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(), processes().get(pid)
        return "ended just now"


@pytest.fixture
def family():
    """Environment for a program under test; when the test is over, no descendant of it may live."""
    family = Marked()
    yield family
    left = [] if soon(lambda: not family.pids(), 5.0) else family.pids()
    for pid in left:
        os.kill(pid, 9)
    assert left == [], "processes of the program are still there"


@pytest.fixture(scope="module")
def on_ranks():
    """`on_ranks(fn, world_size, *args)`: like `labkit.launch.run`, on ranks that the tests of one module share."""
    pools = {}

    def call(fn, world_size, *args):
        if world_size not in pools:
            pools[world_size] = Ranks(world_size)
        return pools[world_size].run(fn, *args)

    yield call
    for ranks in pools.values():
        ranks.close()
