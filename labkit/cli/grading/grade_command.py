"""`labkit grade`: score the exercises in all copies of a class, and say what is wrong with each answer."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from labkit.check.untouched import numbered
from labkit.cli.arguments import Arguments, Command, Option
from labkit.cli.grading.copies import STATES, Copy, Row, copies_in, score_copy
from labkit.cli.grading.limits import Limits, limits, with_bubblewrap
from labkit.cli.output import room, show, table
from labkit.config.errors import shown
from labkit.output_files import appearing, unwritable

HEADS = ("student", "chapter", "exercise", "state", "passed", "total", "seconds", "reasons")
MOST_REASONS = 10
"""Of an exercise."""


def execute(arguments: Arguments) -> int:
    """Score every copy, print a table and what is wrong, and write the rows; the exit code is 0 whatever the scores."""
    options = arguments.options
    folder = Path(arguments.words[0] if arguments.words else "")
    problems = _problems(arguments.words, folder, options["csv"])
    copies = [] if problems else copies_in(folder)
    if not problems and not copies:
        problems.append(f"{shown(str(folder), 200)}: no copies of chapters, such as {folder}/ada/02_rank_groups.ipynb")
    arguments.refuse(problems)
    jobs = options["jobs"] or len(os.sched_getaffinity(0))
    held = limits(int(options["seconds"]) + 30, options["memory"] << 30, jobs)
    rows = list(graded(copies, folder, options["seconds"], jobs, held))
    if options["csv"]:
        _write(Path(options["csv"]), rows)
    if options["json"]:
        print(json.dumps(rows, indent=1))
        return 0
    show("\n".join([*summary(rows), "", *reasons(rows), _kept_apart(held)]))
    return 0


def _problems(words: Sequence[str], folder: Path, target: str | None) -> list[str]:
    problems = (
        [] if len(words) == 1 else [f"name one folder with a folder of copies for each student, not {len(words)}"]
    )
    if words and not folder.is_dir():
        problems.append(f"{shown(words[0], 200)}: no such folder")
    if target and (why := unwritable(Path(target).resolve().parent)):
        problems.append(f"--csv {shown(target, 200)}: its folder {why}")
    return problems


def graded(copies: Sequence[Copy], folder: Path, seconds: float, jobs: int, held: Limits) -> Iterator[Row]:
    """Yield a row for each exercise of each copy. Of several copies of one chapter the best result counts."""
    best: dict[tuple[str, str], Row] = {}
    with ThreadPoolExecutor(jobs) as pool:
        tasks = [pool.submit(score_copy, copy, folder, seconds, held) for copy in copies]
        try:
            for position, (copy, task) in enumerate(zip(copies, tasks), 1):
                for row in task.result():
                    key = copy.student, row["exercise"]
                    best[key] = max(row, best.get(key, row), key=_worth)
                print(f"{position} of {len(copies)}: {copy.student} {copy.path.stem}", file=sys.stderr, flush=True)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    yield from best.values()


def _worth(row: Row) -> tuple[int, int]:
    return -STATES.index(row["state"]), row["passed"]


def summary(rows: Sequence[Row]) -> list[str]:
    """Return a table with a line for each student, and what they solved."""
    by_student: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_student[row["student"]].append(row)
    lines: list[tuple[str, ...]] = [("student", *STATES, "solved exercises")]
    for student, mine in sorted(by_student.items()):
        counts = Counter(row["state"] for row in mine)
        solved = " ".join(row["exercise"] for row in mine if row["state"] == "solved")
        lines.append((student, *(str(counts[state] or "-") for state in STATES), solved or "-"))
    return table(lines, range(1, len(STATES) + 1), room())


def reasons(rows: Sequence[Row]) -> list[str]:
    """Return for each exercise how many are in which state, and a line for each reason why an answer is wrong, with the
    students and the cases that they passed, the reasons of most students first."""
    by_exercise: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_exercise[row["exercise"]].append(row)
    lines: list[str] = []
    for name, mine in sorted(by_exercise.items()):
        counts = Counter(row["state"] for row in mine)
        states = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
        lines.append(f"{name}, exercise {numbered(name[:2])[name]}: {states}")
        wrong: dict[str, list[str]] = defaultdict(list)
        for row in mine:
            for reason in row["reasons"]:
                wrong[reason].append(f"{row['student']} {row['passed']}/{row['total']}")
        ordered = sorted(wrong.items(), key=lambda item: (-len(item[1]), item[1]))
        lines += [f"  {', '.join(students)}: {reason}" for reason, students in ordered[:MOST_REASONS]]
        if (more := len(ordered) - MOST_REASONS) > 0:
            lines.append(f"  and {more} more (--csv)")
    return lines


def _kept_apart(held: Limits) -> str:
    """Say what kept the learners' code from the rest of the machine."""
    if with_bubblewrap():
        return "kept apart by bubblewrap and limits of the system: no network, no file but their own"
    user = "as nobody " if held.user else "as root (!) " if os.geteuid() == 0 else ""
    rest = f"the network and all files of {'this' if not held.user else 'that'} user were open to them"
    return f"kept apart {user}by limits of the system alone: {rest}; install bubblewrap (bwrap) to close these"


def _write(path: Path, rows: Sequence[Row]) -> None:
    with appearing(path) as draft, draft.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, HEADS)
        writer.writeheader()
        for row in rows:
            writer.writerow({head: _cell(row[head]) for head in HEADS})
    show(f"{len(rows)} rows in {path}", stream=sys.stderr)


def _cell(value: Any) -> Any:
    """Return a text for the table; one that a spreadsheet would compute gets a quote in front."""
    text = "; ".join(value) if isinstance(value, list) else value
    return f"'{text}" if isinstance(text, str) and text[:1] in ("=", "+", "-", "@") else text


COMMAND = Command(
    name="grade",
    summary="Score the exercises in copies of the chapters; FOLDER has a folder for each student. Their code runs in "
    "limited processes, and what it prints doesn't count. An exercise is solved, attempted, untouched or missing.",
    options=(
        Option(
            "csv",
            "str",
            "also write a row for each exercise and student into this file",
            path="any",
            unset="default: none",
        ),
        Option("json", "bool", "print the rows as JSON", False),
        Option("seconds", "float", "time of one exercise", 60.0, ge=1.0),
        Option("memory", "int", "GiB of addresses of one process", 8, ge=4),
        Option("jobs", "int", "copies at a time", unset="default: one per core", ge=1),
    ),
    execute=execute,
    example="labkit grade class --csv scores.csv",
    words="FOLDER",
    paths=True,
)
