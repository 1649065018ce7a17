"""Planting a fault: one change of the source, carried out where no other test sees it.

A fault changes one symbol of `labkit/` (`symbols.py`), as a person could have typed it. Something must find the fault,
in one of two ways:

- a **comparison**: the ranks of a layout run the changed source, the one process the committed one, and the parity
  microscope must name the tensor that the fault spoils first (`planted`);
- a **test of the suite**: it runs in a copy of the tree that has the change, and must fail (`run_in_a_changed_copy`).

A piece that is not in its symbol exactly once is an error, never a fault that nothing finds.
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType
from typing import Any

from symbols import dotted, replaced

from labkit.config import presets
from labkit.launch import RankError
from labkit.train import compare

ROOT = Path(__file__).resolve().parents[1]
KEPT = ("config", "events", "launch")
"""Packages of which a rank keeps the modules it has: they hold its state, and no fault is planted in them this way."""


@dataclass(frozen=True)
class Comparison:
    """A layout that a fault spoils."""

    layout: dict[str, Any]
    """As `labkit.train.compare` takes it."""
    names: str
    """What the microscope must name first."""
    preset: str = "tiny"
    """Of `labkit.config.presets`."""
    changes: dict[str, Any] = field(default_factory=dict)
    """To the configuration, in the layout and in the one process."""
    steps: int = 1
    """Optimizer steps."""
    dtype: str = "float64"
    """Of the comparison."""


@dataclass(frozen=True)
class Fault:
    """A mistake, where to make it, and what must find it."""

    name: str
    """What is wrong, in a few words."""
    at: str
    """The symbol of labkit that it changes, such as `Bucket.reduce`; see `symbols.find_symbol`."""
    old: str
    """An expression or statements, which the symbol has exactly once."""
    new: str
    """The replacement. Nothing for statements that are left out."""
    found_by: Comparison | str
    """The comparison, or the tests that fail: pytest's arguments."""

    @property
    def planted_by(self) -> str:
        """The command whose tests find the fault."""
        return "make test" if isinstance(self.found_by, str) else "make sweep"

    def changed_source(self) -> tuple[Path, str]:
        """The file that the fault changes, and its text with the fault. ValueError where `old` is not there once."""
        try:
            return replaced(self.at, self.old, self.new)
        except ValueError as error:
            raise ValueError(f"fault {self.name!r}: {error}") from None


class _Loader(SourceFileLoader):
    """Loads the module from a text of its own."""

    text = ""

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.text, self.path, "exec")


class _Finder(MetaPathFinder):
    """Finds one module, and gives it another text."""

    def __init__(self, module: str, file: str, text: str) -> None:
        self.module, self.file, self.text = module, file, text

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self.module:
            return None
        loader = _Loader(fullname, self.file)
        loader.text = self.text
        return spec_from_file_location(fullname, self.file, loader=loader)


@contextmanager
def changed_modules(module: str, file: str, text: str) -> Iterator[None]:
    """Inside the block `import labkit...` gives fresh modules, one of them with another text; afterwards the old ones.

    Objects made of the old classes go on working beside the new ones, as long as nobody asks for their class.
    """

    def ours() -> dict[str, Any]:
        return {
            name: loaded
            for name, loaded in sys.modules.items()
            if name.startswith("labkit.") and name.split(".")[1] not in KEPT
        }

    package, old = sys.modules["labkit"], ours()
    attributes = {name: value for name, value in vars(package).items() if f"labkit.{name}" in old}
    for name in old:
        del sys.modules[name]
    finder = _Finder(module, file, text)
    sys.meta_path.insert(0, finder)
    try:
        yield
        if module not in sys.modules:
            raise RuntimeError(f"nothing imported {module}, so the fault in it was never run")
    finally:
        sys.meta_path.remove(finder)
        for name in ours():
            del sys.modules[name]
        sys.modules.update(old)
        for name, value in attributes.items():
            setattr(package, name, value)


def planted(fault: Fault) -> Callable[..., Any]:
    """`pretrain` with the fault, to be given to `labkit.train.compare`: it runs in the ranks of the layouts alone."""
    path, text = fault.changed_source()
    module, file = dotted(path), str(path)
    assert isinstance(fault.found_by, Comparison), "a test of the suite finds it"

    def pretrain(config: Any, observer: Any) -> Any:
        with changed_modules(module, file, text):
            from labkit.train.pretraining import pretrain as faulty

            return faulty(config, observer=observer)

    return pretrain


def run_in_a_changed_copy(fault: Fault, folder: Path) -> subprocess.CompletedProcess[str]:
    """pytest on `fault.found_by` in a copy of the tree in `folder` that has the fault; its exit code is 1 where a test
    failed, 0 where the fault was missed."""
    path, text = fault.changed_source()
    assert isinstance(fault.found_by, str), "a comparison needs no copy"
    unwanted = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in ("labkit", "tests", "scripts", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / name)
    (folder / path.relative_to(ROOT)).write_text(text, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        "not sweep",
        *_arguments(fault.found_by),
    ]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "CI": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def _arguments(found_by: str) -> Sequence[str]:
    """`FILE::test OTHER::test -k word` as a list; a name after -k may hold no blanks."""
    return found_by.split()


def find(fault: Fault, folder: Path) -> tuple[bool, str]:
    """Plant the fault and look: whether it is found as it should be, and what was named or which test failed.

    folder: an empty one, for a changed copy of the tree.
    """
    if isinstance(fault.found_by, str):
        result = run_in_a_changed_copy(fault, folder)
        failed = [line.split(" - ")[0] for line in result.stdout.splitlines() if line.startswith("FAILED ")]
        if result.returncode not in (0, 1) or bool(failed) != (result.returncode == 1):
            raise RuntimeError(f"fault {fault.name!r}: {fault.found_by} could not be run\n{result.stdout[-2000:]}")
        return bool(failed), failed[0].removeprefix("FAILED ") if failed else "nothing"
    wanted = fault.found_by
    matrix = runpy.run_path(str(ROOT / "scripts" / "parity_matrix.py"))
    has_experts = presets.get(wanted.preset).moe.num_experts > 0
    config = matrix["sparse" if has_experts else "small"](wanted.preset).override(wanted.changes)
    try:
        report = compare(config, [wanted.layout], steps=wanted.steps, dtype=wanted.dtype, pretrain=planted(fault))
    except RankError as error:  # found, but not as it should be: no tensor is named
        return False, str(error).split("\n", 1)[0]
    row = report.rows[0]
    named = row.first_difference or "nothing"
    return row.verdict == "fault" and named == wanted.names, named if row.verdict != "rounding" else "rounding"
