"""The memory of the GPU suite, and the files that it writes from it.

Every part that ends becomes one line of `memory.jsonl`, forced to disk before the next part starts. All other files are
written anew from these lines, so a suite that is killed at any time loses nothing that had ended:
`phaseN.txt` (summary), `phaseN.xml` (JUnit), `phaseN.jsonl` (rows of benchmarks), `phaseN.log` (what was printed).
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
"""Outcomes that make the suite fail; the others are `passed`, `skipped` and, without a record, `not started`."""


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
    """What a benchmark measured, also where it failed afterwards."""

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
        bad, skipped = int(self.outcome in BAD), int(self.outcome == "skipped")
        counts = {"tests": "1", "errors": "0", "failures": str(bad), "skipped": str(skipped)}
        suite = ElementTree.Element("testsuite", counts | {"time": f"{self.seconds:.3f}"})
        case = ElementTree.SubElement(suite, "testcase", {"classname": f"phase {self.phase}", "name": self.part})
        if bad or skipped:
            told = ElementTree.SubElement(case, "failure" if bad else "skipped", {"message": printable(self.why)})
            told.text = printable("\n".join(self.last_lines()))
        return suite

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
    def exit_code(self) -> int:
        """0: all passed on a GPU. 1: something failed. 3: nothing failed, but parts did not start or had no GPU."""
        if self.named(*BAD):
            return 1
        return 3 if self.not_started or "gpu" not in self.machine else 0

    def summary(self) -> str:
        """The text for a reader: versions, every part, skips by reason, what failed with its last lines."""
        lines = [f"GPU suite, phase {self.phase}", *(f"  {key}: {value}" for key, value in self.machine.items())]
        if "gpu" not in self.machine:
            lines.append("  No GPU: nothing that needs one was measured.")
        lines += ["", *(self._line(part, record) for part, record in self.records.items())]
        skips = sum((record.skips() for record in self.records.values() if record), Counter[str]())
        if skips:
            lines += ["", "Skipped tests:", *(f"  {count:4}  {reason}" for reason, count in skips.most_common())]
        for record in self.named(*BAD):
            lines += ["", f"== {record.part}: {record.outcome}, {record.why}; its last lines:"]
            lines += [f"   {line}" for line in record.last_lines()]
        return "\n".join([*lines, "", self.verdict()]) + "\n"

    def _line(self, part: str, record: Record | None) -> str:
        if record is None:
            return f"  not started            {part}"
        counts, rows = record.counts(), f", {len(record.rows)} rows" if record.rows else ""
        tests = ", ".join(f"{number} {outcome}" for outcome, number in counts.items() if number)
        before = "" if part in self.fresh else "; earlier, not run again"
        return f"  {record.outcome:<11} {record.seconds:7.1f} s  {part} ({tests}{rows}{before})"

    def verdict(self) -> str:
        """The last line: how many parts of each outcome."""
        counts = Counter(record.outcome if record else "not started" for record in self.records.values())
        return f"Phase {self.phase}: " + ", ".join(f"{number} {outcome}" for outcome, number in counts.items())

    def write(self, folders: Sequence[Path]) -> None:
        """Write the four files into each folder, each file whole or not at all."""
        known = [record for record in self.records.values() if record is not None]
        suites = ElementTree.Element("testsuites")
        suites.extend([suite for record in known for suite in record.suites()])
        rows = [json.dumps(row) + "\n" for record in known for row in record.rows]
        logs = [f"== {record.part}: {record.outcome}\n{record.log.rstrip()}\n\n" for record in known]
        texts = {"txt": self.summary(), "xml": ElementTree.tostring(suites, "unicode")}
        for ending, text in (texts | {"jsonl": "".join(rows), "log": "".join(logs)}).items():
            for folder in folders:
                whole(folder / f"phase{self.phase}.{ending}", text)


def whole(path: Path, text: str) -> None:
    """Write a file that a reader finds old or new, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(path.suffix + ".new")
    fresh.write_text(text)
    os.replace(fresh, path)
