"""A plugin of pytest for the GPU suite: the outcome of each test is a line of a file at once, so that no kill loses it.

A line has `name`, `outcome`, `seconds` and `text`. A test that has begun is `running`; its last line counts.
"""

from __future__ import annotations

import json
import os

import pytest

FILE = os.environ.pop("LABKIT_GPU_OUTCOMES", "")
"""Taken out of the environment: a pytest that a test starts writes nothing here."""
LONGEST = 8000
"""Characters of an error that are kept, from its end."""


def write(name: str, outcome: str, seconds: float = 0.0, text: str = "") -> None:
    """One line more."""
    if FILE:
        with open(FILE, "a") as file:
            file.write(json.dumps({"name": name, "outcome": outcome, "seconds": seconds, "text": text}) + "\n")


def text_of(report: pytest.CollectReport | pytest.TestReport) -> str:
    """The reason of a skip, the traceback of an error."""
    told = report.longrepr
    return str(told[2]) if isinstance(told, tuple) else report.longreprtext[-LONGEST:]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported."""
    if not report.passed:
        write(report.nodeid, report.outcome, text=text_of(report))


def pytest_runtest_logstart(nodeid: str) -> None:
    """A test begins."""
    write(nodeid, "running")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test was called; or its setup or teardown did not pass."""
    if report.when == "call" or not report.passed:
        write(report.nodeid, report.outcome, round(report.duration, 3), text_of(report))
