"""Tests marked `own_process` are called in a child pytest, whose outcome is theirs, however the child ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

PLUGIN = Path(__file__).parents[1] / "own_process.py"

CONFTEST = """
import os

import own_process
import pytest

def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs CUDA")
    config.addinivalue_line("markers", "timeout: seconds")
    config.pluginmanager.register(own_process)

@pytest.fixture
def here():
    return os.getpid()

@pytest.fixture
def machine():
    pytest.skip("needs a machine")
"""


def run(folder: Path, tests: str, *options: str) -> tuple[int, str]:
    """Exit code and text of a bare pytest (no pytest-timeout) over `tests`, by settings that its children share."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text("import os, subprocess, sys, time, warnings\nimport pytest\n\n" + tests)
    (folder / "settings.ini").write_text("[pytest]\nfilterwarnings = error\naddopts = -k no_such_test\n")
    command = [sys.executable, "-m", "pytest", "-c", "settings.ini", "-o", "addopts=", "--strict-markers", "-rfEs"]
    bare = {"PYTHONPATH": str(PLUGIN.parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [*command, "--import-mode=importlib", "-p", "no:cacheprovider", *options, "test_it.py"],
        cwd=folder, env=os.environ | bare, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_marked_test_runs_in_a_child_and_others_here(tmp_path: Path) -> None:
    code, said = run(
        tmp_path,
        """
@pytest.mark.own_process
@pytest.mark.parametrize("word", ["a", "b c::d[e]"])
def test_there(here, word, tmp_path):
    (tmp_path / "it").write_text(word)
    assert here == os.getpid() and os.environ["LABKIT_TEST_IN_OWN_PROCESS"].startswith("test_it.py::test_there[")

@pytest.mark.own_process(only_with="gpu")
def test_here(here):
    assert here == os.getpid() and "LABKIT_TEST_IN_OWN_PROCESS" not in os.environ

@pytest.mark.own_process(only_with="gpu")
@pytest.mark.gpu
class TestInAClass:
    def test_there_too(self):
        assert "LABKIT_TEST_IN_OWN_PROCESS" in os.environ

@pytest.mark.own_process
def test_skips_there():
    pytest.skip("needs papermill")

@pytest.mark.own_process
def test_skips_here(machine):
    raise AssertionError("its fixture skips")
""",
    )
    assert code == 0, said
    assert "4 passed, 2 skipped" in said and "needs papermill" in said and "needs a machine" in said


def test_failures_are_told_in_the_childs_words_and_the_next_test_runs(tmp_path: Path) -> None:
    code, said = run(
        tmp_path,
        """
@pytest.mark.own_process
def test_fails():
    assert 1 + 1 == 3, "sums are wrong"

@pytest.mark.own_process
def test_warns():
    warnings.warn("an error by the settings")

@pytest.mark.own_process
def test_crashes():
    print("ready to die", flush=True)
    os.abort()

@pytest.mark.own_process
def test_leaves():
    os._exit(7)

@pytest.mark.own_process
def test_passes():
    pass
""",
        "-s",
    )
    assert code == 1 and "4 failed, 1 passed" in said, said
    assert "sums are wrong" in said and "assert (1 + 1) == 3" in said
    assert "an error by the settings" in said
    assert "was killed by SIGABRT" in said and "ready to die" in said
    assert "ended with exit code 7" in said


def test_a_test_that_hangs_is_killed_whole_on_its_limit_and_says_where(tmp_path: Path) -> None:
    """The program that it started goes with it, and does not hold up the report either."""
    started = time.monotonic()
    code, said = run(
        tmp_path,
        """
@pytest.mark.own_process
@pytest.mark.timeout(6)
def test_hangs():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(90)"])
    print("started", child.pid, "in", os.getpid(), flush=True)
    while True:
        time.sleep(1)  # here it hangs
""",
    )
    assert time.monotonic() - started < 60
    assert code == 1 and re.search(r"did not end within 5\.4 s and was killed", said), said
    assert re.search(r"line 1[01] in test_hangs", said), "its stack"
    found = re.search(r"started (\d+) in (\d+)", said)
    assert found and not any(alive(int(pid)) for pid in found.groups())
