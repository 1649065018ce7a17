"""`labkit grade`: states and reasons of a class's copies, whatever the code in them does."""

from __future__ import annotations

import csv
import inspect
import json
import os
import shutil
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from labkit.check import exercises
from labkit.check.chapter_copies import CHAPTERS, working_copy
from labkit.cli import main
from labkit.cli.grading import limits
from labkit.cli.grading.copies import Row
from labkit.cli.grading.grade_command import reasons as told

MASTER = next(CHAPTERS.glob("02_*.ipynb"))
NAMES = ["02.digits", "02.groups", "02.place"]


def copy_of_02(folder: Path, changes: dict[str, str], name: str = "02_rank_groups.ipynb") -> None:
    """Write a student's copy in which the cells of exercises have other functions, and `own` is a cell in front."""
    folder.mkdir(parents=True, exist_ok=True)
    notebook = json.loads(working_copy(MASTER, folder))
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        for exercise, body in changes.items():
            if f'check("{exercise}"' in source:
                call = next(line for line in source.splitlines() if "check(" in line)
                cell["source"] = f"{body}\n{call}" if "check(" not in body else body
    if own := changes.get("own"):
        notebook["cells"].insert(2, notebook["cells"][1] | {"source": own, "metadata": {}})
    (folder / name).write_text(json.dumps(notebook))


def solution(name: str) -> str:
    function = exercises("02")[name].solution
    assert function is not None
    return inspect.getsource(function).partition("\n")[2]  # without the decorator


def grade(folder: Path, *words: str) -> dict[tuple[str, str], dict[str, str]]:
    """Grade a folder and return its rows by student and exercise."""
    table = folder.parent / "scores.csv"
    command = [sys.executable, "-m", "labkit.cli", "grade", str(folder), "--csv", str(table), *words]
    subprocess.run(command, check=True, timeout=400, capture_output=True)
    with table.open(newline="") as file:
        return {(row["student"], row["exercise"]): row for row in csv.DictReader(file)}


RANK_FIRST = """
def digits(rank, order, sizes):
    found, stride = {}, 1
    for axis in reversed(order.split("-")):
        found[axis] = rank // stride % sizes[axis]
        stride *= sizes[axis]
    return found
"""
BY_DIGITS = """
def groups_of(order, sizes, token):
    groups = {}
    for rank in range(math.prod(sizes.values())):
        place = digits(rank, order, sizes)
        key = tuple(digit for axis, digit in place.items() if axis not in token.split("-"))
        groups.setdefault(key[::-BASE], []).append(rank)
    return list(groups.values())
"""
CLASS = {
    "ada": {"02.digits": "def digits(rank, order, sizes):\n    return helper(rank, order.split('-'), sizes)",
            "own": "import os\nprint(undefined)\ndef helper(rank, axes, sizes):\n    found, stride = {}, 1\n"
            "    for axis in axes:\n        found[axis], stride = rank // stride % sizes[axis], stride * sizes[axis]\n"
            "    return found\nwhile True: pass"},
    "ben": {"02.digits": RANK_FIRST, "02.groups": "def groups_of(order, sizes, token):\n    pass"},
    "cleo": {"02.digits": "def digits(rank, order, sizes):\n    while True: pass",
             "02.groups": "def groups_of(:"},
    "dan": {"02.digits": "print('02.digits: 5/5. Right.')\nimport os\nos._exit(0)"},
    "eve": {"02.digits": "digits = 3\ncheck = lambda name, answer: answer\ndigits = check('02.digits', digits)"},
    "ida": {"02.digits": f"BASE = 1\n{RANK_FIRST}", "02.groups": BY_DIGITS, "own": "import math"},
}  # fmt: skip
"""Student -> exercise -> what they wrote. ida's second exercise calls her first, for which the solution stands."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, str]]:
    folder = tmp_path_factory.mktemp("grade") / "class"
    for student, changes in CLASS.items():
        copy_of_02(folder / student, changes)
    copy_of_02(folder / "ben", {"02.place": "def place(samples):\n    return []"}, "02_rank_groups_2.ipynb")
    (folder / "fay").mkdir()
    (folder / "fay" / "02_rank_groups.ipynb").write_text("{")
    (folder / "gus").mkdir()
    (folder / "gus" / "02_rank_groups.ipynb").symlink_to(MASTER)
    copy_of_02(folder / "hal", {})
    notebook = json.loads((folder / "hal" / "02_rank_groups.ipynb").read_text())
    notebook["cells"] = [cell for cell in notebook["cells"] if "02.place" not in "".join(cell["source"])]
    (folder / "hal" / "02_rank_groups.ipynb").write_text(json.dumps(notebook))
    return grade(folder)


@pytest.mark.parametrize(
    ("student", "states"),
    [
        ("ada", ("solved", "untouched", "untouched")),
        ("ben", ("attempted", "attempted", "attempted")),
        ("cleo", ("attempted", "attempted", "untouched")),
        ("dan", ("attempted", "untouched", "untouched")),
        ("eve", ("attempted", "untouched", "untouched")),
        ("fay", ("unreadable",) * 3),
        ("hal", ("untouched", "untouched", "missing")),
        ("ida", ("attempted", "solved", "untouched")),
    ],
)
def test_states_of_each_student(rows, student: str, states: tuple[str, ...]) -> None:
    assert tuple(rows[student, name]["state"] for name in NAMES) == states


@pytest.mark.parametrize(
    ("student", "exercise", "reason"),
    [
        ("ben", "02.digits", "names the fastest axis first"),
        ("ben", "02.groups", "Did you forget `return`?"),
        ("cleo", "02.digits", "no end after 10 seconds"),
        ("cleo", "02.groups", "raised SyntaxError"),
        ("dan", "02.digits", "ended the process"),
        ("eve", "02.digits", "the cell does not call check"),
        ("fay", "02.digits", "02_rank_groups.ipynb is no notebook"),
    ],
)
def test_reasons(rows, student: str, exercise: str, reason: str) -> None:
    assert reason in rows[student, exercise]["reasons"]


def test_a_link_is_not_followed(rows) -> None:
    assert not [student for student, _ in rows if student == "gus"]


def processes_with(word: str) -> list[str]:
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += [path.parent.name] if word.encode() in path.read_bytes() else []
    return found


FORK = """
import os, subprocess, sys
for _ in range(1000):
    subprocess.Popen([sys.executable, "-c", "import time; MARK = 1; time.sleep(1000)"], start_new_session=True)
"""
FILL = """
import os
for n in range(10**9):
    with open(f"full{n}", "wb") as file:
        file.write(bytes(1 << 30))
"""
OUTSIDE = """
import os
for place in PLACES:
    try:
        open(os.path.join(place, "written-by-a-learner"), "w").close()
    except OSError:
        pass
"""
NETWORK = "import socket\nsocket.create_connection(('127.0.0.1', PORT), 2)\n"


@pytest.fixture
def server() -> Iterator[socketserver.TCPServer]:
    """A server that takes connections and closes them."""
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


@pytest.mark.parametrize("wrapped", [False, True], ids=["rlimits", "bubblewrap"])
def test_code_that_forks_fills_the_disk_writes_elsewhere_or_calls_out(
    tmp_path: Path, wrapped: bool, monkeypatch: pytest.MonkeyPatch, server: socketserver.TCPServer
) -> None:
    if wrapped and not limits.with_bubblewrap():
        pytest.skip("bubblewrap is not installed, or may not make namespaces here")
    if not wrapped:  # a PATH without bwrap
        only = tmp_path / "bin"
        only.mkdir()
        monkeypatch.setenv("PATH", str(only))
    mark = f"grade_{os.getpid()}_{wrapped}"
    folder = tmp_path / "class"
    places = [str(folder), str(folder / "ada"), str(tmp_path)]
    right = solution("02.digits")
    for student, code in {
        "forks": FORK.replace("MARK", mark),
        "fills": FILL,
        "writes": OUTSIDE.replace("PLACES", repr(places)),
        "calls": NETWORK.replace("PORT", str(server.server_address[1])),
    }.items():
        copy_of_02(folder / student, {"02.digits": f"{code}\n{right}", "02.place": right})
    copy_of_02(folder / "ada", {"02.digits": right})
    tmp_path.chmod(0o755)
    start = time.monotonic()
    found = grade(folder, "--jobs", "2")
    assert time.monotonic() - start < 200
    assert found["ada", "02.digits"]["state"] == "solved", "the others' copies are scored"
    assert found["forks", "02.groups"]["state"] == "untouched", "and the other exercises of this one"
    assert found["fills", "02.digits"]["state"] == "attempted"
    time.sleep(0.2)
    assert processes_with(mark) == [], "nothing is left behind"
    assert shutil.disk_usage(tmp_path).free > 1 << 30
    if wrapped or limits.nobody():
        assert not [path for place in places for path in Path(place).glob("written-by-a-learner")]
    assert found["calls", "02.digits"]["state"] == ("attempted" if wrapped else "solved"), "has it a network?"


def test_what_is_wrong_is_told_by_exercise_with_who_and_how_many_cases() -> None:
    def row(student: str, exercise: str, state: str, passed: int, *reasons: str) -> Row:
        found = {"student": student, "exercise": exercise, "state": state}
        return {**found, "passed": passed, "total": 8, "reasons": reasons}

    rows = [
        row("ada", "02.groups", "attempted", 3, "blocks"),
        row("ben", "02.groups", "attempted", 2, "sorted", "blocks"),
        row("cleo", "02.groups", "solved", 8),
        row("ada", "02.digits", "untouched", 0),
    ]
    assert told(rows) == [
        "02.digits, exercise 1: 1 untouched",
        "02.groups, exercise 2: 1 solved, 2 attempted",
        "  ada 3/8, ben 2/8: blocks",
        "  ben 2/8: sorted",
    ]


def test_what_cannot_be_graded_is_refused_with_what_is_missing(tmp_path: Path, capsys: Any) -> None:
    for words, said in {
        (): "name one folder",
        (str(tmp_path / "none"),): "no such folder",
        (str(tmp_path),): "no copies of chapters, such as",
        (str(tmp_path), "--seconds", "0"): "--seconds",
        (str(tmp_path), "--csv", "/proc/x/y.csv"): "--csv",
    }.items():
        assert main(["grade", *words]) == 2
        assert said in capsys.readouterr().err
