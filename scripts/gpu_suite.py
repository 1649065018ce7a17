"""Tests and benchmarks on a GPU that is lent for minutes, the most telling first.

    scripts/gpu_suite.sh --minutes 15 --per-command 10     what fits; the same command again goes on
    scripts/gpu_suite.sh --list --minutes 15               which parts that will be, second by second; needs no GPU
    scripts/gpu_suite.sh --only TEXT                       parts whose name holds TEXT, passed or not

`gpu_plan.json` lists the parts in order. Each is a process of its own, killed with all of its children at its limit or
when the time of the command is over. Parts with tests run several at a time, benchmarks alone. A part starts only if
its estimate fits into the time that is left; a later, shorter one may take its place. What has passed is not run again
while code and machine stay the same. What never ran comes first, then what was cut off, then what failed. If nothing
passes in the smoke test, the command ends: the machine or the tree is broken.

The suite needs torch, numpy, pytest, cloudpickle and tqdm, no install and no network; PYTHON chooses the interpreter.
Results lie in `build/gpu`, and in `$OUT` where that is set: `summary.txt`; `junit.xml`; `log.txt`, what was printed;
`rows.jsonl`, every measured row; `memory.jsonl`, what ended. All are up to date while the suite runs. On a machine
where `build/gpu` is gone, `--after FOLDER` begins with the results of an earlier command, and keeps them.

Exit code: 0, all parts passed on a GPU. 1, a part failed; the summary shows its last lines. 2, wrong usage. 3, no part
failed, but some did not end in time, or there is no GPU. 130, interrupted.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpu_plan import ROOT, Part, foreseen, next_part, read_plan
from gpu_records import (
    BAD,
    CUT,
    RUNNING,
    Memory,
    Record,
    Report,
    counts_for_something,
    parsed,
    read_records,
    seconds_used,
)

MARK = "LABKIT_GPU_PART"
"""Environment variable by which the processes of a part are found, also those in sessions of their own."""
SKIPPED = 77
"""Exit code of a command or benchmark that cannot run here."""
VERSIONS = ("python", "torch", "gpu", "cuda", "triton")
"""What of the machine decides whether a part runs again; a host of the same kind may have another processor."""
LOG_BYTES = 100_000
"""How much of a part's output is kept, from its end."""
MARGIN = 15.0
"""Seconds before the end of a command at which its parts are ended: the results are still to be written."""
GRACE = 2.0
"""Seconds that a part has to end by itself once it was told to."""
WRITE_EVERY = 10.0
"""Seconds after which the results are written again while no part ends."""

# ---- one part as a process ----


def look_at_machine() -> dict[str, Any]:
    """Versions and hardware in words, asked of a process of its own, since torch itself may be broken.

    Raises:
        ValueError: something that the suite needs cannot be imported, with the error.
    """
    needs = "torch, numpy, pytest, cloudpickle, tqdm"
    words = [sys.executable, "-c", f"import json, provenance, {needs}; print(json.dumps(provenance.machine()))"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'benchmarks'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    try:
        done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
        return json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1:]
        raise ValueError(
            f"{sys.executable} cannot import all of {needs}: {' '.join(said)}; choose another: PYTHON=/path/to/python"
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
    blank: Record
    """What is known before it starts."""
    words: list[str]
    folder: Path
    rows: Path
    """Measured rows are appended here."""
    mark: str
    seconds: float
    """It is killed after these."""
    started: float = field(default_factory=time.monotonic)
    why: str = ""
    """Why the suite itself stopped it, with the outcome before the colon."""
    stopped: float = 0.0

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self._rows_before = self.rows.stat().st_size if self.rows.exists() else 0
        paths = [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
        own = {MARK: self.mark, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **self.part.environment()}
        own["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        own["LABKIT_GPU_OUTCOMES"] = str(self.folder / "outcomes")
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                self.words, cwd=ROOT, env=os.environ | own, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=prepare_child,
            )  # fmt: skip

    def ended(self) -> bool:
        """Whether it is over; stops it where its time is, and kills it if it does not stop soon."""
        if self.process.poll() is None:
            after, cut = f"after {self.seconds:.0f} s", self.seconds < self.part.limit
            if not self.why and time.monotonic() > self.started + self.seconds:
                self.stop(f"{CUT}: the time of the command was over {after}" if cut else f"too long: ended {after}")
            if self.why and time.monotonic() > self.stopped + GRACE:
                self.kill_all()
                return True  # also where it is stuck in the driver and takes no signal
        return self.process.poll() is not None

    def stop(self, why: str) -> None:
        """Ask it to end; a Python process first prints where it stands."""
        self.why, self.stopped = why, time.monotonic()
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGABRT)

    def kill_all(self) -> None:
        """End every process of the part, whatever session it moved to."""
        for _ in range(3):  # a process may start another while the list is read
            kill(marked(self.mark) | ({self.process.pid} if self.process.poll() is None else set()))
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5)

    def so_far(self) -> Record:
        """What it has shown until now."""
        log = (self.folder / "log").read_bytes()[-LOG_BYTES:].decode(errors="replace")
        tests = {line["name"]: line for line in parsed(self.folder / "outcomes")}
        rows = [line["row"] for line in parsed(self.rows, self._rows_before)] if self.part.benchmark else []
        seconds = round(time.monotonic() - self.started, 1)
        known: dict[str, Any] = {"seconds": seconds, "ended": time.time(), "log": log, "rows": rows}
        return replace(self.blank, outcome=RUNNING, tests=list(tests.values()), **known)

    def record(self) -> Record:
        """What came of it."""
        self.kill_all()
        made = self.so_far()
        outcome, _, why = (self.why or self._outcome(made.log)).partition(": ")
        made = replace(made, outcome=outcome, why=why)
        if made.outcome != "passed":
            return made
        if self.part.benchmark and not any(counts_for_something(row) for row in made.rows):
            return replace(made, outcome="failed", why="it measured nothing that counts")
        return made if made.counts()["passed"] else replace(made, outcome="skipped", why="all its tests were skipped")

    def _outcome(self, log: str) -> str:
        code = self.process.returncode
        if code is None:
            return "crashed: no signal ends its process"
        if code == 0:
            return "passed"
        if code < 0:
            return f"crashed: killed by {signal.Signals(-code).name}"
        last = (log.rstrip().splitlines() or ["it printed nothing"])[-1]
        if code == SKIPPED and not self.part.tests:
            return f"skipped: {last}"
        if self.part.tests and code == 5:
            return "failed: pytest found no test"
        return f"failed: exit code {code}, {last}"


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


# ---- one command ----


@dataclass
class Command:
    """Parts of the plan until they have ended or the time is over."""

    waiting: list[Part]
    report: Report
    scratch: Path
    """Where a part writes while it runs."""
    wheels: Path | None
    jobs: int
    ends: float
    """All parts are ended then, by `time.monotonic`."""
    running: list[Running] = field(default_factory=list)
    _written: float = 0.0

    def run(self) -> None:
        """Run what fits; remember each part as it ends."""
        try:
            while self._start_what_may() or self.running:
                self._keep_ended()
                if time.monotonic() > self._written + WRITE_EVERY:
                    self._write()
                time.sleep(0.05)
        except KeyboardInterrupt:
            for one in self.running:
                one.stop("interrupted: you interrupted the suite")
            while self.running:
                self._keep_ended()
                time.sleep(0.05)
            raise

    def _start_what_may(self) -> bool:
        """Start a part if one may; whether one was started."""
        left = self.ends - time.monotonic()
        part = next_part(self.waiting, [one.part for one in self.running], left, self.jobs)
        if part is None:
            return False
        self.waiting.remove(part)
        limit, memory = min(part.limit, left), self.report.memory
        print(f"start, at most {limit:.0f} s: {part.name}", flush=True)
        blank = Record(part.name, self.report.keys[part.name], self.report.command, "failed", "", 0.0, time.time(), "")
        folder = self.scratch / str(time.monotonic_ns())
        words, mark = part.words(memory.rows, self.wheels, folder), f"{memory.mark}{folder.name};"
        try:
            self.running.append(Running(part, blank, words, folder, memory.rows, mark, limit))
        except OSError as error:
            self._remember(replace(blank, why=f"cannot start: {error}"))
        return True

    def _keep_ended(self) -> None:
        for one in [one for one in self.running if one.ended()]:
            self.running.remove(one)
            self._remember(record := one.record())
            if one.part.gate and "gpu" in self.report.machine and not record.counts()["passed"]:
                self.waiting.clear()
                print(f"nothing passes in {record.part}, so nothing else runs; --only TEXT runs parts all the same")

    def _remember(self, record: Record) -> None:
        self.report.memory.add(record)
        self._write()
        print(f"{record.outcome:<11} {record.seconds:7.1f} s  {record.part}  {record.why}", flush=True)

    def _write(self) -> None:
        self.report.memory.still_at_work(self.report.command)
        self.report.write([one.so_far() for one in self.running])
        self._written = time.monotonic()


def named(plan: Sequence[Part], only: str) -> list[Part]:
    """The part with this name, else the parts whose names hold the text.

    Raises:
        ValueError: no name does.
    """
    found = [part for part in plan if part.name == only] or [part for part in plan if only in part.name]
    if not found:
        raise ValueError(f"--only {only!r}: no part's name holds this; --list prints names")
    return found


def chosen(plan: Sequence[Part], records: Sequence[Record], keys: Mapping[str, str]) -> list[Part]:
    """The parts to run, in order: what has passed is left out; what never ran comes first, then what was cut off.

    records: of earlier commands. keys: of the parts with this code on this machine; empty where it is not known.
    """
    latest = {record.part: record for record in records}

    def is_of_now(record: Record) -> bool:
        return not keys or record.key == keys[record.part]

    def has_passed(part: Part) -> bool:
        record = latest.get(part.name)
        return record is not None and record.outcome == "passed" and is_of_now(record)

    def rank(part: Part) -> int:
        record = latest.get(part.name)
        if part.gate:
            return -1
        if record is None or (record.outcome in BAD and not is_of_now(record)):  # the change may be its fix
            return 0
        return 1 if record.outcome in (CUT, "interrupted") else 2

    return sorted((part for part in plan if not has_passed(part)), key=rank)


def run(began: float, options: argparse.Namespace, plan: Sequence[Part]) -> int:
    """Run one command, which began at that time; returns the exit code."""
    out = options.out.resolve()
    folders = [*{out, Path(os.environ.get("OUT") or out).resolve()}]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    memory = Memory(out, options.after.resolve() if options.after else None)
    kill(marked(memory.mark))  # of a suite that was killed
    used = seconds_used(out) / 60
    left, command = 60 * min(options.per_command, options.minutes - used), time.time() - (time.monotonic() - began)
    if left <= MARGIN:
        raise ValueError(
            f"no time is left: the commands of {out} took {used:.1f} of --minutes {options.minutes:g}, "
            f"and --per-command is {options.per_command:g}; give more, or another --out"
        )
    machine = look_at_machine()
    if "gpu" not in machine and not options.without_gpu:
        print("torch sees no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES; --without-gpu rehearses on a CPU")
        return 3
    wheels = options.wheels.resolve() if options.wheels else None
    versions = json.dumps({name: machine[name] for name in VERSIONS if name in machine})
    keys = {part.name: part.key(versions, wheels) for part in plan}
    report = Report(plan, keys, machine, memory, folders, command, options.minutes, again(options))
    report.write()
    scratch = out.with_name(f"{out.name}-running")
    shutil.rmtree(scratch, ignore_errors=True)  # of a suite that was killed
    try:
        waiting = named(plan, options.only) if options.only else chosen(plan, memory.records, keys)
        Command(waiting, report, scratch, wheels, options.jobs, ends=began + left - MARGIN).run()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        print("\n" + report.write(), flush=True)
    return report.exit_code()


def again(options: argparse.Namespace) -> str:
    """The command line that goes on."""
    usual, words = command_line().parse_args([]), ["scripts/gpu_suite.sh"]
    for name in ("minutes", "per_command", "out", "wheels", "jobs", "plan"):
        if (value := getattr(options, name)) != getattr(usual, name):
            words += [f"--{name.replace('_', '-')}", f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


def in_words(plan: Sequence[Part], options: argparse.Namespace) -> str:
    """Which parts the next commands will take, by the estimates."""
    folder = options.after or options.out
    waiting = named(plan, options.only) if options.only else chosen(plan, read_records(folder), {})
    left, lines, number = options.minutes - seconds_used(folder) / 60, [], 0
    while waiting:
        seconds = 60 * min(options.per_command, left) - MARGIN
        if not (taken := foreseen(waiting, seconds, options.jobs)):
            break
        number, took = number + 1, max(start + part.estimate for start, part in taken)
        lines += [f"Command {number}, about {took:.0f} s: start, estimate, part"]
        lines += [f"  {start:5.0f} {part.estimate:5.0f}  {part.name}" for start, part in taken]
        waiting = [part for part in waiting if part not in [one for _, one in taken]]
        left -= took / 60
    lines += [f"Left out: {', '.join(part.name for part in waiting)}"] if waiting else []
    return "\n".join(lines or ["All parts have passed."])


def command_line() -> argparse.ArgumentParser:
    """What may be given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder, wheels, jobs = ROOT / "build" / "gpu", ROOT / "build" / "wheels", max(1, min(8, (os.cpu_count() or 1) // 2))
    parser.add_argument("--minutes", type=float, default=math.inf, help="all commands take, together (no limit)")
    parser.add_argument("--per-command", type=float, default=10.0, metavar="MINUTES", help="this one takes (10)")
    parser.add_argument("--list", action="store_true", help="print what fits, by the estimates, and stop")
    parser.add_argument("--only", default="", metavar="TEXT", help="run the parts whose name holds TEXT, passed or not")
    parser.add_argument(
        "--out", type=Path, default=folder, metavar="FOLDER", help="results (build/gpu); copied to $OUT as they come"
    )
    parser.add_argument("--after", type=Path, metavar="FOLDER", help="results of an earlier command, to go on from")
    parser.add_argument(
        "--wheels", type=Path, metavar="FOLDER", default=wheels if list(wheels.glob("*.whl")) else None,
        help="of what chapter 16 needs (build/wheels, if it is there); docs/gpu.md fetches them",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=int, default=jobs, metavar="N", help="parts with tests at a time (half the cores, at most 8)"
    )
    parser.add_argument("--without-gpu", action="store_true", help="rehearse: tests of the CPU run, all others skip")
    parser.add_argument("--plan", type=Path, default=ROOT / "scripts" / "gpu_plan.json", help="another plan")
    return parser


def main() -> int:
    """Run one command."""
    began, parser = time.monotonic(), command_line()
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        plan = read_plan(options.plan)
        if options.wheels and not list(options.wheels.glob("*.whl")):
            raise ValueError(f"--wheels {options.wheels} holds no wheel; docs/gpu.md fetches them")
        if options.list:
            print(in_words(plan, options))
            return 0
        return run(began, options, plan)
    except BlockingIOError:
        parser.error(f"another suite is at work in {options.out}; wait for it or give another --out")
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"cannot write results: {error}; choose another folder by OUT= or --out")
    except KeyboardInterrupt:
        print("interrupted; what ended before is kept", flush=True)
        return 130


if __name__ == "__main__":
    sys.exit(main())
