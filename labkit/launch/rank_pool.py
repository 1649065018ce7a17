"""The ranks of one launch, seen from outside: started, watched, interrogated and ended."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from labkit.launch import processes
from labkit.launch.by_rank import labelled
from labkit.launch.failure_report import Outcome, RankError, compose, trim
from labkit.launch.folders import LaunchFolder
from labkit.launch.forkserver import RankProcess
from labkit.launch.status import ask_to_stop, create_slots, read_slot
from labkit.launch.watch import HangWatch
from labkit.launch.worker import LaunchSpec, rank_main

GRACE = 0.25
"""Seconds that the other ranks get for their reports after the first failure."""
_END = 5.0
"""Seconds that ranks get to leave the group and exit."""
_STACK_WAIT = 2.0
"""Seconds that a hung rank gets to write its stack, enough for a busy machine."""
_ASKED_LATELY = 1.0
"""Seconds for which an answer counts as new, so that the rank is not asked again."""
_STACK_STILL = 5
"""A stack is complete when this many looks, 10 ms apart, found the same text, because the main thread comes last."""
_REPLAY_LIMIT = 1 << 20
"""Most bytes of output that are replayed per rank and call."""


class RankHandle:
    """One rank: its process, the connection to it, and its last message."""

    def __init__(self, spec: LaunchSpec, rank: int) -> None:
        self.rank = rank
        self.connection, self._theirs = Pipe(duplex=True)
        self.process = RankProcess(target=rank_main, args=(spec, rank, self._theirs), name=f"rank {rank}")
        self.outcome = Outcome(rank, "starting")
        self.joined = False
        self.hung_up = False
        self.replayed = {"out": 0, "err": 0}
        self._stack_file, self._stack_from = spec.file("stack", rank), 0
        self._asked_at = -math.inf

    def start(self) -> None:
        """Fork the process."""
        try:
            self.process.start()
        finally:
            self._theirs.close()

    @property
    def pid(self) -> int:
        """Process id of a rank that has been started."""
        assert self.process.pid is not None, "the rank was started"
        return self.process.pid

    @property
    def finished(self) -> bool:
        """True once it has answered the call, or will never answer."""
        return self.outcome.phase in ("returned", "failed", "died")

    def read(self, on_progress: Callable[[dict[str, Any]], None] | None) -> None:
        """Take in one message."""
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            self.hung_up = True  # if the process has ended, its sentinel reports that
            return
        if message[0] == "progress":
            if on_progress is not None:
                on_progress(message[1])
            return
        if message[0] == "joined":
            self.joined = True
        self.outcome.phase = message[0]
        if message[0] == "failed":
            self.outcome.when, self.outcome.failure = message[1:]

    def died(self) -> None:
        """Note that the process has ended by itself."""
        self.process.join()
        self.outcome.phase, self.outcome.exit_code = "died", self.process.exitcode

    def ask_for_stack(self) -> None:
        """Have the rank write the Python stacks of its threads. The signal would end a rank that does not run yet.

        A rank that was asked a moment ago is not asked again, because the rest of its first answer would be taken for
        the second.
        """
        assert self.outcome.phase != "starting", "the rank listens to the signal"
        now = time.monotonic()
        if now - self._asked_at < _ASKED_LATELY:
            return
        self._asked_at = now
        with contextlib.suppress(OSError):
            self._stack_from = self._stack_file.stat().st_size
        processes.send_signal(self.pid, signal.SIGUSR1)

    def stack(self) -> str:
        """Return what the rank has written since it was last asked."""
        with contextlib.suppress(OSError), self._stack_file.open(errors="replace") as file:
            file.seek(self._stack_from)
            return file.read()
        return ""


class RankPool:
    """All ranks of one launch and their folder. Two threads must not use it at once."""

    def __init__(
        self, world_size: int, *, backend: str, device: str, limit: float, group_timeout: float, debug: bool,
        variables: dict[str, str],
    ) -> None:  # fmt: skip
        """variables: environment variables for the ranks, where the caller's environment does not set them."""
        self._folder = LaunchFolder()
        environment = {**variables, **os.environ}
        self.spec = LaunchSpec(self._folder.path, world_size, backend, device, limit, group_timeout, debug, environment)
        self.handles: list[RankHandle] = []
        self._calls = self._failed_calls = 0
        self.owner = os.getpid()
        self.ended = False
        self.together = False
        """Show output that is the same on several ranks only once."""
        self.patience = GRACE
        """Seconds after a failure in which ranks that are not waiting may still come back by themselves."""
        create_slots(self.spec.slots, world_size)

    def start(self) -> None:
        """Fork the ranks, which join each other while the caller goes on."""
        rank = 0
        try:
            for rank in range(self.spec.world_size):
                self.handles.append(RankHandle(self.spec, rank))
                self.handles[rank].start()
        except (EOFError, OSError) as error:
            raise RankError(
                f"rank {rank} of {self.spec.world_size} could not be started: {type(error).__name__}: {error} "
                "(limit on processes or open files? `labkit doctor` shows both)", ranks=[rank], kind="start",
            ) from error  # fmt: skip

    def call(
        self, packed: bytes, limit: float, on_progress: Callable[[dict[str, Any]], None] | None = None
    ) -> list[Any]:
        """Have every rank call the packed function; return the results by rank. The caller replays the output.

        limit: seconds that a rank may wait for others, inf for no limit. Raises RankError if a rank does not return.
        """
        number, self._calls = self._calls, self._calls + 1
        path = self.spec.payload(number)
        path.write_bytes(packed)
        for handle in self.handles:
            handle.outcome = Outcome(handle.rank, "joined" if handle.joined else handle.outcome.phase)
            with contextlib.suppress(OSError):  # a dead rank is found by its sentinel
                handle.connection.send(("call", number, self._failed_calls))
        try:
            self._watch(limit, on_progress)
            if any(handle.outcome.phase != "returned" for handle in self.handles):
                for handle in self.handles:
                    handle.outcome.status = read_slot(self.spec.slots, handle.rank)
                    handle.outcome.seen = time.monotonic()
                self._interrogate([handle for handle in self.handles if not handle.finished])
                raise compose([handle.outcome for handle in self.handles], limit)
            return [self._result(handle, number) for handle in self.handles]
        except BaseException:
            self._failed_calls += 1
            raise
        finally:
            path.unlink(missing_ok=True)
            for handle in self.handles:
                self.spec.file("result", handle.rank, number).unlink(missing_ok=True)

    def ask_to_stop(self, asked: bool) -> None:
        """Ask the ranks to stop, or take the request back."""
        with contextlib.suppress(OSError):  # the folder is gone with its ranks
            ask_to_stop(self.spec.slots, asked)

    @property
    def in_step(self) -> bool:
        """True if every rank is in the group and has answered, so that another call can be made."""
        return all(handle.joined and handle.outcome.phase in ("returned", "failed") for handle in self.handles)

    def _watch(self, limit: float, on_progress: Callable[[dict[str, Any]], None] | None) -> None:
        """Wait until all have answered, the call hangs, or one rank has failed and the grace period is over."""
        hang = HangWatch(limit, self.spec.slots, time.monotonic())
        failed_at: float | None = None
        deadline = math.inf
        while open_handles := [handle for handle in self.handles if not handle.finished]:
            if failed_at is None and any(handle.outcome.phase in ("failed", "died") for handle in self.handles):
                failed_at = time.monotonic()
                deadline = failed_at + GRACE
            # A rank that has returned may still die, and then the others wait for it in vain.
            alive = [handle for handle in self.handles if handle.outcome.phase != "died"]
            sources: dict[Any, RankHandle] = {handle.process.sentinel: handle for handle in alive}
            sources |= {handle.connection: handle for handle in open_handles if not handle.hung_up}
            remaining = hang.period if failed_at is None else max(0.0, deadline - time.monotonic())
            ready = wait(list(sources), remaining)
            for source in ready:
                if isinstance(source, Connection):
                    sources[source].read(on_progress)
            for source in ready:
                if not isinstance(source, Connection):
                    self._take_last_words(sources[source], on_progress)
            if failed_at is None:
                silent = [handle for handle in open_handles if not handle.finished]
                if hang.look(silent, time.monotonic()):
                    return
            elif not ready and time.monotonic() >= deadline:
                if not self._may_come_back(open_handles, failed_at):
                    return
                deadline += 0.05

    def _may_come_back(self, silent: list[RankHandle], failed_at: float) -> bool:
        """Return True while waiting on after a failure makes sense: time is left, all live, some rank does not wait."""
        died = any(handle.outcome.phase == "died" for handle in self.handles)
        if died or time.monotonic() >= failed_at + self.patience:
            return False
        return not all(read_slot(self.spec.slots, handle.rank).inside for handle in silent)

    def _take_last_words(self, handle: RankHandle, on_progress: Callable[[dict[str, Any]], None] | None) -> None:
        while not handle.finished and not handle.hung_up and handle.connection.poll():
            handle.read(on_progress)
        if handle.outcome.phase != "failed":
            handle.died()

    def _interrogate(self, silent: list[RankHandle]) -> None:
        """Get the process state and the Python stacks of the ranks that gave no answer."""
        for handle in silent:
            handle.outcome.state = processes.process_state(handle.pid)
            if handle.outcome.phase != "starting":
                handle.ask_for_stack()
                processes.send_signal(handle.pid, signal.SIGCONT)
        deadline = time.monotonic() + _STACK_WAIT
        same = {handle: 0 for handle in silent if handle.outcome.phase != "starting"}
        while same and time.monotonic() < deadline:
            time.sleep(0.01)
            for handle in list(same):
                text = handle.stack()
                same[handle] = same[handle] + 1 if text and text == handle.outcome.stack else 0
                handle.outcome.stack = text
                if same[handle] == _STACK_STILL:
                    del same[handle]
        for handle in silent:
            handle.outcome.stack = trim(handle.outcome.stack)

    def _result(self, handle: RankHandle, number: int) -> Any:
        path = self.spec.file("result", handle.rank, number)
        try:
            with path.open("rb") as file:
                return pickle.load(file)
        except Exception as error:
            raise RankError(
                f"the result of rank {handle.rank} arrived but cannot be read here: {type(error).__name__}: {error}",
                ranks=[handle.rank], kind="raised",
            ) from error  # fmt: skip

    def replay(self) -> None:
        """Print what the ranks have written since the last replay, rank by rank, with the rank before each line."""
        for kind, stream in (("out", sys.stdout), ("err", sys.stderr)):
            texts = [self._unread(handle, kind) for handle in self.handles]
            named = labelled(texts) if self.together else ((f"[rank {rank}]", text) for rank, text in enumerate(texts))
            for label, text in named:
                # of a progress bar only the last state, as on a terminal
                lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")] if text else []
                stream.writelines(f"{label} {line}\n" for line in lines)
            stream.flush()

    def _unread(self, handle: RankHandle, kind: str) -> str:
        """Return what a rank has written since it was last read, without the last end of a line."""
        with contextlib.suppress(FileNotFoundError), self.spec.file(kind, handle.rank).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(handle.replayed[kind])
            text = file.read(_REPLAY_LIMIT).decode(errors="replace")
            left, handle.replayed[kind] = size - file.tell(), size
            return text.removesuffix("\n") + (f"\n... and {left:,} more bytes" if left > 0 else "")
        return ""

    def stop(self) -> None:
        """End the ranks cleanly: they leave the group and exit. Kill those that do not exit in time."""
        for handle in self.handles:
            with contextlib.suppress(OSError):
                handle.connection.send(("stop",))
        deadline = time.monotonic() + _END
        for handle in self.handles:
            wait([handle.process.sentinel], max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End every rank at once and wait until none is left. May be called again."""
        if self.ended or os.getpid() != self.owner:  # a fork of the caller must not end the caller's ranks
            return
        with processes.interrupt_deferred():
            started = [handle for handle in self.handles if handle.process.pid is not None]
            for handle in started:
                if not wait([handle.process.sentinel], 0):
                    processes.kill_family(handle.pid)
            for handle in started:
                wait([handle.process.sentinel], 2.0)
                handle.process.join(0)
                with contextlib.suppress(ValueError):  # it sleeps in a device driver and does not end: leave it alone
                    handle.process.close()
            for handle in self.handles:
                handle.connection.close()
            self.ended = True

    def remove_folder(self) -> None:
        """Remove rendezvous, outputs and results."""
        if os.getpid() == self.owner:
            self._folder.remove()
