"""The parts of the GPU suite: the table that names them, their command lines, and what their outcome depends on.

The table is `gpu_parts.json`, a list of parts. Each has a `name`, a `phase`, `seconds` (its time limit), and one of

- `test`: a file or a node id; `select` is pytest's -k,
- `benchmark`: a name of `benchmarks/gpu.py --list`,
- `command`: a list of words; exit code 77 means skipped.

`together: true` lets neighbours in the table run at once. `files` names further files that the part reads.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("test", "benchmark", "command")


@dataclass(frozen=True)
class Part:
    """One line of the table."""

    name: str
    phase: int
    seconds: float
    test: str = ""
    benchmark: str = ""
    command: tuple[str, ...] = ()
    select: str = ""
    together: bool = False
    files: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Which of the three ways to run it was given."""
        return next(kind for kind in KINDS if getattr(self, kind))

    def words(self, folder: Path, rows: Path) -> list[str]:
        """Its command line; reports go to `folder`, measured rows are appended to the file `rows`."""
        if self.test:
            chosen = ["-k", self.select] if self.select else []
            plain = ["-o", "addopts=", "-o", "filterwarnings=", "-p", "no:cacheprovider", "-p", "gpu_missing_packages"]
            shown = ["-m", "not sweep", "--import-mode=importlib", "-v", "--tb=short", f"--junitxml={folder / 'junit'}"]
            return [sys.executable, "-m", "pytest", *plain, *shown, *chosen, self.test]
        if self.benchmark:
            return [sys.executable, "benchmarks/gpu.py", self.benchmark, "--out", str(rows)]
        return [sys.executable if word == "python" else word for word in self.command]

    def key(self, versions: str) -> str:
        """Hash of all that its outcome depends on: labkit, its own files, itself but for the time limit, versions."""
        told = hashlib.sha256(f"{versions} {self.words(Path(), Path())[1:]}".encode())
        own = [ROOT / name for name in self.files]
        if self.test:
            file = ROOT / self.test.split("::")[0]
            own += sources([file, file.parent / "conftest.py", ROOT / "tests" / "conftest.py"])
        if self.benchmark:
            own += sources([ROOT / "benchmarks" / f"{module_of(self.benchmark)}.py"])
        for path in sorted(set(own)):
            told.update(f"{path} {digest(path)}".encode())
        told.update(package_digest().encode())
        return told.hexdigest()


def read_parts(path: Path) -> list[Part]:
    """The table.

    Raises:
        ValueError: the file, the part and what is wrong with it.
    """
    try:
        table = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no table of parts: {error}") from error
    if not isinstance(table, list):
        raise ValueError(f"{path} is no table of parts: give a list")
    parts = []
    for number, entry in enumerate(table):
        try:
            lists = {key: tuple(entry[key]) for key in ("command", "files") if key in entry}
            part = Part(**(entry | lists))
        except TypeError as error:
            raise ValueError(f"{path}, part {number}: {error}") from error
        if sum(bool(getattr(part, kind)) for kind in KINDS) != 1:
            raise ValueError(f"{path}, part {part.name!r}: give one of {', '.join(KINDS)}")
        if part.phase not in (1, 2, 3) or not isinstance(part.seconds, int | float) or part.seconds <= 0:
            raise ValueError(f"{path}, part {part.name!r}: phase is 1, 2 or 3, and seconds are a number above 0")
        parts.append(part)
    names = [part.name for part in parts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{path}: the name {twice[0]!r} is given twice")
    return parts


@cache
def benchmark_table() -> dict[str, str]:
    """`PARTS` of benchmarks/gpu.py, read without running that file."""
    tree = ast.parse((ROOT / "benchmarks" / "gpu.py").read_text())
    for node in tree.body:
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(node, ast.AnnAssign) and isinstance(target, ast.Name) and target.id == "PARTS" and node.value:
            return ast.literal_eval(node.value)
    raise ValueError("benchmarks/gpu.py holds no table PARTS")


def module_of(benchmark: str) -> str:
    """The module that holds a benchmark part."""
    return benchmark_table().get(benchmark, benchmark).split(":")[0]


# ---- what an outcome depends on ----


@cache
def digest(path: Path) -> str:
    """Hash of a file; of a file that is missing, a word."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"


@cache
def package_digest() -> str:
    """Hash of all of labkit: imports are lazy, so any part may reach any module."""
    paths = sorted(path for path in (ROOT / "labkit").rglob("*") if path.is_file() and path.suffix != ".pyc")
    told = "".join(f"{path.relative_to(ROOT)} {digest(path)}\n" for path in paths)
    return hashlib.sha256(told.encode()).hexdigest()


def sources(start: Iterable[Path]) -> set[Path]:
    """These files and all of tests/ and benchmarks/ that they import, directly or not."""
    todo, found = [path for path in start if path.is_file()], set()
    while todo:
        path = todo.pop()
        if path not in found:
            found.add(path)
            todo += [file for name in imported(path) for file in beside(path, name)]
    return found


def imported(path: Path) -> Iterator[str]:
    """Names of the modules that a file imports anywhere in its text."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def beside(path: Path, module: str) -> list[Path]:
    """Where a module of that name lies next to the file, in tests/ or in benchmarks/."""
    if module.split(".")[0] == "labkit":
        return []
    name = module.split(".")[-1] + ".py"
    return [file for folder in (path.parent, ROOT / "tests", ROOT / "benchmarks") if (file := folder / name).is_file()]
