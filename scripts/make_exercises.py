"""Copy the chapters for students, without solutions and outputs; prove that each stub fails and each solution passes.

    python scripts/make_exercises.py [FOLDER]     into exercises where no folder is given

A chapter marks the cells of an exercise with the tag `exercise`. The last of them calls `check("NN.name", answer)`.
They may use what the chapter imports, and no other cell. Cells that show a solution have the tag `solution`. A file
that is there already may hold somebody's work, and is kept if it was changed. Exit code 1 if a proof fails.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
from nbformat import NotebookNode

from labkit.check import Score, exercises, score
from labkit.check.chapter_copies import chapters_in, write_copies
from labkit.check.parameters import can_be_written
from labkit.check.untouched import CHECKED, imports_of

ROOT = Path(__file__).resolve().parent.parent


class Exercise(NamedTuple):
    """An exercise of a chapter: sources, to run as they stand."""

    imports: str
    stub: str


def exercises_of(notebook: NotebookNode) -> dict[str, Exercise]:
    """The exercises of a chapter by name."""
    imports = imports_of(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return {name: Exercise(imports, stub) for name, stub in stubs_of(notebook).items()}


def stubs_of(notebook: NotebookNode) -> dict[str, str]:
    """Source of the cells of exercises, joined up to each call of `check`, by the name that it checks."""
    found: dict[str, str] = {}
    waiting: list[str] = []
    for cell in notebook.cells:
        if cell.cell_type == "code" and "exercise" in cell.metadata.get("tags", []):
            waiting.append(cell.source)
            if name := CHECKED.search(cell.source):
                found[name[1]] = "\n".join(waiting)
                waiting = []
    return found


def run(exercise: Exercise) -> Score:
    """Run the cells of a stub, and return the score of what they give to `check`."""
    checked: list[Score] = []

    def keep(name: str, answer: Any) -> Any:
        checked.append(score(name, answer))
        return answer

    names: dict[str, Any] = {}
    exec(exercise.imports, names)
    names["check"] = keep
    exec(exercise.stub, names)
    return checked[-1]


def problem(name: str, stub: Score) -> str:
    """Why this is no exercise; empty where the stub fails by itself and the solution passes."""
    solution = score(name, exercises()[name].solution)
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
            stub = run(exercise)
            found = problem(name, stub)
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
