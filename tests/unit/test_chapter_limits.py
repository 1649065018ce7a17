"""What every chapter has: exercises with hints, a map of names, a teacher's page.

They hold for what a student reads; solutions are left out.
"""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
each_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)

LEAST = {"exercises": 3, "hints": 3, "map": 3, "page": 1}
"""Exercises, hints of the exercise with the fewest, rows of the name map, pages in docs/teaching."""


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def read_cells(chapter: Path) -> list[dict[str, Any]]:
    """The cells that a student reads: all but the solutions."""
    cells = json.loads(chapter.read_text())["cells"]
    return [cell for cell in cells if "solution" not in cell["metadata"].get("tags", [])]


def hints_by_exercise(cells: list[dict[str, Any]]) -> list[int]:
    """For each exercise, in order: the collapsed hints since the exercise before it."""
    found, hints = [], 0
    for cell in cells:
        if cell["cell_type"] == "markdown":
            hints += source(cell).count("<details>")
        elif re.search(r'\bcheck\("\d\d\.', source(cell)):
            found.append(hints)
            hints = 0
    return found


def name_map(cells: list[dict[str, Any]]) -> list[tuple[list[str], list[str]]]:
    """(labkit's names, files) of each row of the table under `## Names`."""
    text = "\n".join(source(cell) for cell in cells if cell["cell_type"] == "markdown")
    _, _, below = text.partition("\n## Names\n")
    rows = [line.strip("|").split("|") for line in below.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [(re.findall(r"`([^`]+)`", here), re.findall(r"`([^`]+)`", files)) for _, here, files in rows[2:]]


def measured(chapter: Path) -> dict[str, int]:
    """Every number that a limit speaks of."""
    cells = read_cells(chapter)
    hints = hints_by_exercise(cells)
    return {
        "exercises": len(hints),
        "hints": min(hints, default=0),
        "map": len(name_map(cells)),
        "page": int((ROOT / "docs" / "teaching" / f"{chapter.name[:2]}.md").is_file()),
    }


def broken(numbers: dict[str, int]) -> dict[str, int]:
    return {what: numbers[what] for what, least in LEAST.items() if numbers[what] < least}


@each_chapter
def test_a_chapter_keeps_the_limits(chapter: Path) -> None:
    assert broken(measured(chapter)) == {}


@each_chapter
def test_sections_are_numbered_without_a_gap(chapter: Path) -> None:
    text = "\n".join(source(cell) for cell in read_cells(chapter) if cell["cell_type"] == "markdown")
    numbers = [int(number) for number in re.findall(r"^## (\d+) ", text, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1)) and numbers, "a section lost its heading"


def defined(file: Path) -> set[str]:
    """Every name that a file gives to a function, class, parameter, variable or attribute."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


@each_chapter
def test_the_files_of_the_name_map_define_its_names(chapter: Path) -> None:
    for names, files in name_map(read_cells(chapter)):
        assert names and files, "each row has labkit's name and its file"
        known = set().union(*(defined(ROOT / file) for file in files))
        assert set(names) <= known, f"{', '.join(files)} does not define {', '.join(set(names) - known)}"


def test_a_file_that_does_not_define_a_name_is_noticed() -> None:
    names = defined(ROOT / "labkit" / "parallel" / "layers.py")
    assert "ColumnParallelLinear" in names and "copy_to_tensor_model_parallel_region" not in names


def test_a_broken_limit_is_noticed() -> None:
    assert broken(LEAST) == {}
    assert broken({**LEAST, "exercises": 2}) == {"exercises": 2}
