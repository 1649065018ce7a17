"""Everything that must pass, in stages; stops at the first that fails and names it. The pytest totals come last.

python scripts/run_tests.py [STAGE ...]     all stages, or only those named (--list shows them)
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "build" / "test-reports"


@dataclass(frozen=True)
class Stage:
    """One tool of this Python's environment; pytest also leaves a report, from which the totals are added up."""

    name: str
    tool: str
    arguments: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """The command line."""
        report = [f"--junitxml={REPORTS / self.name.replace(' ', '-')}.xml"] if self.tool == "pytest" else []
        return [str(Path(sys.executable).parent / self.tool), *self.arguments, *report]

    def environment(self) -> dict[str, str]:
        """Of the tool: without GPUs but for the tests that need one. A chapter's `device = auto` is then the CPU."""
        return dict(os.environ) if "tests/gpu" in self.arguments else os.environ | {"CUDA_VISIBLE_DEVICES": ""}


def stages() -> list[Stage]:
    """The stages in order: what fails fastest comes first."""
    chapters = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))]
    return [
        Stage("ruff check", "ruff", ("check", ".")),
        Stage("ruff format", "ruff", ("format", "--check", ".")),
        Stage("basedpyright", "basedpyright"),
        Stage("import-linter", "lint-imports"),
        Stage("unit", "pytest", ("tests/unit",)),
        Stage("parallel", "pytest", ("tests/parallel", "tests/gpu", "-rs")),
        Stage("oracles", "pytest", ("tests/oracles",)),
        Stage("chapters", "pytest", ("--nbval", "--nbval-cell-timeout=120", *chapters)),
        Stage("other parameters", "pytest", ("tests/notebooks",)),
    ]


def totals(reports: list[Path]) -> str:
    """`N passed, N failed, N skipped` over the JUnit reports; an error counts as failed."""
    counts: Counter[str] = Counter()
    for report in reports:
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            tests, failed, skipped = (int(suite.get(key, 0)) for key in ("tests", "failures", "skipped"))
            failed += int(suite.get("errors", 0))
            counts.update(passed=tests - failed - skipped, failed=failed, skipped=skipped)
    return f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"


def run(chosen: list[Stage]) -> str | None:
    """Run the stages in turn; returns the name of the one that failed, None where all passed."""
    for number, stage in enumerate(chosen, 1):
        print(f"\n== {number}/{len(chosen)} {stage.name}", flush=True)
        start = time.monotonic()
        tool = subprocess.run(stage.command(), cwd=ROOT, env=stage.environment(), stdin=subprocess.DEVNULL, check=False)
        code = tool.returncode
        outcome = "passed" if code == 0 else f"FAILED with exit code {code}"
        print(f"== {stage.name} {outcome} in {time.monotonic() - start:.1f} s", flush=True)
        if code != 0:
            return stage.name
    return None


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
    failed = run([every[name] for name in arguments.stage] if arguments.stage else list(every.values()))
    print(f"\n{'FAILED at stage: ' + failed if failed else 'all stages passed'} after {time.monotonic() - start:.0f} s")
    print(totals(sorted(REPORTS.glob("*.xml"))))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
