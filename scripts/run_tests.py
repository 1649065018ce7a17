"""Everything that must pass, in stages; stops at the first that fails and names it. Totals and the slowest come last.

python scripts/run_tests.py [STAGE ...]     all stages, or only those named (--list shows them)

A stage is cut into pieces, each one process of one tool. They run in the order of the list, side by side on two cores.
The tests that say how soon a hang ends mostly wait: two pieces of them share a core, beside types and unit tests.
"""

from __future__ import annotations

import argparse
import compileall
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "build" / "test-reports"
CORES = 2.0
"""That pieces keep busy side by side."""
SLOWEST = 20
"""Tests that are named at the end."""
TIMED = (
    "tests/parallel/launch/test_launch_faults.py",
    "tests/parallel/launch/test_launch_scripts.py",
    "tests/parallel/test_broken_schedules.py",
    "tests/parallel/launch/test_launch_notebooks.py",
    "tests/unit/test_gpu_suite.py",
    "tests/unit/test_own_process.py",
)
"""Tests of hangs, which say how soon one ends."""
OF_CHAPTERS = ("chapters ", "other parameters")
"""Begins of the names of pieces that run chapters."""


@dataclass(frozen=True)
class Piece:
    """One process of a tool of this Python's environment; pytest also leaves a report."""

    name: str
    tool: str
    arguments: tuple[str, ...] = ()
    cores: float = 1.0
    """That it keeps busy."""

    def report(self) -> Path:
        """Where pytest writes what it counted and measured."""
        return REPORTS / f"{self.name.replace(' ', '-')}.xml"

    def command(self) -> list[str]:
        """The command line."""
        own = [f"--junitxml={self.report()}"] if self.tool == "pytest" else []
        if own and "--nbval" not in self.arguments:
            own += ["-p", "no:nbval"]  # whose imports take two seconds
        return [str(Path(sys.executable).parent / self.tool), *self.arguments, *own]

    def environment(self) -> dict[str, str]:
        """Of the tool: without GPUs but for the tests that need one. A chapter's `device = auto` is then the CPU.

        Tests have one thread, as ranks have. With two, the threads of pieces that run side by side wait for each other.
        Chapters have as many as a user's. None of them writes bytecode, which `main` has compiled: a process that a
        test kills, or whose files it limits, could leave half of one.
        """
        threads = {} if self.name.startswith(OF_CHAPTERS) else {"OMP_NUM_THREADS": "1"}
        gpus = {} if "tests/gpu" in self.arguments else {"CUDA_VISIBLE_DEVICES": ""}
        return os.environ | {"PYTHONDONTWRITEBYTECODE": "1"} | threads | gpus


@dataclass(frozen=True)
class Stage:
    """Pieces that belong together."""

    name: str
    pieces: tuple[Piece, ...]


@dataclass
class Outcome:
    """What has run."""

    failed: list[str] = field(default_factory=list)
    """Names of the pieces that failed."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By stage, added up over its pieces."""


def stages() -> list[Stage]:
    """The stages in order: what fails fastest comes first, and the shortest pieces last, so that both lanes end."""
    return [
        Stage("ruff check", (Piece("ruff check", "ruff", ("check", ".")),)),
        Stage("ruff format", (Piece("ruff format", "ruff", ("format", "--check", ".")),)),
        Stage("import-linter", (Piece("import-linter", "lint-imports"),)),
        Stage("hangs", _dealt("hangs", TIMED, 2, cores=0.5)),
        Stage("basedpyright", (Piece("basedpyright", "basedpyright"),)),
        Stage("unit", _dealt("unit", _files("tests/unit"), 3)),
        Stage("parallel", _dealt("parallel", [*_files("tests/parallel"), "tests/gpu"], 4, "-rs")),
        Stage("oracles", _dealt("oracles", _files("tests/oracles"), 1)),
        Stage("other parameters", _dealt("other parameters", _files("tests/notebooks"), 1)),
        Stage("chapters", _dealt("chapters", _chapters(), 6, "--nbval", "--nbval-cell-timeout=120")),
    ]


def _files(folder: str) -> list[str]:
    """Every test file below the folder, but for those of hangs."""
    found = (path.relative_to(ROOT).as_posix() for path in sorted((ROOT / folder).rglob("test_*.py")))
    return [path for path in found if path not in TIMED]


def _dealt(name: str, files: Sequence[str], count: int, *options: str, cores: float = 1.0) -> tuple[Piece, ...]:
    """The files dealt to `count` pieces in turn, so that neighbours, which cost alike, are apart."""
    return tuple(Piece(f"{name} {i + 1}", "pytest", (*files[i::count], *options), cores) for i in range(count))


def _chapters() -> list[str]:
    """Every chapter; nbval starts a kernel for each."""
    return [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))]


def run(chosen: Sequence[Stage]) -> Outcome:
    """Run the pieces of the stages in order, as many as the cores take; after one has failed no other is started."""
    outcome, start = Outcome(), time.monotonic()
    waiting = [(stage, piece) for stage in chosen for piece in stage.pieces]
    running: dict[Future[tuple[int, str, float]], tuple[Stage, Piece]] = {}
    with ThreadPoolExecutor() as threads:
        while running or (waiting and not outcome.failed):
            while waiting and not outcome.failed and _busy(running.values()) + waiting[0][1].cores <= CORES:
                stage, piece = waiting.pop(0)
                running[threads.submit(_run_piece, piece)] = stage, piece
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                stage, piece = running.pop(done)
                code, printed, seconds = done.result()
                outcome.seconds[stage.name] += seconds
                if code != 0:
                    outcome.failed.append(piece.name)
                _tell(piece, code, printed, seconds, time.monotonic() - start)
    return outcome


def _busy(running: Iterable[tuple[Stage, Piece]]) -> float:
    """Cores that the running pieces keep busy."""
    return sum(piece.cores for _, piece in running)


def _run_piece(piece: Piece) -> tuple[int, str, float]:
    """Exit code, what it printed, and seconds."""
    start = time.monotonic()
    tool = subprocess.run(
        piece.command(), cwd=ROOT, env=piece.environment(), stdin=subprocess.DEVNULL, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    return tool.returncode, tool.stdout, time.monotonic() - start


def _tell(piece: Piece, code: int, printed: str, seconds: float, since_start: float) -> None:
    """One line for a piece that passed, below the reasons of what it skipped; all that a failed one printed."""
    kept = [line for line in printed.splitlines() if code != 0 or line.startswith("SKIPPED")]
    outcome = "passed" if code == 0 else f"FAILED with exit code {code}"
    print(*kept, f"== {since_start:4.0f} s: {piece.name} {outcome} in {seconds:.1f} s", sep="\n", flush=True)


def totals(reports: Sequence[Path]) -> str:
    """`N passed, N failed, N skipped` over the JUnit reports; an error counts as failed."""
    counts: Counter[str] = Counter()
    for report in reports:
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            tests, failed, skipped = (int(suite.get(key, 0)) for key in ("tests", "failures", "skipped"))
            failed += int(suite.get("errors", 0))
            counts.update(passed=tests - failed - skipped, failed=failed, skipped=skipped)
    return f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"


def slowest(reports: Sequence[Path], count: int = SLOWEST) -> list[tuple[float, str]]:
    """Seconds and names of the tests that took longest, fixtures included."""
    cases = [case for report in reports for case in ElementTree.parse(report).getroot().iter("testcase")]
    named = [(float(case.get("time", 0)), f"{case.get('classname')}::{case.get('name')}") for case in cases]
    return sorted(named, reverse=True)[:count]


def main() -> int:
    """Exit code 0 where every chosen stage passed."""
    every = {stage.name: stage for stage in stages()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", nargs="*", help="names of stages; none means all")
    parser.add_argument("--list", action="store_true", help="print the stages' names and stop")
    arguments = parser.parse_args()
    if arguments.list:
        print(*every, sep="\n")
        return 0
    if unknown := [name for name in arguments.stage if name not in every]:
        parser.error(f"no stage {unknown[0]!r}; stages: {', '.join(every)}")

    REPORTS.mkdir(parents=True, exist_ok=True)
    for report in REPORTS.glob("*.xml"):
        report.unlink()
    start = time.monotonic()
    # Hundreds of processes import labkit, and compiling it takes each a third of a second.
    compileall.compile_dir(ROOT / "labkit", quiet=2)
    outcome = run([every[name] for name in arguments.stage or every])
    reports = sorted(REPORTS.glob("*.xml"))
    print("\nslowest tests:", *(f"{seconds:7.1f} s  {name}" for seconds, name in slowest(reports)), sep="\n")
    print("\nseconds by stage, added up over its pieces:")
    print(*(f"{seconds:7.1f} s  {name}" for name, seconds in outcome.seconds.items()), sep="\n")
    seconds = time.monotonic() - start
    print(
        f"\n{'FAILED: ' + ', '.join(outcome.failed) if outcome.failed else 'all stages passed'} after {seconds:.0f} s"
    )
    print(totals(reports))
    return 1 if outcome.failed else 0


if __name__ == "__main__":
    sys.exit(main())
