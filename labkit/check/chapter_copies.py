"""The chapters that labkit carries, and copies of them to work in."""

from __future__ import annotations

import os
import re
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.output_files import appearing

if TYPE_CHECKING:
    from nbformat import NotebookNode

CHAPTERS = (Path(__file__).parents[1] / "notebooks").resolve()
"""The folder `notebooks` of a checkout, or that of an installed labkit."""
_LINK_UP = re.compile(r"\[([^\]]*)\]\(\.\./([^)]*)\)")


def chapters_in(folder: Path) -> list[Path]:
    """Return the chapters of a folder in their order."""
    return sorted(folder.glob("[0-9][0-9]_*.ipynb"))


def linked_root(folder: Path, root: Path = CHAPTERS.parent) -> Path:
    """Return the checkout that `folder` is in, so that links of its chapters to `docs` work; else `folder` itself."""
    return root if (root / "docs").is_dir() and folder.is_relative_to(root) else folder


def write_copies(folder: Path, source: Path = CHAPTERS, *, exercises: bool, overwrite: bool = False) -> str:
    """Copy the chapters of `source` into `folder`, and return a sentence that says what is there now.

    A file that is there may hold somebody's work, so it is kept unless `overwrite` is given. exercises: leave out
    solutions and outputs, so that readers predict first. Raises OSError for a file that cannot be written.
    """
    import nbformat

    folder.mkdir(parents=True, exist_ok=True)
    chapters, kept = chapters_in(source), 0
    for path in chapters:
        target = folder / path.name
        if target.exists() and not overwrite:
            kept += 1
            continue
        with appearing(target) as draft:
            nbformat.write(_copy(nbformat.read(path, as_version=4), folder, source.parent, exercises), draft)
    return f"{len(chapters)} chapters in {folder}" + (f", {kept} of them kept as they were" if kept else "")


def _copy(notebook: NotebookNode, folder: Path, root: Path, exercises: bool) -> NotebookNode:
    """Return the notebook for `folder`. Links to pages in the checkout at `root` become text where it is not in it."""
    made = deepcopy(notebook)
    if exercises:
        made.cells = [cell for cell in made.cells if "solution" not in cell.metadata.get("tags", [])]
    inside = linked_root(folder, root) == root
    up = Path(os.path.relpath(root, folder)).as_posix()
    link = rf"[\1]({up}/\2)" if inside else r"\1 (\2 in labkit's repository)"
    for cell in made.cells:
        if cell.cell_type != "code":
            cell.source = _LINK_UP.sub(link, cell.source)
        elif exercises:
            cell.outputs, cell.execution_count = [], None
    return made
