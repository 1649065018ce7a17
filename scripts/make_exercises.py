"""Copy the chapters for students, without solutions and outputs; prove that each stub fails and each solution passes.

    python scripts/make_exercises.py [FOLDER]     into exercises where no folder is given

A chapter marks the cells of an exercise with the tag `exercise`, and those of its solution with `solution`. The last of
them calls `check("NN.name", answer)`. Both may use what the chapter imports, and no other cell. A file that is there
already may hold somebody's work, and is kept if it was changed. Exit code 1 if a proof fails.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
from nbformat import NotebookNode

from labkit.check import Score, check
from labkit.check.chapter_copies import chapters_in, write_copies
from labkit.check.parameters import can_be_written

ROOT = Path(__file__).resolve().parent.parent
CHECKED = re.compile(r'\bcheck\("(\d\d\.\w+)"')


class Exercise(NamedTuple):
    """An exercise of a chapter: sources, to run as they stand."""

    imports: str
    stub: str
    solution: str


def exercises_of(notebook: NotebookNode) -> dict[str, Exercise]:
    """The exercises of a chapter by name; a solution that is missing is empty."""
    imports = imports_of(notebook)
    stubs, solutions = tagged(notebook, "exercise"), tagged(notebook, "solution")
    return {name: Exercise(imports, stub, solutions.get(name, "")) for name, stub in stubs.items()}


def tagged(notebook: NotebookNode, tag: str) -> dict[str, str]:
    """Source of the code cells with this tag, joined up to each call of `check`, by the name that it checks."""
    found: dict[str, str] = {}
    waiting: list[str] = []
    for cell in notebook.cells:
        if cell.cell_type == "code" and tag in cell.metadata.get("tags", []):
            waiting.append(cell.source)
            if name := CHECKED.search(cell.source):
                found[name[1]] = "\n".join(waiting)
                waiting = []
    return found


def imports_of(notebook: NotebookNode) -> str:
    """Every import of the chapter's code cells."""
    trees = [ast.parse(cell.source) for cell in notebook.cells if cell.cell_type == "code" and cell.source[:1] != "%"]
    lines = [node for tree in trees for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return "\n".join(dict.fromkeys(map(ast.unparse, lines)))


class Run(NamedTuple):
    """A stub or a solution that was run."""

    score: Score
    answer: Any
    """What its cells gave to `check`."""
    names: dict[str, Any]
    """What they define."""


def run(imports: str, cells: str) -> Run:
    """Run the cells of a stub or a solution."""
    checked: list[tuple[Score, Any]] = []

    def keep(name: str, answer: Any) -> Score:
        checked.append((check(name, answer), answer))
        return checked[-1][0]

    names: dict[str, Any] = {}
    exec(imports, names)
    names["check"] = keep
    exec(cells, names)
    return Run(*checked[-1], names)


def problem(name: str, exercise: Exercise, stub: Score) -> str:
    """Why this is no exercise; empty where the stub fails by itself and the solution passes."""
    if not exercise.solution:
        return f"{name} has no cell tagged solution"
    solution = run(exercise.imports, exercise.solution).score
    if not solution:
        return f"the solution of {name} fails: {solution!r}"
    if stub:
        return f"the stub of {name} passes"
    if lost := next((each.got for each in stub.outcomes if each.got.startswith("NameError")), ""):
        return f"the stub of {name} needs another cell: {lost}"
    return ""


def main() -> int:
    """Exit code 0 where every exercise is proved and every file written or kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "exercises")
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    if folder == ROOT / "notebooks":
        parser.error("the chapters themselves are in notebooks/; name another folder")
    if not can_be_written(folder):
        rule = "is a file; name a folder" if folder.is_file() else "cannot be written; name another folder"
        parser.exit(2, f"make_exercises: {folder}: {rule}\n")

    problems: list[str] = []
    print(f"{'cases passed':16} by the stub  by the solution")
    for path in chapters_in(ROOT / "notebooks"):
        for name, exercise in exercises_of(nbformat.read(path, as_version=4)).items():
            stub = run(exercise.imports, exercise.stub).score
            found = problem(name, exercise, stub)
            problems += [found] if found else []
            print(f"{name:16}{stub.passed:>6} of {stub.total:<5}{found or 'all'}")
    try:
        print(write_copies(folder, ROOT / "notebooks"))
    except OSError as error:
        parser.exit(1, f"make_exercises: {error}\n")
    print(*(f"make_exercises: {each}\n" for each in problems), sep="", end="", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
