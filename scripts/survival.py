"""Faults that checkpoints and restarts must survive, in numbers: run the tests, keep what they counted, write the page.

python scripts/survival.py             all parts, but for those that passed at this commit already
python scripts/survival.py PART ...    these parts; one that was cut goes on where it was
python scripts/survival.py list        names of the parts, and where each of them stands
python scripts/survival.py page        only write docs/survival.md again

A part takes less than 40 minutes on two cores. Its tests lie in tests/parallel/survival, and `scripts/sweep.py` runs
them. Each test counts its attempts. `tests/parallel/survival/results.json` keeps the sums, with commit and machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import sweep

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import provenance  # pyright: ignore[reportMissingImports]

ROOT = sweep.ROOT
RESULTS = ROOT / sweep.SURVIVAL / "results.json"
TARGET = ROOT / "docs" / "survival.md"
PREFIX = "survival-"
PARTS = [name.removeprefix(PREFIX) for name in sweep.PARTS if name.startswith(PREFIX)]
RECORDS = "LABKIT_SURVIVAL_RECORDS"
"""Environment variable of the file into which tests write their sums (tests/parallel/survival/conftest.py)."""

ROWS = {
    "F1": (
        "a rank is killed (kill -9) at 50 moments of a step",
        "survivors end within 2 s; rank and signal named; no process or port left",
    ),
    "F2": ("the same, and the run is started again, 100 times", "100 of 100 end bit-equal to an undisturbed run"),
    "F3": (
        "a rank hangs: SIGSTOP, GIL held, data loader asleep",
        "reported within limit + 1 s: rank, last collective, stack",
    ),
    "F4": (
        "kill -9 during a save, 200 times",
        "200 of 200 leave a complete checkpoint; the restarted run ends bit-equal",
    ),
    "F5": ("1,000 flips of one bit", "1,000 found, the tensor named, the previous checkpoint used"),
    "F6": (
        "files truncated, deleted, swapped, duplicated, forged",
        "all rejected, the file named, nothing half-loaded",
    ),
    "F7": ("20 pairs of layouts: A saves, B loads and saves, A loads", "weights and moments bit-equal"),
    "F8": (
        "no space, no permission, no file descriptor",
        "the previous checkpoint intact, leftovers removed, the error within 1 s",
    ),
    "F19": (
        "20 steps, compared with 10 steps, a kill and 10 more, in every layout",
        "losses, weights, moments, random states: 0 ulp apart",
    ),
    "F22": (
        "300 steps with a fault every 20 s",
        "bit-equal to an undisturbed run; memory and file descriptors do not grow",
    ),
    "F24": ("a rank is 50% slower than the others", "named within 20 steps; no false report in 1,000"),
    "SIGTERM": (
        "a run is asked to stop",
        "all ranks save after the same step, exit code 75, bit-equal to an undisturbed run",
    ),
    "two runs": (
        "two runs in one folder of checkpoints",
        "one trains as if alone, the other stops with an error that names it",
    ),
}
"""Row -> (fault, requirement)."""

HEAD = """# What a run survives

After this page you know which faults tests inject into real processes while they train, what labkit must do about each,
and how often it did. The first table has a requirement for each fault. The second one says how many attempts met it,
with the worst value seen. `make faults` runs the tests and writes this page; `make test` runs a short version of each.
The model is small, with 2 layers and dropout. It saves after every step and keeps one checkpoint, so each save also
removes the previous checkpoint.

A killed process loses nothing that it has already written, even if the data is still in the system's cache. A power
failure would lose it, so some tests tear files: each file that was not yet flushed to the disk (fsync) loses its second
half. Checkpoints count as bit-equal if their files have equal bytes. [Long runs](running.md) says how to use all this.

"""


def main() -> int:
    """Exit code 0 where every chosen part passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", help="names of parts, list or page; none means all")
    chosen, at = parser.parse_args().part, sweep.commit()
    if chosen == ["list"]:
        print(*(f"{part:10}{sweep.standing(PREFIX + part, at)}" for part in PARTS), sep="\n")
        return 0
    if chosen == ["page"]:
        write_page()
        return 0
    if unknown := [part for part in chosen if part not in PARTS]:
        parser.error(f"no part {unknown[0]!r}; parts: {', '.join(PARTS)}")
    codes = [0]
    for part in chosen or PARTS:
        stands = sweep.standing(PREFIX + part, at)
        if not chosen and has_ended(stands, at):
            print(f"== {part}: {stands}", flush=True)
            continue
        codes.append(run(part, at, anew=has_ended(stands, at)))
    return max(codes)


def has_ended(standing: str, at: str) -> bool:
    """True for a part that is through at this commit."""
    return standing.startswith(sweep.ENDED) and f" at {at}, " in standing


def run(part: str, at: str, *, anew: bool) -> int:
    """Run what is left of a part, keep what was counted, and return the exit code."""
    records = sweep.STATE / f"{PREFIX}{part}-{at}.jsonl"
    records.parent.mkdir(parents=True, exist_ok=True)
    if anew:
        records.unlink(missing_ok=True)
    command = [sys.executable, str(ROOT / "scripts" / "sweep.py"), PREFIX + part]
    code = subprocess.run(command, cwd=ROOT, env=os.environ | {RECORDS: str(records)}, check=False).returncode
    lines = records.read_text().splitlines() if records.exists() else []
    keep(part, summed([json.loads(line) for line in lines]), provenance.origin())
    write_page()
    return code


def summed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One result for each case of a row. A test that ran again replaces what it counted before."""
    latest = {(record["test"], record["row"], record["case"]): record for record in records}
    results: dict[tuple[str, str], dict[str, Any]] = {}
    for record in latest.values():
        row, case = record["row"], record["case"]
        result = results.setdefault(
            (row, case), {"row": row, "case": case, "attempts": 0, "passed": 0, "largest": {}, "counts": {}}
        )
        for key in ("attempts", "passed"):
            result[key] += record[key]
        for what, value in record["largest"].items():
            result["largest"][what] = round(max(value, result["largest"].get(what, value)), 3)
        for what, number in record["counts"].items():
            result["counts"][what] = result["counts"].get(what, 0) + number
    return list(results.values())


def keep(part: str, results: list[dict[str, Any]], origin: dict[str, Any]) -> None:
    """Put the results of a part into the place of its earlier ones."""
    kept = [result for result in stored() if result["part"] != part]
    rows = [*kept, *({"part": part, **result, **origin} for result in results)]
    rows.sort(key=lambda result: list(ROWS).index(result["row"]))
    RESULTS.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def stored() -> list[dict[str, Any]]:
    """The results of all parts."""
    return json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []


def line(result: dict[str, Any]) -> str:
    """One line of the table."""
    words = [f"{result['passed']:,} of {result['attempts']:,}"]
    words += [f"at most {value:.3g} {what}" for what, value in result["largest"].items()]
    if result["counts"]:
        words.append(", ".join(f"{number:,} {what}" for what, number in sorted(result["counts"].items())))
    commit = f"{result['commit'][:10]}{' +' if result['changed'] else ''}"
    return f"| {result['row']} | {result['case']} | {'; '.join(words)} | {result['date']} | {commit} |\n"


def page(results: list[dict[str, Any]]) -> str:
    """The text of docs/survival.md."""
    asked = "".join(f"| {row} | {fault} | {figure} |\n" for row, (fault, figure) in ROWS.items())
    lines = "".join(map(line, results))
    unmeasured = [row for row in ROWS if all(result["row"] != row for result in results)]
    machines = dict.fromkeys(provenance.machine_in_words(result["machine"]) for result in results)
    return (
        f"{HEAD}## Required\n\n| row | fault | requirement |\n|---|---|---|\n{asked}\n"
        f"## Measured\n\n| row | case | measured | date | commit |\n|---|---|---|---|---|\n{lines}\n"
        + (f"Not measured yet: {', '.join(unmeasured)}.\n\n" if unmeasured else "")
        + "".join(f"Machine: {machine}.\n" for machine in machines)
    )


def write_page() -> None:
    """Write docs/survival.md from the stored results."""
    TARGET.write_text(page(stored()), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
