"""A test in a process of its own: `@pytest.mark.own_process`.

A test that fails a capture on purpose leaves a process on which no other test may rely: torch 2.11 ends a failed
capture before its allocator and its generators are told (pytorch#180395). The marker calls such a test in a child
pytest, with this pytest's settings, and reports what the child found as the test's own outcome.

`@pytest.mark.own_process(only_with="gpu")` does so for tests that are also marked `gpu`: an emulated capture leaves
nothing behind. The fixtures of a marked test are set up here too, so a skip in a fixture costs no process.

`tests/conftest.py` registers this file as a plugin. It needs pytest alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

INSIDE = "LABKIT_TEST_IN_OWN_PROCESS"
"""Environment variable: the test for which this process was started. A child never starts another."""
LIMIT = 300.0
"""Seconds where neither the test nor the settings say more."""
MARGIN = 0.9
"""Share of the limit that the child has: the rest is for ending it before pytest-timeout ends this process."""
LAST_LINES = 40


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known, whatever file the settings come from."""
    config.addinivalue_line("markers", "own_process(only_with=None): called in a child pytest (tests/own_process.py)")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call a marked test in a child; None leaves the call to pytest."""
    mark = pyfuncitem.get_closest_marker("own_process")
    if mark is None or INSIDE in os.environ:
        return None
    only_with = mark.kwargs.get("only_with")
    if only_with is not None and pyfuncitem.get_closest_marker(only_with) is None:
        return None
    with TemporaryDirectory(prefix="labkit-own-process-") as folder:
        _report(pyfuncitem, *_run(pyfuncitem, Path(folder)))
    return True


def _run(item: pytest.Function, folder: Path) -> tuple[str | None, Path, str]:
    """How the child ended badly (None: by itself, with a report), where its report lies, and what it printed."""
    report, printed, limit = folder / "report.xml", folder / "printed.txt", _limit(item) * MARGIN
    with printed.open("wb") as into:  # a file: a process that outlives the child would keep a pipe open
        child = subprocess.Popen(
            _command(item, report, limit),
            cwd=item.config.invocation_params.dir,
            env=os.environ | {INSIDE: item.nodeid},
            stdin=subprocess.DEVNULL,
            stdout=into,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = child.wait(limit)
            ended = None if code in (0, 1) and report.exists() else _ending(code)
        except subprocess.TimeoutExpired:
            ended = f"did not end within {limit:g} s and was killed"
        finally:  # also when this process is interrupted or out of time: nothing is left behind
            _kill_all_of(child)
    lines = printed.read_text(errors="replace").splitlines()
    return ended, report, "\n".join(lines[-LAST_LINES:])


def _command(item: pytest.Function, report: Path, limit: float) -> list[str]:
    """This pytest's settings and the one test. Where it hangs, faulthandler prints its stacks ahead of the limit."""
    option, unsafe_path = item.config.option, str(item.config.invocation_params.dir) in sys.path
    command = [sys.executable, *([] if unsafe_path else ["-P"]), "-m", "pytest"]
    command += [f"{item.path}::{item.nodeid.partition('::')[2]}", f"--junitxml={report}"]
    command += [f"--rootdir={item.config.rootpath}", f"--import-mode={option.importmode}"]
    command += ["-c", str(item.config.inipath)] if item.config.inipath else []
    command += [part for name in option.plugins for part in ("-p", name)]
    command += [part for words in option.pythonwarnings or () for part in ("-W", words)]
    command += [part for words in option.override_ini or () for part in ("-o", words)]
    stacks = max(limit / 2, limit - 15)  # seconds from when the child has started
    for setting in ("addopts=", "junit_family=xunit2", f"faulthandler_timeout={stacks:g}"):
        command += ["-o", setting]
    return [*command, "-s", "-p", "no:cacheprovider"]  # -s: a crash takes no printed line with it


def _limit(item: pytest.Function) -> float:
    """Seconds that the test may take: of its marker `timeout`, of the settings, or `LIMIT`."""
    mark = item.get_closest_marker("timeout")
    given = (mark.args[0] if mark.args else mark.kwargs.get("timeout")) if mark else None
    if given is None:
        given = item.config.getoption("timeout", None)
    if given is None and item.config.pluginmanager.hasplugin("timeout"):  # else pytest knows no such setting
        given = item.config.getini("timeout")
    return float(given or LIMIT)


def _ending(code: int) -> str:
    """Why there is no report."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _kill_all_of(child: subprocess.Popen[bytes]) -> None:
    """End the child and what it has started."""
    with suppress(ProcessLookupError):  # all of them have ended
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for _ in range(50):  # the others belong to nobody who waits for them
        try:
            os.killpg(child.pid, 0)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(0.02)


def _report(item: pytest.Function, ended: str | None, report: Path, printed: str) -> None:
    """The child's outcome as that of the test."""
    if ended is not None:
        pytest.fail(f"{item.nodeid}, in a process of its own, {ended}. It printed last:\n{printed}", pytrace=False)
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    for case in cases:
        for trouble in (*case.findall("failure"), *case.findall("error")):
            pytest.fail(f"in a process of its own:\n{trouble.text}", pytrace=False)
    if len(cases) != 1:
        pytest.fail(f"{item.nodeid}, in a process of its own, ran as {len(cases)} tests:\n{printed}", pytrace=False)
    for skipped in cases[0].findall("skipped"):
        pytest.skip(skipped.get("message", ""))
