"""The long matrices that `make test` covers by a subset, in parts of under 40 minutes each.

python scripts/sweep.py             all parts, but for those that passed at this commit already
python scripts/sweep.py PART ...    these parts, from their beginning
python scripts/sweep.py list        names of the parts, and where each of them stands

A part that was cut goes on where it was, as long as the commit is the same. `build/sweep/PART.txt` has the commit, the
date, every test that passed or was skipped, and last how many were skipped.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / "build" / "sweep"
PARALLEL = "tests/parallel"
SURVIVAL = f"{PARALLEL}/survival"
PARTS: dict[str, list[str]] = {
    "faults": [f"{PARALLEL}/test_planted_faults.py", "-k", "not float32"],
    "faults-float32": [f"{PARALLEL}/test_planted_faults.py", "-k", "float32"],
    "parity": [f"{PARALLEL}/test_gpt_parity.py"],
    "parity-schedules": [f"{PARALLEL}/test_schedule_parity.py"],
    "parity-data": [f"{PARALLEL}/test_data_layout_parity.py"],
    "parity-experts": [f"{PARALLEL}/test_moe_parity.py"],
    "graphs": [f"{PARALLEL}/test_graphs_moe.py", f"{PARALLEL}/test_graphs_training_ranks.py"],
    "gpu-parts": ["tests/unit/test_benchmark_gpu.py"],
    "gpu-suite": [f"{PARALLEL}/test_gpu_suite_bare.py"],
    "mutations": ["tests/unit/test_mutations.py"],
    "chapters": [f"tests/notebooks/test_{name}.py" for name in ("cli_run", "exercises", "parameters", "run_chapters")],
    "chapters-random": ["tests/notebooks/test_random_parameters.py"],
    "browser": ["tests/browser"],
    "survival-saves": [f"{SURVIVAL}/test_killed_{name}.py" for name in ("saves", "starts")],
    "survival-ranks": [f"{SURVIVAL}/test_{name}.py" for name in ("killed_ranks", "silent_ranks", "one_folder")],
    "survival-files": [f"{SURVIVAL}/test_damaged_files.py", f"{SURVIVAL}/test_no_room.py"],
    "survival-layouts": [f"{SURVIVAL}/test_resumed_layouts.py"],
    "survival-signals": [f"{SURVIVAL}/test_signals.py"],
    "survival-soak": [f"{SURVIVAL}/test_soak.py"],
}
"""pytest's arguments by part; what none of them names is the part `rest`."""
NAMED = sorted({word for words in PARTS.values() for word in words if word.startswith("tests/")})
PARTS["rest"] = ["tests", *(f"--ignore={path}" for path in NAMED)]
ENDED = "all passed"
"""Begin of the last line of a part that is through."""


@dataclass(eq=False)
class Progress:
    """A pytest plugin: leaves out the tests that passed, and writes down those that pass."""

    path: Path
    passed: set[str] = field(default_factory=set)
    """Before this run."""
    failed: set[str] = field(default_factory=set)
    skipped: int = 0

    def begin(self, commit: str) -> None:
        """Read what passed at this commit; start a new record where the old one is of another, or complete."""
        lines = self.path.read_text().splitlines() if self.path.is_file() else []
        if lines[:1] == [commit] and not lines[-1].startswith(ENDED):
            self.passed = set(lines[2:])
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(f"{commit}\n{time.strftime('%Y-%m-%d %H:%M')}\n")

    def write(self, line: str) -> None:
        """One line more; a power cut loses at most the last."""
        with self.path.open("a") as file:
            file.write(f"{line}\n")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect what passed before."""
        before = [item for item in items if item.nodeid in self.passed]
        items[:] = [item for item in items if item.nodeid not in self.passed]
        config.hook.pytest_deselected(items=before)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that passed or was skipped need not run again; one that failed is shown at once, and again last."""
        self.skipped += report.skipped
        if report.failed:
            self.failed.add(report.nodeid)
            print(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}", flush=True)
        elif report.when == "teardown" and report.nodeid not in self.failed:
            self.write(report.nodeid)


def commit() -> str:
    """Of the checkout, marked where files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def standing(part: str, at: str) -> str:
    """Where the part stands, in a few words."""
    path = STATE / f"{part}.txt"
    if not path.is_file():
        return "never run"
    lines = path.read_text().splitlines()
    ended = lines[-1] if lines[-1].startswith(ENDED) else f"cut after {len(lines) - 2} tests"
    return f"{ended} at {lines[0]}{'' if lines[0] == at else ', an older state'}, {lines[1]}"


def run(part: str, at: str) -> bool:
    """Run what is left of the part; whether all of it has passed."""
    progress, start = Progress(STATE / f"{part}.txt"), time.monotonic()
    progress.begin(at)
    words = [*PARTS[part], "-m", "sweep", "--durations=20", f"--rootdir={ROOT}"]
    code = pytest.main(words, plugins=[progress])
    ok = code == pytest.ExitCode.OK or (code == pytest.ExitCode.NO_TESTS_COLLECTED and bool(progress.passed))
    if ok:
        progress.write(f"{ENDED}, {progress.skipped} skipped")
    outcome = standing(part, at) if ok else "FAILED"
    print(f"== {part}: {outcome}, after {(time.monotonic() - start) / 60:.1f} min", flush=True)
    return ok


def main() -> int:
    """Exit code 0 where every chosen part passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", help="names of parts, or list; none means all")
    chosen, at = parser.parse_args().part, commit()
    if chosen == ["list"]:
        print(*(f"{part:18}{standing(part, at)}" for part in PARTS), sep="\n")
        return 0
    if unknown := [part for part in chosen if part not in PARTS]:
        parser.error(f"no part {unknown[0]!r}; parts: {', '.join(PARTS)}")
    os.chdir(ROOT)
    if len(chosen) == 1:
        return 0 if run(chosen[0], at) else 1
    # Each part in a process of its own: what one leaves in memory is not there in the next.
    codes = []
    for part in chosen or PARTS:
        if not chosen and standing(part, at).startswith(ENDED) and f" at {at}, " in standing(part, at):
            print(f"== {part}: {standing(part, at)}", flush=True)
            continue
        codes.append(subprocess.run([sys.executable, __file__, part], cwd=ROOT, check=False).returncode)
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(main())
