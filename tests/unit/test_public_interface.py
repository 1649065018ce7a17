"""Public names: no package loses one that README, docs/, an example or a chapter imports."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

import labkit

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = sorted(path.parent.name for path in (ROOT / "labkit").glob("*/__init__.py"))


def test_every_package_is_reached_from_labkit_alone() -> None:
    """In a fresh interpreter, since an import made elsewhere would set the attribute as well."""
    names = [*PACKAGES, "events"]
    code = f"import labkit; assert [getattr(labkit, n).__name__ for n in {names}] == ['labkit.' + n for n in {names}]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert set(names) <= set(dir(labkit))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = labkit.nothing  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_that_a_package_promises_exists(package: str) -> None:
    module = importlib.import_module(f"labkit.{package}")
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert len(set(module.__all__)) == len(module.__all__)


def _imported(source: str) -> set[tuple[str, str]]:
    """(package, name) of each `from labkit.package import name`."""
    code = "\n".join(line for line in source.splitlines() if not line.lstrip().startswith(("%", "!")))
    statements = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    found = [(str(node.module).split("."), alias.name) for node in statements for alias in node.names]
    return {(module[1], name) for module, name in found if module[0] == "labkit" and len(module) == 2}


def _shown() -> set[tuple[str, str]]:
    """What chapters, examples, and the pages' blocks of Python import."""
    found = set()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        found |= set().union(*(_imported(cell.source) for cell in cells if cell.cell_type == "code"))
    for path in (ROOT / "examples").glob("*.py"):
        found |= _imported(path.read_text())
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
            found |= _imported(block)
    return found


def test_every_name_that_readers_are_shown_is_public() -> None:
    """A module that is imported itself, as `labkit.events`, is in no table."""
    shown = {pair for pair in _shown() if not (ROOT / "labkit" / pair[0] / f"{pair[1]}.py").exists()}
    missing = [
        f"{package}.{name}"
        for package, name in sorted(shown)
        if not hasattr(module := importlib.import_module(f"labkit.{package}"), name)
        or (package in PACKAGES and name not in module.__all__)
    ]
    assert missing == [] and len(shown) > 80
