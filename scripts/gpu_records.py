"""The memory of the GPU suite, and the files that it writes from it.

Every part that ends becomes one line of `memory.jsonl`, forced to disk before the next part starts. Benchmarks append
each row to `rows.jsonl` as soon as it is measured, and nothing rewrites that file. The others are written anew from the
memory: `phaseN.txt` (summary), `phaseN.xml` (JUnit), `phaseN.log` (what was printed).
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LAST_LINES = 25
"""How much of a failed part's output the summary shows."""
BAD = ("failed", "crashed", "too long", "interrupted")
"""Outcomes that make the suite fail; the others are `passed`, `skipped`, `CUT` and, without a record, `not started`."""
CUT = "cut off"
"""Outcome of a part that was under way when its phase ended."""
USELESS = ("rejected", "could_not_run", "not_the_same")
"""Keys of a benchmark's row that tell why it holds no number to quote; benchmarks/gpu.py has the same."""


@dataclass(frozen=True)
class Record:
    """A part that has ended."""

    part: str
    phase: int
    key: str
    """Hash of the code, the part and the machine's versions."""
    outcome: str
    why: str
    """The reason where it did not pass, in one line."""
    seconds: float
    log: str
    """What it printed, its end."""
    junit: str = ""
    """The report of pytest; empty where there is none."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """The rows that a benchmark measured, also where it failed afterwards."""

    def suites(self) -> list[ElementTree.Element]:
        """JUnit's `testsuite` elements; a part without tests of its own is one test."""
        found = list(ElementTree.fromstring(self.junit).iter("testsuite")) if self.junit else []
        told = any(int(suite.get(key, 0)) for suite in found for key in ("failures", "errors"))
        if not found or (self.outcome in BAD and not told):
            found.append(self._as_one_test())
        for suite in found:
            suite.set("name", self.part)
        return found

    def _as_one_test(self) -> ElementTree.Element:
        bad, skipped = int(self.outcome in BAD), int(self.outcome in ("skipped", CUT))
        counts = {"tests": "1", "errors": "0", "failures": str(bad), "skipped": str(skipped)}
        suite = ElementTree.Element("testsuite", counts | {"time": f"{self.seconds:.3f}"})
        case = ElementTree.SubElement(suite, "testcase", {"classname": f"phase {self.phase}", "name": self.part})
        if bad or skipped:
            told = ElementTree.SubElement(case, "failure" if bad else "skipped", {"message": printable(self.why)})
            told.text = printable("\n".join(self.last_lines()))
        return suite

    def row_lines(self) -> list[str]:
        """A line for each row."""
        return [in_one_line(row) for row in self.rows]

    def last_lines(self) -> list[str]:
        """The end of what it printed."""
        return self.log.rstrip().splitlines()[-LAST_LINES:]

    def counts(self) -> Counter[str]:
        """Tests by outcome: `passed`, `failed`, `skipped`."""
        found: Counter[str] = Counter()
        for suite in self.suites():
            tests, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
            failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            found.update(passed=tests - failed - skipped, failed=failed, skipped=skipped)
        return found

    def skips(self) -> Counter[str]:
        """Skipped tests by reason; a missing package is `needs PACKAGE`."""
        found: Counter[str] = Counter()
        for suite in self.suites():
            found.update(reason(told) for told in suite.iter("skipped"))
        return found


def counts_for_something(row: Mapping[str, Any]) -> bool:
    """Whether a benchmark's row holds a number to quote."""
    return not any(key in row for key in USELESS)


def in_one_line(row: Mapping[str, Any]) -> str:
    """A benchmark's row for a reader: times and ratios, or why there are none, or its numbers."""
    case = row.get("case", "")
    if why := next((key for key in USELESS if key in row), ""):
        return f"{case}: {why.replace('_', ' ')}, {row[why]}"[:240]
    if "median_ms" in row:
        (ours, ms), *_ = row["median_ms"].items()
        told = [f"{ours} {ms:.4g} ms", *(f"{ratio:.2f} of {peer}" for peer, ratio in row["ratio_to"].items())]
    else:
        told = [f"{key} {value}" for key, value in row.items() if key != "case" and not isinstance(value, dict | list)]
    return f"{case}: {', '.join(told)}"[:240]


def reason(told: ElementTree.Element) -> str:
    """Why a test was skipped; `needs PACKAGE` and `needs a GPU` without the details that follow."""
    message, text = told.get("message", ""), told.text or ""
    words = text if message == "collection skipped" else message
    needs = re.search(r"(?:^|Skipped: )(needs (?:a GPU|[\w.-]+))", words)
    return needs[1] if needs else words.strip()[:120]


def printable(text: str) -> str:
    """The text without the characters that XML cannot hold."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)


class Memory:
    """What ended, in `folder/memory.jsonl`; one suite at a time.

    Raises:
        BlockingIOError: another suite uses the folder.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.rows = folder.resolve(), folder.resolve() / "rows.jsonl"
        self._file = (folder / "memory.jsonl").open("a+")
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._file.seek(0)
        self._latest: dict[str, Record] = {}
        text = self._file.read()
        for line in text.splitlines():
            try:
                record = Record(**json.loads(line))
            except (json.JSONDecodeError, TypeError):
                continue  # cut off when the machine went away, or written by another version of the suite
            self._latest[record.part] = record
        if text and not text.endswith("\n"):
            self._file.write("\n")

    @property
    def mark(self) -> str:
        """What marks of processes begin with that a suite with this memory starts."""
        return f"{self.folder};"

    def copy_to(self, folder: Path) -> None:
        """Its two files also there."""
        for path in (self.folder / "memory.jsonl", self.rows):
            if path.exists() and folder != self.folder:
                whole(folder / path.name, path.read_text())

    def add(self, record: Record) -> None:
        """Remember it, on disk when this returns."""
        self._file.write(json.dumps(asdict(record)) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._latest[record.part] = record

    def latest(self, part: str, key: str) -> Record | None:
        """The last record of the part with this code on this machine."""
        found = self._latest.get(part)
        return found if found is not None and found.key == key else None


@dataclass
class Result:
    """What is known of the parts of one phase."""

    phase: int
    machine: Mapping[str, Any]
    """Versions and hardware, in words."""
    memory: Memory
    records: dict[str, Record | None]
    """By part, in the suite's order; at first those of earlier runs, None for a part that never ran."""
    fresh: set[str] = field(default_factory=set)
    """Parts that ended in this run."""

    def add(self, record: Record) -> None:
        """A part has ended."""
        self.records[record.part] = record
        self.fresh.add(record.part)

    def named(self, *outcomes: str) -> list[Record]:
        """Records with one of these outcomes."""
        return [record for record in self.records.values() if record is not None and record.outcome in outcomes]

    @property
    def not_started(self) -> list[str]:
        """Parts without a record."""
        return [part for part, record in self.records.items() if record is None]

    @property
    def unfinished(self) -> list[str]:
        """Parts that have not run to their end for the want of time."""
        return [*self.not_started, *(record.part for record in self.named(CUT))]

    @property
    def exit_code(self) -> int:
        """0: all passed on a GPU. 1: a part failed. 3: none failed, but some did not end in time or had no GPU."""
        if self.named(*BAD):
            return 1
        return 3 if self.unfinished or "gpu" not in self.machine else 0

    def summary(self) -> str:
        """The text for a reader: versions, every part, numbers, skips, last lines of what failed, the next command."""
        lines = [f"GPU suite, phase {self.phase}", *(f"  {key}: {value}" for key, value in self.machine.items())]
        if "gpu" not in self.machine:
            lines.append("  No GPU: nothing that needs one was measured.")
        lines += ["", *(self._line(part, record) for part, record in self.records.items())]
        known = [record for record in self.records.values() if record]
        rows = [f"  {line}" for record in known for line in record.row_lines()]
        lines += ["", "Measured:", *rows] if rows else []
        skips = sum((record.skips() for record in known), Counter[str]())
        if skips:
            lines += ["", "Skipped tests:", *(f"  {count:4}  {reason}" for reason, count in skips.most_common())]
        for record in self.named(*BAD):
            lines += ["", f"== {record.part}: {record.outcome}, {record.why}; its last lines:"]
            lines += [f"   {line}" for line in record.last_lines()]
        return "\n".join([*lines, "", self.verdict(), *self.next_steps()]) + "\n"

    def _line(self, part: str, record: Record | None) -> str:
        if record is None:
            return f"  not started            {part}"
        useless = sum(not counts_for_something(row) for row in record.rows)
        rows = f", {len(record.rows)} rows" if record.rows else ""
        rows += f", {useless} of them without a number" if useless else ""
        tests = ", ".join(f"{number} {outcome}" for outcome, number in record.counts().items() if number)
        before = "" if part in self.fresh else "; earlier, not run again"
        return f"  {record.outcome:<11} {record.seconds:7.1f} s  {part} ({tests}{rows}{before})"

    def verdict(self) -> str:
        """How many parts have each outcome."""
        counts = Counter(record.outcome if record else "not started" for record in self.records.values())
        return f"Phase {self.phase}: " + ", ".join(f"{number} {outcome}" for outcome, number in counts.items())

    def next_steps(self) -> list[str]:
        """What to do now, in a line or two."""
        again = f"scripts/gpu_suite.sh {self.phase}"
        if self.unfinished:
            return [f"Next: {again} again; {len(self.unfinished)} parts have not run to their end."]
        told = [f"Failed parts run again by {again}."] if self.named(*BAD) else []
        if self.phase < 3:
            return [*told, f"Next: scripts/gpu_suite.sh {self.phase + 1}."]
        if not self.memory.rows.exists():
            return told
        keep = f"Copy {self.memory.folder} home before the machine goes; nothing else holds these results."
        return [*told, f"Next: python benchmarks/gpu.py --store {self.memory.rows}", keep]

    def write(self, folders: Sequence[Path]) -> None:
        """Write the files into each folder, each file whole or not at all."""
        known = [record for record in self.records.values() if record is not None]
        suites = ElementTree.Element("testsuites")
        suites.extend([suite for record in known for suite in record.suites()])
        logs = [f"== {record.part}: {record.outcome}\n{record.log.rstrip()}\n\n" for record in known]
        texts = {"txt": self.summary(), "xml": ElementTree.tostring(suites, "unicode"), "log": "".join(logs)}
        for folder in folders:
            for ending, text in texts.items():
                whole(folder / f"phase{self.phase}.{ending}", text)
            self.memory.copy_to(folder)


def whole(path: Path, text: str) -> None:
    """Write a file that a reader finds old or new, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(path.suffix + ".new")
    fresh.write_text(text)
    os.replace(fresh, path)
