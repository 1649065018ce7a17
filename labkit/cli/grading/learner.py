"""The process in which one copy is scored: `python -m labkit.cli.grading.learner CHAPTER SECONDS LIMITS PIPE < COPY`.

It knows no other copy. For each exercise it forks, so that an answer that ends the process, eats its memory or never
returns costs nothing but its own score. An exercise may use what its chapter imports, as in the chapter, the
functions, classes and constants of cells that the learner added or changed before it, and earlier exercises, whose
names stand for labkit's solutions. Nothing that the learner's code prints counts: each result is a line of JSON on the
descriptor PIPE, as soon as it is known.
"""

from __future__ import annotations

import ast
import json
import linecache
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import labkit.check
from labkit.check import exercises
from labkit.check.chapter_copies import CHAPTERS
from labkit.check.scoring import ONLY_FIRST, Score, named, score
from labkit.check.untouched import CHECKED, imports_of, untouched
from labkit.check.watched import Watch, raised
from labkit.cli.grading.limits import Limits

WORDS = 240
"""Most characters of a reason."""


class Cell(NamedTuple):
    """A code cell, without its magics."""

    source: str
    place: str
    """Its name in a traceback, by its position in the copy."""
    is_exercise: bool
    """True if it belongs to an exercise, False for one of the learner's own."""


def main(chapter: str, seconds: float, limits: Limits, descriptor: int) -> None:
    """Write a line for each exercise of the chapter, in the order of their names."""
    master = _code_cells(json.loads(next(CHAPTERS.glob(f"{chapter}_*.ipynb")).read_text(encoding="utf-8")))
    cells = learners_cells(_code_cells(json.load(sys.stdin)), [source for source, _ in master])
    imports: dict[str, Any] = {}
    exec(imports_of(source for source, _ in master), imports)
    asked = list(exercises(chapter))
    limits.hold()
    for name in asked:
        _in_a_fork(name, cells, imports, seconds, descriptor)


def _code_cells(notebook: Any) -> list[tuple[str, bool]]:
    """Return source and mark of each code cell. Raises ValueError where this is no notebook."""
    try:
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        return [("".join(cell["source"]), "exercise" in cell["metadata"].get("tags", [])) for cell in cells]
    except (AttributeError, KeyError, TypeError):
        raise ValueError("not a notebook") from None


def learners_cells(cells: Sequence[tuple[str, bool]], master: Sequence[str]) -> list[Cell]:
    """Return the cells that can matter to a score, in their order: those of exercises, and those that the learner
    added or changed."""
    kept: list[Cell] = []
    for position, (source, is_marked) in enumerate(cells, 1):
        is_exercise = is_marked or bool(CHECKED.search(source))
        if is_exercise or source not in master:
            plain = re.sub(r"^%.*", "", source, flags=re.MULTILINE)
            kept.append(Cell(plain, f"code cell {position}", is_exercise))
    return kept


def _in_a_fork(name: str, cells: Sequence[Cell], imports: dict[str, Any], seconds: float, descriptor: int) -> None:
    """Score one exercise in a child, and write why where the child does not."""
    started = time.monotonic()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        os.setpgid(0, 0)
        line = json.dumps(graded(name, cells, dict(imports)))
        os.write(writing, line.encode())
        os._exit(0)
    os.close(writing)
    pieces: list[bytes] = []
    try:
        with _alarm(seconds):
            while piece := os.read(reading, 1 << 16):
                pieces.append(piece)
        problem = "ended the process"
    except TimeoutError:
        problem = f"no end after {seconds:g} seconds"
    os.close(reading)
    for end in (os.killpg, os.kill):
        with suppress(ProcessLookupError):
            end(child, signal.SIGKILL)
    os.waitpid(child, 0)
    try:
        found = json.loads(b"".join(pieces))
    except ValueError:
        found = _result(name, "attempted", reasons=[problem])
    line = json.dumps(found | {"seconds": round(time.monotonic() - started, 1)}) + "\n"
    os.write(descriptor, line.encode())


class _alarm:
    """Raise TimeoutError in the block after some seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        def ring(_signal: int, _frame: Any) -> None:
            raise TimeoutError

        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def graded(name: str, cells: Sequence[Cell], names: dict[str, Any]) -> dict[str, Any]:
    """Run the cells up to the exercise, and return the state of what they give to `check`, with the reasons."""
    found: list[tuple[Score, bool]] = []

    def keep(checked: str, answer: Any) -> Any:
        if checked != name:
            return named(checked).solution or answer
        result = score(name, answer)
        found.append((result, not result.ok and untouched(name, answer)))
        return answer

    labkit.check.check = keep  # also for a cell that imports it
    mine = _cells_of(name, cells)
    if not mine:
        return _result(name, "missing")
    problem = ""
    for cell in cells[: cells.index(mine[-1]) + 1]:
        names["check"] = keep
        problem = _run(cell, names, whole=cell in mine) or problem
    if not found:
        return _result(name, "attempted", reasons=[problem or "the cell does not call check"])
    result, is_untouched = max(found, key=lambda each: each[0].passed)
    if is_untouched:
        return _result(name, "untouched", 0, result.total)
    reasons = [each.reason if each.reason not in ("", ONLY_FIRST) else str(each) for each in result.told]
    return _result(name, "solved" if result.ok else "attempted", result.passed, result.total, [*reasons, result.advice])


def _cells_of(name: str, cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells of an exercise: those marked since the one before was checked, up to the call for this one."""
    waiting: list[Cell] = []
    for cell in cells:
        if cell.is_exercise:
            waiting.append(cell)
            if checked := CHECKED.search(cell.source):
                if checked[1] == name:
                    return waiting
                waiting = []
    return []


def _run(cell: Cell, names: dict[str, Any], *, whole: bool) -> str:
    """Run a cell of the exercise as a `whole`; of any other its functions, classes, imports and constants, and the
    name that an earlier exercise's `check` gives to labkit's solution. Return the error in words."""
    linecache.cache[cell.place] = (len(cell.source), None, cell.source.splitlines(keepends=True), cell.place)
    try:
        tree = ast.parse(cell.source, cell.place)
        if not whole:
            tree.body = [statement for statement in tree.body if _defines(statement)]
        with Watch(None).alarm():
            exec(compile(tree, cell.place, "exec"), names)
    except (Exception, SystemExit) as error:
        return f"{cell.place} raised {raised(error)}"
    return ""


def _defines(statement: ast.stmt) -> bool:
    """Return True for a definition that costs nothing: a function, a class, an import, a name for a literal, and a name
    for what `check` returns."""
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        if statement.value and CHECKED.match(ast.unparse(statement.value)):
            return True
        try:
            return statement.value is not None and [ast.literal_eval(statement.value)] != []
        except (ValueError, TypeError, SyntaxError):
            return False
    return isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom)


def _result(name: str, state: str, passed: int = 0, total: int = 0, reasons: Sequence[str] = ()) -> dict[str, Any]:
    told = [" ".join(reason.split())[:WORDS] for reason in reasons if reason]
    return {"exercise": name, "state": state, "passed": passed, "total": total, "reasons": told}


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), Limits(*json.loads(sys.argv[3])), int(sys.argv[4]))
