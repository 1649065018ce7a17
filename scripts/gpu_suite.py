"""Tests and benchmarks on one rented GPU, in phases. Each command ends within ten minutes.

    scripts/gpu_suite.sh 1      versions, smoke test, tests of one process, rules of graphs
    scripts/gpu_suite.sh 2      benchmarks; the longest phase, of two or three commands
    scripts/gpu_suite.sh 3      tests and benchmarks of several ranks, and what failed in phase 1
    scripts/gpu_suite.sh all    the three in turn, each as often as needed

Repeat a phase until no part is `not started` or `cut off`; its last line names the next command. The suite needs torch,
numpy, pytest, cloudpickle and tqdm, no install and no network. PYTHON chooses the interpreter.

Results lie in `build/gpu`, and in `$OUT` where that is set: `phaseN.txt`, the summary; `phaseN.xml`, JUnit;
`phaseN.log`, what was printed; `rows.jsonl`, every measured row, which nothing ever rewrites; `memory.jsonl`, what
ended. Copy the folder home before the machine goes. `python benchmarks/gpu.py --store FOLDER/rows.jsonl` writes the
rows into benchmarks/results and docs/benchmarks.md.

Each test file and each benchmark is a process of its own (`gpu_parts.py`), killed with all of its children at its time
limit. The suite remembers each passed part and skips it while code and machine stay the same.

Exit code: 0, all parts passed on a GPU. 1, a part failed; the summary shows its last lines. 2, wrong usage. 3, no part
failed, but some did not end in time, or there is no GPU. 130, interrupted.
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

from gpu_parts import ROOT, Part, read_parts
from gpu_records import BAD, CUT, Memory, Record, Result, counts_for_something

MARK = "LABKIT_GPU_PART"
"""Environment variable by which the processes of a part are found, also those in sessions of their own."""
SKIPPED = 77
"""Exit code of a command or benchmark that cannot run here."""
LOG_BYTES = 200_000
"""How much of a part's output is kept, from its end."""

# ---- one part as a process ----


def look_at_machine() -> dict[str, Any]:
    """Versions and hardware in words, asked of a process of its own, since torch itself may be broken.

    Raises:
        ValueError: torch cannot be imported, with its error.
    """
    words = [sys.executable, "-c", "import json, provenance; print(json.dumps(provenance.machine()))"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'benchmarks'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    try:
        done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)
        return json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1:]
        raise ValueError(
            f"{sys.executable} cannot import torch: {' '.join(said)}; choose another: PYTHON=/path/to/python"
        ) from error


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
    rows: Path
    """Measured rows are appended here."""
    mark: str
    cut: bool = False
    """Its own limit is longer than what is left of the phase."""
    started: float = field(default_factory=time.monotonic)
    why: str = ""
    """Why the suite itself ended it, with the outcome before the colon."""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self._rows_before = self.rows.stat().st_size if self.rows.exists() else 0
        paths = [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
        own = {MARK: self.mark, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        own["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        if self.part.test and not self.part.test.startswith("tests/gpu/"):
            own["CUDA_VISIBLE_DEVICES"] = ""  # tests of the CPU leave the GPU alone
        if self.part.together:
            own["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "2")
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                self.part.words(self.folder, self.rows), cwd=ROOT, env=os.environ | own, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=prepare_child,
            )  # fmt: skip

    def ended(self) -> bool:
        """Whether it is over; ends it where its time is."""
        if self.process.poll() is None and time.monotonic() - self.started > self.seconds:
            after = f"after {self.seconds:.0f} s"
            self.end(f"{CUT}: the phase ended {after}" if self.cut else f"too long: ended {after}")
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
            kill(marked(self.mark) | ({self.process.pid} if self.process.poll() is None else set()))
        self.process.wait()

    def record(self) -> Record:
        """What came of it."""
        self.kill_all()
        log = (self.folder / "log").read_bytes()[-LOG_BYTES:].decode(errors="replace")
        outcome, _, why = (self.why or self._outcome(log)).partition(": ")
        made = Record(
            self.part.name, self.part.phase, self.key, outcome, why, round(time.monotonic() - self.started, 1), log,
            whole_report(self.folder / "junit"), self._measured(),
        )  # fmt: skip
        if made.outcome != "passed":
            return made
        if self.part.benchmark and not any(counts_for_something(row) for row in made.rows):
            return replace(made, outcome="failed", why="it measured nothing that counts")
        return made if made.counts()["passed"] else replace(made, outcome="skipped", why="all its tests were skipped")

    def _measured(self) -> list[dict[str, Any]]:
        """The rows that this part appended; a line that a kill cut off is none."""
        if not self.part.benchmark or not self.rows.exists():
            return []
        lines = self.rows.read_bytes()[self._rows_before :].decode(errors="replace").splitlines()
        return [line["row"] for text in lines if (line := _parsed(text)) is not None]

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
    """Processes whose environment bears a mark that begins so; empty where there is no /proc."""
    wanted, found = f"{MARK}={mark}".encode(), set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if any(entry.startswith(wanted) for entry in path.read_bytes().split(b"\0")):
                found.add(int(path.parent.name))
    return found


def kill(processes: set[int]) -> None:
    """End them at once; some may be gone."""
    for pid in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


# ---- one phase ----


@dataclass
class Phase:
    """Parts of a phase. Those that never ran come first, in the table's order."""

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
    only: str = ""
    """A piece of the names of the parts that run, also where they have passed; all others stay."""

    def run(self) -> None:
        """Run what has not passed; record each part as it ends."""
        waiting = self._waiting()
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
                one.end("interrupted: you interrupted the suite")
                self._keep(one.record())
            raise

    def _waiting(self) -> list[Part]:
        if self.only:
            return [part for part in self.parts if self.only in part.name]
        records = self.result.records
        order = {None: 0, CUT: 1}  # what failed or was skipped waits for these
        todo = [part for part in self.parts if not passed(records[part.name])]
        return sorted(todo, key=lambda part: order.get(getattr(records[part.name], "outcome", None), 2))

    def _may_start(self, part: Part, running: list[Running]) -> bool:
        if not running:
            return True
        return part.together and len(running) < self.jobs and all(one.part.together for one in running)

    def _start(self, part: Part) -> list[Running]:
        left, key = self.deadline(self.end_within) - time.monotonic(), self.keys[part.name]
        limit = min(part.seconds, left)
        print(f"start, at most {limit:.0f} s: {part.name}", flush=True)
        mark = f"{self.memory.mark}{time.monotonic_ns()};"
        folder = self.scratch / str(self.parts.index(part))
        try:
            return [Running(part, key, limit, folder, self.memory.rows, mark, cut=left < part.seconds)]
        except OSError as error:
            self._keep(Record(part.name, part.phase, key, "failed", f"cannot start: {error}", 0.0, ""))
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


def chosen(parts: list[Part], phase: int, failed_before: Callable[[Part], bool]) -> list[Part]:
    """Parts of a phase; phase 3 runs again what phase 1 broke."""
    return [part for part in parts if part.phase == phase or (phase == 3 and part.phase == 1 and failed_before(part))]


def run_phase(
    phase: int, began: float, machine: dict[str, Any], options: argparse.Namespace, parts: list[Part], memory: Memory
) -> Result:
    """Run one phase, whose time began at `began`."""
    keys = {part.name: part.key(json.dumps(machine)) for part in parts}
    latest = {part.name: memory.latest(part.name, keys[part.name]) for part in parts}

    todo = chosen(parts, phase, lambda part: broken(latest[part.name]))
    result = Result(phase, machine, memory, {part.name: latest[part.name] for part in todo})
    folders = list(dict.fromkeys([options.memory.resolve(), options.out.resolve()]))
    result.write(folders)
    scratch = options.memory.resolve().with_name(f"{options.memory.name}-running")
    shutil.rmtree(scratch, ignore_errors=True)  # of a suite that was killed
    try:
        Phase(
            todo, memory, result, folders, keys, scratch, lambda seconds: began + seconds, options.start_within,
            options.end_within, options.jobs, options.only,
        ).run()  # fmt: skip
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        result.write(folders)
        print("\n" + result.summary(), flush=True)
    return result


def run_phases(began: float, machine: dict[str, Any], options: argparse.Namespace, parts: list[Part]) -> list[Result]:
    """One phase once, or all, each until every part has run to its end or nothing more passes."""
    memory = Memory(options.memory)
    kill(marked(memory.mark))  # of a suite that was killed
    if options.phase != "all":
        return [run_phase(int(options.phase), began, machine, options, parts, memory)]
    results = []
    for phase in (1, 2, 3):
        while True:
            result = run_phase(phase, began, machine, options, parts, memory)
            began = time.monotonic()
            if not result.unfinished or not any(passed(result.records[part]) for part in result.fresh):
                break
        results.append(result)
    return results


def command_line() -> argparse.ArgumentParser:
    """What may be given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = ROOT / "build" / "gpu"
    own, cores = ROOT / "scripts" / "gpu_parts.json", os.cpu_count() or 1
    parser.add_argument("phase", choices=["1", "2", "3", "all"])
    parser.add_argument("--parts", type=Path, default=own, help="another table of parts")
    parser.add_argument("--only", default="", metavar="TEXT", help="run the parts whose name holds TEXT, passed or not")
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT") or folder), help="results ($OUT, else build/gpu)"
    )
    parser.add_argument("--memory", type=Path, default=folder, help="folder that remembers passed parts (build/gpu)")
    parser.add_argument("--start-within", type=float, default=520, help="no part starts later in a phase [s]")
    parser.add_argument("--end-within", type=float, default=585, help="all parts are ended then [s]")
    parser.add_argument("--jobs", type=int, default=max(1, min(8, cores // 2)), help="parts at once, where they may")
    return parser


def main() -> int:
    """Run the phases; the exit code is the worst of theirs: 1 before 3 before 0."""
    began, parser = time.monotonic(), command_line()
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        parts = read_parts(options.parts)
        for folder in (options.memory, options.out):
            folder.mkdir(parents=True, exist_ok=True)
        machine = look_at_machine()
        if "gpu" not in machine:
            print("torch sees no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES. Tests of the CPU run, others skip.")
        results = run_phases(began, machine, options, parts)
    except BlockingIOError:
        parser.error(f"another suite is at work in {options.memory}; wait for it or give another --memory")
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"cannot write results: {error}; choose another folder by OUT= or --memory")
    except KeyboardInterrupt:
        print("interrupted; what ended before is kept", flush=True)
        return 130
    codes = [result.exit_code for result in results]
    return 1 if 1 in codes else max(codes)


if __name__ == "__main__":
    sys.exit(main())
