"""Tests and benchmarks on one rented GPU, in phases that each fit a command of ten minutes.

    scripts/gpu_suite.sh 1      versions, smoke test, tests of one process, rules of graphs
    scripts/gpu_suite.sh 2      benchmarks
    scripts/gpu_suite.sh 3      tests and benchmarks of several ranks, and what failed in phase 1
    scripts/gpu_suite.sh all    the three in turn

It needs torch, numpy, pytest, cloudpickle and tqdm, no install and no network. Results lie under `$OUT` (default
`build/gpu`): `phaseN.txt`, the summary; `phaseN.xml`, JUnit; `phaseN.jsonl`, rows of benchmarks; `phaseN.log`.

Every part is a process of its own, killed with all of its children at its time limit. What has passed is remembered in
`build/gpu` with a hash of its code and of the machine's versions, and is not run again. The parts are the table in
`scripts/gpu_parts.json`: `name`, `phase`, `seconds` (time limit), and one of `test` (a file or a node id, with `select`
as pytest's -k), `benchmark` (a name of `benchmarks/gpu.py --list`) or `command` (a list of words; exit code 77 means
skipped); `together: true` lets neighbours in the table run at once; `files` names further files that the part reads.

Exit code: 0, all passed on a GPU. 1, a part failed; the summary shows its last lines. 2, wrong usage. 3, nothing
failed, but a part was not started in time or there is no GPU: not everything was measured. 130, interrupted.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpu_parts import KINDS, ROOT, Part, read_parts
from gpu_records import BAD, Memory, Record, Result

MARK = "LABKIT_GPU_PART"
"""Environment variable by which the processes of a part are found, also those in sessions of their own."""
SKIPPED = 77
"""Exit code of a command or benchmark that cannot run here."""
LOG_BYTES = 200_000
"""How much of a part's output is kept, from its end."""

# ---- one part as a process ----


def look_at_machine() -> dict[str, Any]:
    """Versions and hardware in words, asked of a process of its own, since torch itself may be broken."""
    words = [sys.executable, "-c", "import harness, json; print(json.dumps(harness.machine()))"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'benchmarks'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    try:
        done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
        return json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        told = getattr(error, "stderr", "") or str(error)
        return {"python": sys.version.split()[0], "unknown": f"{type(error).__name__}: {told.strip()[-300:]}"}


def prepare_child() -> None:
    """In the child, before its program: it dies with the suite, and writes no core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@dataclass
class Running:
    """A part under way."""

    part: Part
    key: str
    seconds: float
    """It is killed after these."""
    folder: Path
    mark: str = field(default_factory=lambda: f"{os.getpid()}-{time.monotonic_ns()}")
    started: float = field(default_factory=time.monotonic)
    why: str = ""
    """Why the suite itself ended it, with the outcome before the colon."""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        paths = [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
        own = {MARK: self.mark, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        own["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        if self.part.test and not self.part.test.startswith("tests/gpu/"):
            own["CUDA_VISIBLE_DEVICES"] = ""  # tests of the CPU leave the GPU alone
        if self.part.together:
            own["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "2")
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                self.part.words(self.folder), cwd=ROOT, env=os.environ | own, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=prepare_child,
            )  # fmt: skip

    def ended(self) -> bool:
        """Whether it is over; ends it where its time is."""
        if self.process.poll() is None and time.monotonic() - self.started > self.seconds:
            self.end(f"too long: more than {self.seconds:.0f} s")
        return self.process.poll() is not None

    def end(self, why: str) -> None:
        """Kill it; a Python process first prints where it stands."""
        self.why = why
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(2)
        self.kill_all()

    def kill_all(self) -> None:
        """End every process of the part, whatever session it moved to."""
        for _ in range(3):  # a process may start another while the list is read
            for pid in marked(self.mark) | ({self.process.pid} if self.process.poll() is None else set()):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def record(self) -> Record:
        """What came of it."""
        self.kill_all()
        log = (self.folder / "log").read_bytes()[-LOG_BYTES:].decode(errors="replace")
        text, rows = whole_report(self.folder / "junit"), self.folder / "rows"
        outcome, _, why = (self.why or self._outcome(log)).partition(": ")
        lines = rows.read_text().splitlines() if rows.is_file() else []
        made = Record(
            self.part.name, self.part.phase, self.key, outcome, why, round(time.monotonic() - self.started, 1), log,
            text, [row for line in lines if (row := _parsed(line)) is not None],
        )  # fmt: skip
        if made.outcome == "passed" and not made.counts()["passed"]:
            return replace(made, outcome="skipped", why="each of its tests")
        return made

    def _outcome(self, log: str) -> str:
        code = self.process.returncode
        if code == 0:
            return "passed"
        if code < 0:
            return f"crashed: killed by {signal.Signals(-code).name}"
        last = (log.rstrip().splitlines() or ["it printed nothing"])[-1]
        if code == SKIPPED and not self.part.test:
            return f"skipped: {last}"
        if self.part.test and code == 5:
            return "failed: pytest found no test"
        return f"failed: exit code {code}, {last}"


def whole_report(path: Path) -> str:
    """A JUnit report; empty where there is none, or one that a kill cut off."""
    try:
        text = path.read_text()
        ElementTree.fromstring(text)
    except (OSError, ElementTree.ParseError):
        return ""
    return text


def _parsed(line: str) -> dict[str, Any] | None:
    """A row; None for a line that a crash cut off."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def marked(mark: str) -> set[int]:
    """Processes whose environment bears the mark; empty where there is no /proc."""
    wanted, found = f"{MARK}={mark}".encode(), set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if wanted in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
    return found


# ---- one phase ----


@dataclass
class Phase:
    """Parts of a phase, started in the table's order."""

    parts: list[Part]
    memory: Memory
    result: Result
    folders: list[Path]
    keys: dict[str, str]
    scratch: Path
    """Where a part writes while it runs."""
    deadline: Callable[[float], float]
    """From seconds since the phase began to the clock's time."""
    start_within: float
    end_within: float
    jobs: int

    def run(self) -> None:
        """Run what has not passed; record each part as it ends."""
        waiting = [part for part in self.parts if not passed(self.result.records[part.name])]
        running: list[Running] = []
        try:
            while waiting or running:
                if time.monotonic() > self.deadline(self.start_within):
                    waiting.clear()
                while waiting and self._may_start(waiting[0], running):
                    running += self._start(waiting.pop(0))
                for one in [one for one in running if one.ended()]:
                    running.remove(one)
                    self._keep(one.record())
                time.sleep(0.05)
        except KeyboardInterrupt:
            for one in running:
                one.end("interrupted: the suite was")
                self._keep(one.record())
            raise

    def _may_start(self, part: Part, running: list[Running]) -> bool:
        if not running:
            return True
        return part.together and len(running) < self.jobs and all(one.part.together for one in running)

    def _start(self, part: Part) -> list[Running]:
        left = self.deadline(self.end_within) - time.monotonic()
        try:
            return [
                Running(part, self.keys[part.name], min(part.seconds, left), self.scratch / str(self.parts.index(part)))
            ]
        except OSError as error:
            self._keep(Record(part.name, part.phase, self.keys[part.name], "failed", f"cannot start: {error}", 0.0, ""))
            return []

    def _keep(self, record: Record) -> None:
        self.memory.add(record)
        self.result.add(record)
        self.result.write(self.folders)
        print(f"{record.outcome:<11} {record.seconds:7.1f} s  {record.part}  {record.why}", flush=True)


def passed(record: Record | None) -> bool:
    """Whether a part need not run again."""
    return record is not None and record.outcome == "passed"


def broken(record: Record | None) -> bool:
    """Whether a part ran and failed."""
    return record is not None and record.outcome in BAD


def chosen(parts: list[Part], phase: int, kind: str, failed_before: Callable[[Part], bool]) -> list[Part]:
    """Parts of a phase; phase 3 runs again what phase 1 broke."""
    mine = [part for part in parts if part.phase == phase or (phase == 3 and part.phase == 1 and failed_before(part))]
    return [part for part in mine if kind in ("", part.kind)]


def run_phase(phase: int, options: argparse.Namespace, parts: list[Part], memory: Memory) -> int:
    """Run one phase; returns its exit code."""
    began = time.monotonic()
    machine = look_at_machine()
    versions = json.dumps({key: machine.get(key) for key in ("python", "torch", "cuda", "triton", "gpu", "gpus")})
    keys = {part.name: part.key(versions) for part in parts}
    latest = {part.name: memory.latest(part.name, keys[part.name]) for part in parts}

    todo = chosen(parts, phase, options.only, lambda part: broken(latest[part.name]))
    result = Result(phase, machine, {part.name: latest[part.name] for part in todo})
    folders = list(dict.fromkeys([options.memory.resolve(), options.out.resolve()]))
    result.write(folders)
    scratch = options.memory.with_name(f"{options.memory.name}-running")
    shutil.rmtree(scratch, ignore_errors=True)  # of a suite that was killed
    try:
        Phase(
            todo, memory, result, folders, keys, scratch, lambda seconds: began + seconds, options.start_within,
            options.end_within, options.jobs,
        ).run()  # fmt: skip
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        print("\n" + result.summary(), flush=True)
    return result.exit_code


def command_line() -> argparse.ArgumentParser:
    """What may be given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=["1", "2", "3", "all"])
    parser.add_argument(
        "--parts", type=Path, default=ROOT / "scripts" / "gpu_parts.json", help="another table of parts"
    )
    parser.add_argument("--only", choices=KINDS, default="", help="only the parts of this kind")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "build" / "gpu"))
    parser.add_argument("--memory", type=Path, default=ROOT / "build" / "gpu", help="where it is kept what has passed")
    parser.add_argument("--start-within", type=float, default=520, help="no part starts later in a phase [s]")
    parser.add_argument("--end-within", type=float, default=585, help="no part lasts longer in a phase [s]")
    parser.add_argument("--jobs", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)), help="parts at once")
    return parser


def main() -> int:
    """Run the phases; the exit code is the worst of theirs: 1 before 3 before 0."""
    parser = command_line()
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        parts = read_parts(options.parts)
        memory = Memory(options.memory)
    except ValueError as error:
        parser.error(str(error))
    except BlockingIOError:
        parser.error(f"another suite is at work in {options.memory}; wait for it or give another --memory")
    phases = [1, 2, 3] if options.phase == "all" else [int(options.phase)]
    try:
        codes = [run_phase(phase, options, parts, memory) for phase in phases]
    except KeyboardInterrupt:
        print("interrupted; what ended before is kept", flush=True)
        return 130
    return 1 if 1 in codes else max(codes)


if __name__ == "__main__":
    sys.exit(main())
