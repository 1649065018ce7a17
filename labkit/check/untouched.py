"""Notice a body that is still the one with which the chapter starts.

The chapter itself is the source of that body: its cells tagged `exercise`, up to the one that checks the exercise.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterable
from functools import cache
from typing import Any

from labkit.check.chapter_copies import CHAPTERS

CHECKED = re.compile(r"""\b(?:check|score)\(["'](\d\d\.\w+)["']""")
"""The call that ends an exercise."""


def untouched(name: str, answer: Any) -> bool:
    """Return True if all functions of the exercise's cells are as the chapter has them, spaces and comments aside."""
    start, mine = _starting_functions(name), getattr(answer, "__globals__", {})
    return bool(start) and all(_tree(mine.get(function)) == tree for function, tree in start.items())


@cache
def _starting_functions(name: str) -> dict[str, str]:
    """Return the syntax tree of each function that the cells of the exercise define, by its name."""
    for path in CHAPTERS.glob(f"{name.partition('.')[0]}_*.ipynb"):
        found: dict[str, str] = {}
        for source in _exercise_cells(json.loads(path.read_text(encoding="utf-8"))):
            functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
            found |= {function.name: ast.dump(function) for function in functions}
            if ends := CHECKED.search(source):
                if ends[1] == name:
                    return found
                found = {}
    return {}


@cache
def numbered(chapter: str) -> dict[str, int]:
    """Return the names of a chapter's exercises with the number under which it has them, 1 first."""
    (path,) = CHAPTERS.glob(f"{chapter}_*.ipynb")
    cells = _exercise_cells(json.loads(path.read_text(encoding="utf-8")))
    names = [found[1] for source in cells if (found := CHECKED.search(source))]
    return {name: number for number, name in enumerate(names, 1)}


def imports_of(sources: Iterable[str]) -> str:
    """Return every import at the top of these cells, each once. Cells that start with `%%` are another language's."""
    plain = [re.sub(r"^%.*", "", source, flags=re.MULTILINE) for source in sources if not source.startswith("%%")]
    lines = [
        node for source in plain for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    return "\n".join(dict.fromkeys(map(ast.unparse, lines)))


def _exercise_cells(notebook: dict[str, Any]) -> list[str]:
    return [
        "".join(cell["source"])
        for cell in notebook["cells"]
        if cell["cell_type"] == "code" and "exercise" in cell["metadata"].get("tags", [])
    ]


def _tree(function: Any) -> str:
    """Return the syntax tree of a function's source; empty where there is no source."""
    try:
        return ast.dump(ast.parse(textwrap.dedent(inspect.getsource(function))).body[0])
    except (OSError, TypeError, SyntaxError):
        return ""
