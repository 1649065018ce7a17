"""What the GPU suite remembers, and the files that it writes from it, five in all.

Every part that ends is one line of `memory.jsonl`, forced to disk before the next part starts. Benchmarks append
each row to `rows.jsonl` as soon as it is measured. `summary.txt`, `junit.xml` and `log.txt` are written anew from the
memory, also while parts are under way.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpu_plan import Part

LAST_LINES = 40
"""How much of a failed part's output the summary shows."""
BAD = ("failed", "crashed", "too long", "interrupted")
"""Outcomes that make the suite fail. Others: `passed`, `skipped`, `CUT`, `RUNNING`; without a record, `not started`."""
CUT = "cut off"
"""Outcome of a part that was under way when the time of the command was over."""
RUNNING = "running"
"""Outcome of a part that is under way; no such record is remembered."""
USELESS = ("rejected", "could_not_run", "not_the_same")
"""Keys of a benchmark's row that tell why it holds no number to quote; benchmarks/gpu.py has the same."""


@dataclass(frozen=True)
class Record:
    """A part that has ended."""

    part: str
    key: str
    """Hash of the code, the part and the machine's versions."""
    command: float
    """When the command that ran it began, in seconds since 1970."""
    outcome: str
    why: str
    """The reason where it did not pass, in one line."""
    seconds: float
    ended: float
    """Seconds since 1970."""
    log: str
    """What it printed, its end."""
    tests: list[dict[str, Any]] = field(default_factory=list)
    """Lines of `gpu_outcomes.py`, one for each test."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """The rows that a benchmark measured, also where it failed afterwards."""

    def cases(self) -> list[dict[str, Any]]:
        """Its tests; the part itself is one more where none of them tells why it did not pass."""
        outcome = "failed" if self.outcome in BAD else "passed" if self.outcome == "passed" else "skipped"
        why = "\n".join([self.why, *self.last_lines()]) if outcome == "failed" else self.why
        open_end = {"outcome": outcome, "text": f"was running: {why}"}
        found = [test | open_end if test["outcome"] == RUNNING else test for test in self.tests]
        if found and (outcome != "failed" or any(test["outcome"] == "failed" for test in found)):
            return found
        return [*found, {"name": self.part, "outcome": outcome, "seconds": self.seconds, "text": why}]

    def suite(self) -> ElementTree.Element:
        """JUnit's `testsuite`."""
        counts, suite = self.counts(), ElementTree.Element("testsuite", name=self.part, time=str(self.seconds))
        for key, outcome in (("failures", "failed"), ("skipped", "skipped")):
            suite.set(key, str(counts[outcome]))
        suite.set("tests", str(counts.total()))
        for case in self.cases():
            words = {"classname": self.part, "name": case["name"], "time": str(case["seconds"])}
            made = ElementTree.SubElement(suite, "testcase", words)
            if case["outcome"] != "passed":
                kind, text = "failure" if case["outcome"] == "failed" else "skipped", printable(case["text"])
                ElementTree.SubElement(made, kind, message=text.strip().split("\n")[0][:200]).text = text
        return suite

    def counts(self) -> Counter[str]:
        """Tests by outcome: `passed`, `failed`, `skipped`."""
        return Counter(case["outcome"] for case in self.cases())

    def skips(self) -> Counter[str]:
        """Skipped tests by reason; a missing package is `needs PACKAGE`."""
        return Counter(reason(case["text"]) for case in self.cases() if case["outcome"] == "skipped")

    def last_lines(self) -> list[str]:
        """The end of what it printed."""
        return self.log.rstrip().splitlines()[-LAST_LINES:]


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


def reason(text: str) -> str:
    """Why a test was skipped; `needs PACKAGE` and `needs a GPU` without the details that follow."""
    needs = re.search(r"^(?:Skipped: )?(needs (?:a GPU|[\w.-]+))", text)
    return needs[1] if needs else text.strip()[:120]


def printable(text: str) -> str:
    """The text without the characters that XML cannot hold."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)


# ---- what earlier commands did ----


def read_records(folder: Path) -> list[Record]:
    """The records of a folder in the order in which parts ended; none where it has no memory."""
    found = []
    for line in parsed(folder / "memory.jsonl"):
        with suppress(TypeError):  # written by another version of the suite
            found.append(Record(**line))
    return found


def parsed(path: Path, start: int = 0) -> list[dict[str, Any]]:
    """The lines of a file from a byte on; none where it is missing. A line that a kill cut off is none."""
    found = []
    for line in path.read_bytes()[start:].decode(errors="replace").splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def seconds_used(folder: Path, but: float = 0.0) -> float:
    """Of the commands that a folder remembers, each from its start to the last that is known of it.

    but: when a command began that is left out.
    """
    ends = {line["command"]: line["ended"] for line in parsed(folder / "memory.jsonl") if "command" in line}
    return sum(end - began for began, end in ends.items() if began != but)


class Memory:
    """What ended, in `folder/memory.jsonl`; one suite at a time. It begins with what the folder `after` remembers.

    Raises:
        BlockingIOError: another suite uses the folder.
    """

    def __init__(self, folder: Path, after: Path | None = None) -> None:
        self.folder, self.rows = folder, folder / "rows.jsonl"
        self.mark = f"{folder};"
        """What the marks of its suite's processes begin with."""
        self._file = (folder / "memory.jsonl").open("a+")
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if after is not None and after != folder:
            if not (earlier := parsed(after / "memory.jsonl")):
                print(f"--after {after} holds no memory.jsonl of an earlier command, so nothing is known of one")
            lines = [json.dumps(line) + "\n" for line in (*earlier, *parsed(folder / "memory.jsonl"))]
            (folder / "memory.jsonl").write_text("".join(dict.fromkeys(lines)))
        elif (text := (folder / "memory.jsonl").read_text()) and not text.endswith("\n"):
            self._file.write("\n")  # a suite was killed while it wrote
        self.records = read_records(folder)

    def add(self, record: Record) -> None:
        """Remember it, on disk when this returns."""
        self._append(asdict(record))
        self.records.append(record)

    def still_at_work(self, command: float) -> None:
        """Remember that the command which began then has lasted until now."""
        self._append({"command": command, "ended": time.time()})

    def _append(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def latest(self, part: str) -> Record | None:
        """The last record of the part, whatever code and machine it is of."""
        return next((record for record in reversed(self.records) if record.part == part), None)


# ---- what a reader gets ----


@dataclass
class Report:
    """What is known of the plan's parts with this code on this machine."""

    plan: Sequence[Part]
    keys: Mapping[str, str]
    """By part."""
    machine: Mapping[str, Any]
    """Versions and hardware, in words."""
    memory: Memory
    folders: Sequence[Path]
    """Where the files are written; the memory's is one of them."""
    command: float
    """When this command began, in seconds since 1970."""
    minutes: float
    """That all commands may take together."""
    again: str
    """The command line that goes on where this one ends."""

    def records(self, under_way: Sequence[Record] = ()) -> dict[str, Record | None]:
        """By part, in the plan's order; None for a part that never ran."""
        latest = {name: self.memory.latest(name) for name in self.keys}
        now = {name: record if record and record.key == self.keys[name] else None for name, record in latest.items()}
        return now | {record.part: record for record in under_way}

    def exit_code(self) -> int:
        """0: all passed on a GPU. 1: a part failed. 3: none failed, but some did not end in time or had no GPU."""
        outcomes = {record.outcome if record else "not started" for record in self.records().values()}
        if outcomes & set(BAD):
            return 1
        return 3 if outcomes & {CUT, "not started"} or "gpu" not in self.machine else 0

    def summary(self, records: Mapping[str, Record | None]) -> str:
        """The text for a reader: versions, every part, numbers, skips, last lines of what failed, the next command."""
        lines = ["GPU suite", *(f"  {key}: {value}" for key, value in self.machine.items())]
        if "gpu" not in self.machine:
            lines.append("  No GPU: nothing that needs one was measured.")
        lines += ["", "Measured seconds, estimated seconds:"]
        lines += [self._line(part, records[part.name]) for part in self.plan]
        known = [record for record in records.values() if record]
        rows = [f"  {in_one_line(row)}" for record in known for row in record.rows]
        lines += ["", "Measured:", *rows] if rows else []
        skips = sum((record.skips() for record in known), Counter[str]())
        if skips:
            lines += ["", "Skipped tests:", *(f"  {count:4}  {reason}" for reason, count in skips.most_common())]
        for record in known:
            if record.outcome in (*BAD, CUT):
                lines += ["", f"== {record.part}: {record.outcome}, {record.why}; its last lines:"]
                lines += [f"   {line}" for line in record.last_lines()]
        return "\n".join([*lines, "", *self._verdict(records)]) + "\n"

    def _line(self, part: Part, record: Record | None) -> str:
        if record is None:
            return f"  not started         {part.estimate:5.0f}  {part.name}"
        useless = sum(not counts_for_something(row) for row in record.rows)
        rows = f", {len(record.rows)} rows" if record.rows else ""
        rows += f", {useless} of them without a number" if useless else ""
        tests = ", ".join(f"{number} {outcome}" for outcome, number in record.counts().items() if number)
        before = "" if record.command == self.command else "; earlier, not run again"
        told = f"({tests}{rows}{before})"
        return f"  {record.outcome:<11} {record.seconds:7.1f} {part.estimate:5.0f}  {part.name} {told}"

    def _verdict(self, records: Mapping[str, Record | None]) -> list[str]:
        """How many parts have each outcome, and what to do now."""
        counts = Counter(record.outcome if record else "not started" for record in records.values())
        used = seconds_used(self.memory.folder, but=self.command) + time.time() - self.command
        of = f" of {self.minutes:g}" if self.minutes < math.inf else ""
        lines = [", ".join(f"{number} {outcome}" for outcome, number in counts.items())]
        lines.append(f"Commands have taken {used / 60:.1f}{of} minutes.")
        unfinished = counts["not started"] + counts[CUT] + counts[RUNNING]
        if unfinished:
            lines.append(f"Next: {self.again}  ({unfinished} parts have not run to their end)")
            lines.append("On a fresh machine take these results along and add --after FOLDER.")
        elif any(counts[outcome] for outcome in BAD):
            lines.append(f"Failed parts run again by: {self.again}")
        if self.memory.rows.exists():
            lines.append("At home: python benchmarks/gpu.py --store FOLDER/rows.jsonl")
        return [*lines, f"Results: {', '.join(map(str, self.folders))}. Copy one home before the machine goes."]

    def write(self, under_way: Sequence[Record] = ()) -> str:
        """Write the files into each folder, each whole or not at all; returns the summary."""
        records = self.records(under_way)
        known = [record for record in records.values() if record is not None]
        suites = ElementTree.Element("testsuites")
        suites.extend([record.suite() for record in known])
        log = "".join(f"== {record.part}: {record.outcome}\n{record.log.rstrip()}\n\n" for record in known)
        junit = ElementTree.tostring(suites, "unicode")
        texts = {"summary.txt": self.summary(records), "junit.xml": junit, "log.txt": log}
        for folder in self.folders:
            for name, text in texts.items():
                whole(folder / name, text)
            for name in ("rows.jsonl", "memory.jsonl"):
                if folder != self.memory.folder and (self.memory.folder / name).exists():
                    whole(folder / name, (self.memory.folder / name).read_text())
        return texts["summary.txt"]


def whole(path: Path, text: str) -> None:
    """Write a file that a reader finds old or new, never half."""
    fresh = path.with_suffix(path.suffix + ".new")
    fresh.write_text(text)
    os.replace(fresh, path)
