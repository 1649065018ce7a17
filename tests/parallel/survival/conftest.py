"""Attempts are counted: a test adds each to a `Tally`, and `make faults` keeps the sums (scripts/survival.py)."""

import json
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

RECORDS = "LABKIT_SURVIVAL_RECORDS"
"""Environment variable: the file that gets a line of JSON for each tally. `make faults` sets it."""


FAILED = pytest.StashKey[bool]()


class Tally:
    """Attempts of one row of reliability: how many there were, and what went wrong in which."""

    def __init__(self, row: str, case: str) -> None:
        self.row, self.case = row, case
        self.attempts = 0
        self.problems: list[str] = []
        self.largest: dict[str, float] = {}
        self.counts: Counter[str] = Counter()

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Run the block as one attempt. A failure is kept, so that the other attempts are made as well."""
        self.attempts += 1
        try:
            yield
        except (Exception, pytest.fail.Exception) as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(at.filename).name}:{at.lineno}, {at.line}"
            self.problems.append(f"{name}: {type(error).__name__}: {error} ({where})")

    def saw(self, what: str, value: float) -> None:
        """Keep the largest of these values; `what` ends with the unit."""
        self.largest[what] = max(value, self.largest.get(what, value))

    def record(self) -> dict[str, object]:
        """What is kept, as JSON holds it."""
        return {
            "row": self.row,
            "case": self.case,
            "attempts": self.attempts,
            "passed": self.attempts - len(self.problems),
            "largest": self.largest,
            "counts": dict(self.counts),
        }


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Note on the item whether the test itself failed, outside of any attempt."""
    report = yield
    if call.when == "call":
        item.stash[FAILED] = report.failed
    return report


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Callable[[str, str], Tally]]:
    """`tally(row, case)` makes a tally of this test. After the test each is written down, and must have no problem."""
    made: list[Tally] = []

    def start(row: str, case: str) -> Tally:
        made.append(Tally(row, case))
        return made[-1]

    yield start
    if made and request.node.stash.get(FAILED, True):
        with made[-1].attempt("the rest of the test"):
            pytest.fail("the test failed between its attempts")
    if RECORDS in os.environ:
        with open(os.environ[RECORDS], "a") as file:
            for one in made:
                file.write(json.dumps({"test": request.node.nodeid, **one.record()}) + "\n")
    problems = [problem for one in made for problem in one.problems]
    if problems:
        pytest.fail(f"{len(problems)} of {sum(one.attempts for one in made)} attempts:\n" + "\n".join(problems), False)
    assert all(one.attempts for one in made), "nothing was tried"


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """`course(layout)`: an undisturbed run (`survival_runs.Course`)."""
    from survival_runs import LAYOUTS, TINY, undisturbed

    made: dict[str, Any] = {}

    def get(layout: str) -> Any:
        if layout not in made:
            ranks, changes = LAYOUTS[layout]
            made[layout] = undisturbed(tmp_path_factory.mktemp("course"), ranks, TINY.override(changes))
        return made[layout]

    return get


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """A run of one rank may go on in this process: it must add up in the order of a rank, which has one thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_rank_left() -> Iterator[None]:
    """After the test no rank lives that it has started."""
    from patience import soon

    from labkit.launch import forkserver

    def ranks() -> set[int]:
        server = forkserver._server._forkserver_pid
        return {pid for pid, parent in _parents() if server is not None and parent == server}

    before = ranks()
    yield
    assert soon(lambda: ranks() <= before, 2.0), "a rank is still there"


def _parents() -> Iterator[tuple[int, int]]:
    """(process, parent) of every process that has not ended."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                yield int(entry.name), int(parent)
