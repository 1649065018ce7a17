"""`labkit grade`: score the exercises in all copies of a class, and say what each wrong answer believes."""

from __future__ import annotations

import csv
import json
import os
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from labkit.check.chapter_copies import CHAPTERS, chapters_in
from labkit.cli.arguments import Arguments, Command, Option
from labkit.cli.grading.limits import Limits, limits, running, with_bubblewrap
from labkit.cli.output import room, show, table
from labkit.config.errors import shown
from labkit.output_files import appearing, unwritable

STATES = ("solved", "attempted", "untouched", "missing", "unreadable")
HEADS = ("student", "chapter", "exercise", "state", "passed", "total", "seconds", "reasons")
LARGEST = 64 << 20
"""Bytes of a copy; one with pictures has less than one MiB."""
START = 120.0
"""Seconds for a process to load torch and the chapter's imports on a busy machine."""
MOST_REASONS = 20


class Copy(NamedTuple):
    """One learner's copy of a chapter."""

    student: str
    chapter: str
    path: Path


Row = dict[str, Any]


def execute(arguments: Arguments) -> int:
    """Score every copy, print a table and the reasons, and write the rows; the exit code is 0 whatever the scores."""
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


def copies_in(folder: Path) -> list[Copy]:
    """Return the copies of chapters in the folders of students, or those in `folder` itself as one student's.

    Links are left out, because they may point anywhere; a file counts by the chapter's number at its beginning.
    """
    numbers = {path.name[:2] for path in chapters_in(CHAPTERS)}
    folders = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.is_symlink()]
    found: list[Copy] = []
    for each in [folder, *folders]:
        files = [path for path in chapters_in(each) if path.is_file() and not path.is_symlink()]
        found += [Copy(each.resolve().name, path.name[:2], path) for path in files if path.name[:2] in numbers]
    return found


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


def score_copy(copy: Copy, folder: Path, seconds: float, held: Limits) -> list[Row]:
    """Score one copy in a process of its own. Exercises of which it says nothing have been stopped with it."""
    known = _exercises(copy.chapter)
    whole = START + len(known) * (seconds + 5)
    common = {"student": copy.student, "chapter": copy.chapter}
    try:
        if copy.path.stat().st_size > LARGEST:
            raise ValueError(f"has more than {LARGEST >> 20} MiB")
        content = copy.path.read_bytes()
        _check_is_notebook(content)
    except (OSError, ValueError) as problem:
        return [common | _row(name, "unreadable", reasons=[f"{copy.path.name} {problem}"]) for name in known]
    command = [sys.executable, "-m", "labkit.cli.grading.learner", copy.chapter, str(seconds), json.dumps(held)]
    with tempfile.TemporaryDirectory(prefix="labkit-grade-") as own:
        written = running(command, content, Path(own), folder.resolve(), whole, held)
    found = {row["exercise"]: row for row in map(_read, written.splitlines()) if row}
    stopped = "the process that scored it ended before this exercise"
    return [common | found.get(name, _row(name, "attempted", reasons=[stopped])) for name in known]


def _check_is_notebook(content: bytes) -> None:
    """Raise ValueError where this is no notebook."""
    try:
        cells = json.loads(content)["cells"]
        if all(isinstance(cell["cell_type"], str) for cell in cells):
            return
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError("is no notebook")


def _exercises(chapter: str) -> list[str]:
    """Return the names of a chapter's exercises, which its own cells tell."""
    text = next(CHAPTERS.glob(f"{chapter}_*.ipynb")).read_text(encoding="utf-8")
    return sorted(set(re.findall(rf'check\(\\"({chapter}\.\w+)\\"', text)))


def _row(name: str, state: str, reasons: Sequence[str] = ()) -> Row:
    return {"exercise": name, "state": state, "passed": 0, "total": 0, "seconds": 0.0, "reasons": list(reasons)}


def _read(line: bytes) -> Row:
    """Return a result as the process wrote it; empty where it wrote something else."""
    kinds = {"exercise": str, "state": str, "passed": int, "total": int, "seconds": float, "reasons": list}
    try:
        found = json.loads(line)
        right = all(isinstance(found[name], kind) for name, kind in kinds.items()) and found["state"] in STATES
    except (ValueError, KeyError, TypeError):
        return {}
    return {name: found[name] for name in kinds} if right else {}


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
    """Return a line for each reason why an answer is wrong, those of most students first."""
    held: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        for reason in row["reasons"]:
            held[row["exercise"], reason].append(row["student"])
    ordered = sorted(held.items(), key=lambda item: (-len(item[1]), item[0]))
    lines = [f"{name}, {', '.join(students)}: {reason}" for (name, reason), students in ordered[:MOST_REASONS]]
    more = len(ordered) - len(lines)
    return [
        *(["what wrong answers believe:"] if lines else []),
        *lines,
        *([f"and {more} more (--csv)"] if more else []),
    ]


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
