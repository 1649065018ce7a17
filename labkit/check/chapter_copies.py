"""The chapters that labkit carries, and copies of them to work in, without solutions and outputs.

A file next to the copies records the SHA-256 of each copy as it was written, and that of its cells. A copy that still
has its sum is renewed when labkit's chapter has changed. Any other holds somebody's work, and is never written again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from labkit.output_files import appearing

CHAPTERS = (Path(__file__).parents[1] / "notebooks").resolve()
"""The folder `notebooks` of a checkout, or that of an installed labkit."""
RECORD = ".labkit-copies.json"
"""Name of the file with the sums; the list of files in JupyterLab does not show it."""
_LINK_UP = re.compile(r"\[([^\]]*)\]\(\.\./([^)]*)\)")


def chapters_in(folder: Path) -> list[Path]:
    """Return the chapters of a folder in their order."""
    return sorted(folder.glob("[0-9][0-9]_*.ipynb"))


def linked_root(folder: Path, root: Path) -> Path:
    """Return the checkout `root` if `folder` is in it, so that links of its chapters to `docs` work; else `folder`."""
    return root if (root / "docs").is_dir() and folder.is_relative_to(root) else folder


@dataclass
class Copies:
    """The copies of a folder after `write_copies`."""

    folder: Path
    chapters: list[str]
    """Names of all chapters."""
    changed: list[str] = field(default_factory=list)
    """Those that the reader has changed, which stay as they are."""
    renewed: list[str] = field(default_factory=list)
    """Those that the reader had not changed, and labkit has."""
    outdated: list[str] = field(default_factory=list)
    """Those of `changed` that were made from an older chapter."""

    def __str__(self) -> str:
        notes = [f"{len(self.changed)} with your work, which stay as they are"] if self.changed else []
        notes += [f"{len(self.renewed)} renewed"] if self.renewed else []
        return ", ".join([f"{len(self.chapters)} chapters in {self.folder}", *notes])


def write_copies(folder: Path, source: Path) -> Copies:
    """Copy the chapters of `source` into `folder`, except those in which somebody has worked.

    Raises OSError for a file that cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chapters, sums = chapters_in(source), _recorded(folder)
    copies = Copies(folder, [path.name for path in chapters])
    for path in chapters:
        fresh, target = working_copy(path, folder), folder / path.name
        there = target.read_bytes() if target.exists() else None
        known = sums.get(path.name, {})
        if there not in (None, fresh) and _sum(there) != known.get("copy"):
            copies.changed.append(path.name)
            if known.get("cells") != _sums(fresh)["cells"]:
                copies.outdated.append(path.name)
            continue
        if there != fresh:
            _write(target, fresh)
        if there is not None and known.get("cells") != _sums(fresh)["cells"]:
            copies.renewed.append(path.name)
        sums[path.name] = _sums(fresh)
    _record(folder, sums)
    return copies


def write_beside(folder: Path, name: str, source: Path) -> Path:
    """Write a new copy of a chapter next to the reader's own, under the next free name, and return its path."""
    stem = Path(name).stem
    target = next(path for number in count(2) if not (path := folder / f"{stem}_{number}.ipynb").exists())
    fresh = working_copy(source / name, folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write(target, fresh)
    _record(folder, _recorded(folder) | {name: _sums(fresh)})
    return target


def working_copy(path: Path, folder: Path) -> bytes:
    """Return the file for `folder`: a chapter without solutions and outputs.

    Its metadata are those that JupyterLab would enter when it opens the file, which would mark it as changed. Links to
    pages of the chapter's checkout become text if `folder` is not in this checkout.
    """
    notebook = json.loads(path.read_text(encoding="utf-8"))
    notebook["metadata"] = {"kernelspec": _kernel(), "language_info": _language()}
    notebook["cells"] = [
        cell for cell in notebook["cells"] if "solution" not in cell.get("metadata", {}).get("tags", [])
    ]
    root = path.parents[1]
    up = Path(os.path.relpath(root, folder)).as_posix()
    link = rf"[\1]({up}/\2)" if linked_root(folder, root) == root else r"\1 (\2 in labkit's repository)"
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
        else:
            text = _LINK_UP.sub(link, "".join(cell["source"]))
            cell["source"] = text.splitlines(keepends=True)
    return (json.dumps(notebook, ensure_ascii=False, indent=1, sort_keys=True) + "\n").encode()


def _kernel() -> dict[str, str]:
    """Return what JupyterLab enters for the kernel of this environment."""
    from ipykernel import kernelspec

    spec = kernelspec.get_kernel_dict()
    return {"display_name": spec["display_name"], "language": spec["language"], "name": "python3"}


def _language() -> dict[str, Any]:
    """Return what a kernel of this Python tells of its language (`IPythonKernel.language_info`)."""
    return {
        "codemirror_mode": {"name": "ipython", "version": sys.version_info.major},
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "name": "python",
        "nbconvert_exporter": "python",
        "pygments_lexer": f"ipython{sys.version_info.major}",
        "version": sys.version.split()[0],
    }


def _sum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _sums(copy: bytes) -> dict[str, str]:
    """Return the sum of a copy, and that of its cells, which another version of Python leaves as it is."""
    return {"copy": _sum(copy), "cells": _sum(json.dumps(json.loads(copy)["cells"]).encode())}


def _record(folder: Path, sums: dict[str, dict[str, str]]) -> None:
    _write(folder / RECORD, json.dumps(sums, indent=1).encode())


def _recorded(folder: Path) -> dict[str, dict[str, str]]:
    """Return the sums of a folder; none if the record is missing or damaged, so that every file there is kept."""
    try:
        found = json.loads((folder / RECORD).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, content: bytes) -> None:
    with appearing(path) as draft:
        draft.write_bytes(content)
