"""Put a failed launch into words: who failed, why, and what the others were doing."""

from __future__ import annotations

import linecache
import re
import signal
import textwrap
import time
from dataclasses import dataclass, field

from labkit.config.errors import counted
from labkit.launch.machine import MORE_FILES
from labkit.launch.status import Status
from labkit.launch.worker import Failure

_OUTSIDE = ("/torch/", "/labkit/launch/", "/multiprocessing/", "<frozen", "<string>", "/contextlib.py", "/threading.py")
_OF_RANKS = ("/labkit/launch/worker.py", "/labkit/launch/rank_cells.py")
"""Files whose functions call the user's code on a rank."""
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$')
_ADDRESS = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+")
"""Addresses in a stack, which are left out because they differ between ranks at the same place."""

_STOPPED = ("T", "t")
_ADVICE = (
    "timeout= is the longest that a rank may wait for others, here {:g} s; a rank that computes has no limit. If "
    "so long a wait is intended, allow more: timeout={:g} (`labkit train --timeout`), or timeout=math.inf for no limit."
)
_GAVE_UP = re.compile(r"(RuntimeError|Dist\w*Error): .*time(d )?out", re.IGNORECASE | re.DOTALL)
_NO_FILE_LEFT = re.compile("gloo.*Too many open files", re.DOTALL)
_TORCH_LIMIT = (
    "torch stopped at the limit of the collective's own group: distributed_timeout_minutes= of run() and Ranks(), "
    "parallel.distributed_timeout_minutes (`labkit train --timeout`) for the groups of a configuration."
)
_MISMATCH = re.compile(
    r"Rank \d+ is running collective: CollectiveFingerPrint\(SequenceNumber=\d+(?:, )?OpType=(\w+)"
    r"(?:, TensorShape=(\[[\d, ]*\]))?(?:, TensorDtypes=(\w+))?"
)


class RankError(RuntimeError):
    """A launch failed. The message names the rank, quotes its traceback, and says what every other rank was doing."""

    def __init__(self, message: str, *, ranks: list[int], kind: str) -> None:
        super().__init__(message)
        self.ranks = ranks
        """The ranks at fault: those that raised, died, or made others wait; in a hang of all, all that hang."""
        self.kind = kind
        """`raised`, `died`, `timeout` or `start`."""

    @property
    def summary(self) -> str:
        """The message's first line, the same in every repetition."""
        return str(self).partition("\n")[0]


@dataclass
class Outcome:
    """What the launcher knows about one rank at the end of a call."""

    rank: int
    phase: str
    """`starting` (forked), `here` (runs), `joined` (in the group), `returned`, `failed` or `died`."""
    failure: Failure | None = None
    when: float = 0.0
    """`time.monotonic()` at the failure."""
    exit_code: int | None = None
    state: str | None = None
    """One-letter process state before it was ended."""
    status: Status = field(default_factory=lambda: Status("", False, 0.0))
    seen: float = field(default_factory=time.monotonic)
    """`time.monotonic()` when the status was read."""
    stack: str = ""
    """Python stacks of all threads, innermost frame first, as faulthandler writes them."""


def compose(outcomes: list[Outcome], limit: float) -> RankError:
    """Return the error for a call from which not every rank returned. limit: seconds that a rank might wait for others.

    Ranks that died are the cause, since the others then fail with broken connections. Otherwise ranks that raised are
    the cause, the earliest first, else ranks that gave no answer. A rank that could open no more files says so in an
    error, or dies of it, because gloo aborts the process where a thread of its own meets the limit.
    """
    died = [o for o in outcomes if o.phase == "died"]
    failed = sorted((o for o in outcomes if o.phase == "failed"), key=lambda o: o.when)
    if all(o.exit_code == -signal.SIGABRT for o in died) and any(map(_no_file_left, failed if died else failed[:1])):
        return _unconnected(sorted(o.rank for o in died + failed), len(outcomes))
    if died:
        return _died(died, outcomes)
    if failed:
        return _raised(failed, outcomes)
    return _silent(outcomes, limit)


def _no_file_left(outcome: Outcome) -> bool:
    return outcome.failure is not None and bool(_NO_FILE_LEFT.search(outcome.failure.summary))


def _unconnected(ranks: list[int], count: int) -> RankError:
    head = f"{_ranks(ranks)} of {count} could not connect: too many open files in a rank; {MORE_FILES}"
    return RankError(head, ranks=ranks, kind="raised")


def _died(died: list[Outcome], outcomes: list[Outcome]) -> RankError:
    what = "; ".join(f"rank {o.rank} {_death(o.exit_code)}" for o in died)
    lines = [
        f"{len(died)} of {counted(len(outcomes), 'rank')} died: {what}",
        *_others(outcomes, died),
        *_stacks(outcomes),
    ]
    return RankError("\n".join(lines), ranks=[o.rank for o in died], kind="died")


def _raised(failed: list[Outcome], outcomes: list[Outcome]) -> RankError:
    first = failed[0]
    assert first.failure is not None, "a failed rank has said why"
    calls = {o.rank: call for o in sorted(failed, key=lambda o: o.rank) if (call := mismatched_call(o))}
    said = first.failure.summary
    if first.rank in calls:
        said = f"the ranks disagree on a collective: {', '.join(f'rank {r} called {c}' for r, c in calls.items())}"
    head = f"rank {first.rank} of {len(outcomes)} raised {said}"
    if len(failed) > 1:
        head = f"{len(failed)} of {len(outcomes)} ranks raised, first rank {first.rank}: {said}"
    texts = {o.rank: o.failure.traceback for o in failed if o.failure is not None and _frames(o) != _frames(first)}
    title = f"Traceback of rank {first.rank}"
    gave_up = _GAVE_UP.search(said)
    if gave_up and first.status.text:
        title += f", which waited in {first.status.text}"
    lines = [head, *([_TORCH_LIMIT] if gave_up else []), "", f"{title}:", _indent(first.failure.traceback)]
    lines += ["", *_others(outcomes, [first]), *_by_text("Traceback of {}:", texts), *_stacks(outcomes)]
    return RankError("\n".join(lines), ranks=[o.rank for o in failed], kind="raised")


def _silent(outcomes: list[Outcome], limit: float) -> RankError:
    """Report a call in which nobody raised or died: a rank waited too long or was stopped, or no rank ran any more."""
    silent = [o for o in outcomes if o.phase != "returned"]
    waiting = [o for o in silent if waits(o, limit)]
    busy = [o for o in silent if o not in waiting]
    missing = [o for o in silent if o.phase in ("starting", "here")]
    absent = [o for o in missing if o.status.text == ""] or missing
    count = len(outcomes)
    if missing and len(absent) == count:
        culprits, head = absent, f"none of {counted(count, 'rank')} joined within {limit:g} s"
    elif missing:
        culprits = absent
        head = f"{_names(absent)} of {count} never joined within {limit:g} s; the others could not start"
    elif waiting and busy:
        culprits, head = busy, f"{_names(waiting)} of {count} waited for {_names(busy)} longer than {limit:g} s"
    elif waiting:
        culprits, head = waiting, f"{_names(waiting)} of {count} waited longer than {limit:g} s"
    elif stopped := [o for o in busy if o.state in _STOPPED]:
        culprits, head = stopped, f"{_names(stopped)} of {count} made no progress for {limit:g} s, stopped by a signal"
    else:
        culprits, head = busy, f"{_names(busy)} of {count} did nothing for {limit:g} s"
    lines = [head, *(f"  rank {o.rank}: {activity(o)}" for o in outcomes), _ADVICE.format(limit, 10 * limit)]
    kind = "start" if missing else "timeout"
    return RankError("\n".join([*lines, *_stacks(outcomes)]), ranks=[o.rank for o in culprits], kind=kind)


def waits(outcome: Outcome, limit: float) -> bool:
    """Return True if a rank that gave no answer waits for others.

    Others wait for a stopped rank, even inside a collective, and for a rank that has just entered a collective.
    """
    if outcome.state in _STOPPED:
        return False
    if outcome.status.inside:
        return outcome.seen - outcome.status.since >= min(1.0, limit / 4)
    return torch_call(outcome.stack) != ""


def activity(outcome: Outcome) -> str:
    """Say in one line what a rank was doing."""
    if outcome.phase == "returned":
        return "had returned"
    if outcome.phase == "failed" and outcome.failure is not None:
        if call := mismatched_call(outcome):
            return f"called {call}"
        last = f", last waited in {outcome.status.text}" if outcome.status.text else ""
        return f"raised {textwrap.shorten(outcome.failure.summary, 200)}{last}"
    if outcome.phase == "died":
        return _death(outcome.exit_code)
    status = outcome.status
    if status.inside:
        text = f"waiting in {status.text} for {max(0.0, time.monotonic() - status.since):.1f} s"
    elif call := torch_call(outcome.stack):
        text = f"waiting in {call}"
    elif outcome.phase == "starting":
        text = "gave no sign of life"
    else:
        text = "running" + (f", last waited in {status.text}" if status.text else "")
    if outcome.state in _STOPPED:
        text = f"stopped by a signal (process state {outcome.state}), {text}"
    where = innermost(outcome.stack)
    return text + (f", at {where}" if where else "")


def _others(outcomes: list[Outcome], named: list[Outcome]) -> list[str]:
    others = [o for o in outcomes if o not in named]
    return ["The others:", *(f"  rank {o.rank}: {activity(o)}" for o in others)] if others else []


def _stacks(outcomes: list[Outcome]) -> list[str]:
    """Return the stacks of the ranks that gave no answer, because in a hang one of these ranks is the cause."""
    stacks = {o.rank: _ADDRESS.sub("Thread", o.stack) for o in outcomes if o.stack}
    return _by_text("Stack of {}, innermost call first:", stacks)


def _by_text(title: str, texts: dict[int, str]) -> list[str]:
    """Return each different text once, under the names of its ranks."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks_of.setdefault(text, []).append(rank)
    return [line for text, ranks in ranks_of.items() for line in ("", title.format(_ranks(ranks)), _indent(text))]


def _frames(outcome: Outcome) -> str:
    """Return where the error was: the traceback without the exception's text, which may hold addresses and times."""
    assert outcome.failure is not None, "a failed rank has said why"
    return outcome.failure.traceback.partition(outcome.failure.summary)[0]


def _names(outcomes: list[Outcome]) -> str:
    return _ranks([o.rank for o in outcomes])


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _death(exit_code: int | None) -> str:
    if exit_code is None or exit_code == 255:
        return "vanished (its fork server ended, or it exited with code 255)"
    if exit_code < 0:
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:
            name = f"signal {-exit_code}"
        hint = " (by a person, or by the system because memory ran out)" if name == "SIGKILL" else ""
        return f"was ended by {name}{hint}"
    return f"ended with exit code {exit_code} before it returned"


def mismatched_call(outcome: Outcome) -> str | None:
    """Return this rank's call, such as `ALLREDUCE [3] Float`, if torch found that ranks called different operations.

    torch misnames the other rank's operation if that has no tensor, and it counts ranks within the group. So this
    function reads only the part about the raising rank.
    """
    found = _MISMATCH.search(outcome.failure.summary) if outcome.failure is not None else None
    return " ".join(part for part in found.groups() if part) if found else None


def innermost(stack: str) -> str:
    """Return `function (file:line)` of the innermost frame of the user's own code in a faulthandler stack, else ""."""
    for line in stack.splitlines():
        frame = _FRAME.match(line)
        if frame and not any(part in frame["file"] for part in _OUTSIDE):
            return f"{frame['name']} ({frame['file'].rpartition('/')[2]}:{frame['line']})"
    return ""


def torch_call(stack: str) -> str:
    """Return the innermost call of a thread if it is one of torch, such as `torch.distributed.all_reduce`; else "".

    It names the collective of a rank that calls torch directly, without labkit's status slot. `work.wait()` is not a
    Python function and has no frame, so it is recognised by the text of the line that calls it.
    """
    innermost = True
    for line in stack.splitlines():
        frame = _FRAME.match(line)
        if frame and innermost:
            if frame["file"].endswith("/distributed_c10d.py"):
                return f"torch.distributed.{frame['name']}"
            if ".wait(" in linecache.getline(frame["file"], int(frame["line"])):
                return "wait() of torch.distributed"
        innermost = frame is None
    return ""


def trim(stack: str) -> str:
    """Drop the launcher's own frames, which are below the function's, from a faulthandler dump."""
    lines = stack.strip().splitlines()
    kept: list[str] = []
    skipping = False
    for line in lines:
        frame = _FRAME.match(line)
        skipping = bool(frame) and (skipping or frame["file"].endswith(_OF_RANKS))
        if not skipping:
            kept.append(line)
    return "\n".join(kept).strip()


def _indent(text: str) -> str:
    return "\n".join("  " + line for line in text.splitlines())
