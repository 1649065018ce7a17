"""The plan of the GPU suite: its parts in order, what each runs and depends on, and which of them fit into a command.

The plan is `gpu_plan.json`, a list of parts. Each has a `name`, an `estimate` in seconds (its `limit` is twice that and
30 s, unless given), and one of

- `tests`: files or node ids, all in one process of pytest; `select` is its -k,
- `benchmark`: a name of `benchmarks/gpu.py --list`,
- `command`: a list of words; exit code 77 means skipped.

`env` adds environment variables, `wheels` installs the wheels of `--wheels` for the part alone, and `files` names what
else the part reads. Parts with tests run beside each other; a benchmark or command has the machine to itself, and so
has a `gate`: if nothing in it passes, the command ends. A CUDA error ends all tests of its process, so files share a
part only where none of them is likely to raise one.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("tests", "benchmark", "command")
LOOK = 15.0
"""Estimated seconds before the first part starts: torch is imported to ask for the GPU."""
HELPERS = "tests/**/*.py"
"""What tests import: all files of tests/ but tests themselves."""
PYTEST = (
    "-m", "pytest", "-o", "addopts=", "-o", "filterwarnings=", "-p", "no:cacheprovider", "-p", "gpu_missing_packages",
    "-p", "gpu_outcomes", "--import-mode=importlib", "-v", "--tb=short", "-o", "timeout=120",
)  # fmt: skip
WITH_WHEELS = """
"$1" -m pip install -q --no-index --no-deps --no-compile --disable-pip-version-check --target "$0" "$2"/*.whl &&
shift 2 && PYTHONPATH="$0:$PYTHONPATH" exec "$@"
"""
"""A shell's program: into folder $0 by Python $1 from wheels $2, then the command that follows."""


@dataclass(frozen=True)
class Part:
    """One line of the plan."""

    name: str
    estimate: float
    """Seconds that it is expected to take: it starts only while as many are left."""
    limit: float
    """It is killed after these seconds."""
    tests: tuple[str, ...] = ()
    benchmark: str = ""
    command: tuple[str, ...] = ()
    select: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    wheels: bool = False
    gate: bool = False
    files: tuple[str, ...] = ()

    @property
    def on_gpu(self) -> bool:
        """Whether its tests need a GPU; others see none."""
        return any(test.startswith("tests/gpu/") for test in self.tests)

    @property
    def together(self) -> bool:
        """Whether it may run beside others of this kind."""
        return bool(self.tests) and not self.gate

    def words(self, rows: Path, wheels: Path | None, folder: Path) -> list[str]:
        """Its command line; measured rows are appended to the file `rows`, wheels are installed into `folder`."""
        if self.benchmark:
            return [sys.executable, "benchmarks/gpu.py", self.benchmark, "--out", str(rows)]
        if self.command:
            return [sys.executable if word == "python" else word for word in self.command]
        words = [sys.executable, *PYTEST, "-m", "gpu and not sweep" if self.on_gpu else "not sweep"]
        words += [*(["-k", self.select] if self.select else []), *self.tests]
        if self.wheels and wheels is not None:
            return ["sh", "-c", WITH_WHEELS, str(folder / "wheels"), sys.executable, str(wheels), *words]
        return words

    def environment(self) -> dict[str, str]:
        """Its variables: tests of the CPU see no GPU, and neighbours share the cores."""
        own = {"OMP_NUM_THREADS": "2"} if self.together else {}
        if self.together and not self.on_gpu:
            own["CUDA_VISIBLE_DEVICES"] = ""
        return own | dict(self.env)

    def key(self, versions: str, wheels: Path | None) -> str:
        """Hash of all that its outcome depends on: labkit, its own files and their helpers, its words, versions."""
        own = [test.split("::")[0] for test in self.tests]
        beside = [HELPERS, "scripts/gpu_[mo]*.py"] if self.tests else ["benchmarks/*.py"] if self.benchmark else []
        names = sorted(path.name for path in wheels.glob("*.whl")) if self.wheels and wheels is not None else []
        told = [versions, self.tests, self.benchmark, self.command, self.select, dict(self.env), names]
        told += [digest(pattern) for pattern in ("labkit/**/*", *beside, *own, *self.files)]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()


@cache
def digest(pattern: str) -> str:
    """Hash of the files below the root that match."""
    found = hashlib.sha256()
    for name in sorted(glob.glob(str(ROOT / pattern), recursive=True)):
        is_other_test = pattern == HELPERS and Path(name).name.startswith("test_")
        if Path(name).is_file() and not name.endswith(".pyc") and not is_other_test:
            told = hashlib.sha256(Path(name).read_bytes()).hexdigest()
            found.update(f"{os.path.relpath(name, ROOT)} {told}\n".encode())
    return found.hexdigest()


def read_plan(path: Path) -> list[Part]:
    """The parts in order.

    Raises:
        ValueError: the file, the part and what is wrong with it.
    """
    try:
        plan = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no plan: {error}") from error
    parts = []
    for number, entry in enumerate(plan):
        try:
            parts.append(part_of(entry))
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, part {number}: {error}") from error
    names = [part.name for part in parts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{path}: the name {twice[0]!r} is given twice")
    return parts


def part_of(entry: Mapping[str, Any]) -> Part:
    """One entry of the plan.

    Raises:
        AttributeError, TypeError, ValueError: what is wrong with it.
    """
    estimate = entry.get("estimate")
    if not isinstance(estimate, int | float) or estimate <= 0:
        raise ValueError(f"estimate {estimate!r} must be seconds above 0")
    if sum(kind in entry for kind in KINDS) != 1:
        raise ValueError(f"give one of {', '.join(KINDS)}")
    if wrong := [key for key in ("tests", "command", "files") if not isinstance(entry.get(key, []), list)]:
        raise ValueError(f"{wrong[0]} must be a list")
    made: dict[str, Any] = {"limit": 2 * estimate + 30}
    made |= {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    return Part(**made)


# ---- what fits ----


def next_part(waiting: Sequence[Part], running: Sequence[Part], left: float, jobs: int) -> Part | None:
    """The first waiting part whose estimate fits into the seconds left, if it may start beside those that run."""
    part = next((part for part in waiting if part.estimate <= left), None)
    if part is None or not running:
        return part
    beside = part.together and all(one.together for one in running) and len(running) < jobs
    return part if beside else None


def foreseen(parts: Sequence[Part], seconds: float, jobs: int) -> list[tuple[float, Part]]:
    """(second at which it starts, part) of each part that a command of so many seconds takes, by the estimates."""
    clock, started, waiting = LOOK, [], list(parts)
    ends: dict[str, float] = {}
    while True:
        running = [part for _, part in started if part.name in ends]
        part = next_part(waiting, running, seconds - clock, jobs)
        if part is not None:
            waiting.remove(part)
            started.append((clock, part))
            ends[part.name] = clock + part.estimate
        elif ends:
            clock = ends.pop(min(ends, key=lambda name: ends[name]))
        else:
            return started
