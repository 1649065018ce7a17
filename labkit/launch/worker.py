"""The life of a rank: it prepares, joins the process group, answers calls and leaves.

A rank exchanges messages with the launcher over one connection:

| message                   | from     | sent                                                              |
|---------------------------|----------|-------------------------------------------------------------------|
| `("here",)`               | rank     | once it runs                                                      |
| `("joined",)`             | rank     | once the process group exists                                     |
| `("progress", values)`    | rank     | by `report_progress`                                              |
| `("returned", t)`         | rank     | after a call; t is `time.monotonic()`                             |
| `("failed", t, Failure)`  | rank     | after a call that raised                                          |
| `("call", n, failed)`     | launcher | for call n; `failed` counts earlier calls that failed on a rank   |
| `("stop",)`               | launcher | at the end                                                        |

Payloads and results are files in the launch's folder, so that a rank which is stopped while it writes a large result
does not block the launcher.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import io
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle

from labkit.launch import info, pickling, processes, rank_cells, status


@dataclass(frozen=True)
class LaunchSpec:
    """Data that all ranks of one launch share."""

    folder: Path
    """Folder of the launch: rendezvous, status slots, output, stacks, payloads and results."""
    world_size: int
    backend: str
    device: str
    limit: float
    """Seconds that a rank may wait for others before the launcher calls it a hang."""
    group_timeout: float
    """Seconds after which torch.distributed gives up a collective by itself."""
    debug: bool
    """If true, torch compares each collective between the ranks."""
    environment: dict[str, str]

    def file(self, kind: str, rank: int, call: int | None = None) -> Path:
        """Return the path of one rank's file of a kind: `out`, `err`, `stack` or, for a call, `result`."""
        return self.folder / (f"{kind}-{rank}" if call is None else f"{kind}-{rank}-{call}")

    def payload(self, call: int) -> Path:
        """Return the path of the payload of one call."""
        return self.folder / f"payload-{call}"

    @property
    def slots(self) -> Path:
        """Path of the status slots."""
        return self.folder / "status"


@dataclass(frozen=True)
class Failure:
    """An exception on a rank, as text because an exception object may not survive pickling."""

    summary: str
    """Type and message, such as `ValueError: no such layer`."""
    traceback: str
    """The whole traceback, without labkit's own outermost frames."""


def rank_main(spec: LaunchSpec, rank: int, connection: Connection) -> None:
    """Run one rank to its end. Never returns."""
    _prepare(spec, rank)
    lock = threading.Lock()

    def send(*message: Any) -> None:
        with lock:
            connection.send(message)

    send("here")
    slot = status.StatusSlot(spec.slots, rank)
    status.attach(slot)
    info.send_progress_to((lambda values: send("progress", values)) if rank == 0 else None)
    try:
        _join(spec, rank)
    except BaseException as error:
        send("failed", time.monotonic(), describe(error))
        while True:
            signal.pause()  # no group, so no calls: the launcher ends this process
    slot.clear()
    send("joined")
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            os._exit(1)  # the launcher has gone
        if message[0] == "stop":
            break
        slot.clear()  # forget the waits of earlier calls
        number, failed_calls = message[1:]
        reply = _answer(spec, rank, number, failed_calls)
        with contextlib.suppress(Exception):  # if the group is broken, the next call fails and reports why
            info.tidy_between_calls(failed_calls)
        send(*reply)
    with contextlib.suppress(Exception):
        info.leave_group()
    _flush()
    os._exit(0)


def _prepare(spec: LaunchSpec, rank: int) -> None:
    """Make the forked process a rank: garbage, signals, process group, lifeline, output, environment, stacks."""
    gc.freeze()  # what the fork server has imported is never looked through
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Jupyter interrupts all processes; the launcher ends the ranks
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})  # the fork server blocks both
    os.setpgid(0, 0)  # the children of a rank end with it
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank is started by the launcher"
    processes.die_with(parent.sentinel)
    _capture_output(spec, rank)
    faulthandler.register(signal.SIGUSR1, file=spec.file("stack", rank).open("w"), all_threads=True)
    loopback = info.loopback_interface()
    os.environ.clear()  # the fork server's environment is as old as the first launch
    os.environ.update(spec.environment)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(spec.world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(spec.world_size),
        GLOO_SOCKET_IFNAME=loopback, NCCL_SOCKET_IFNAME=loopback, OMP_NUM_THREADS="1",
    )  # fmt: skip


def _capture_output(spec: LaunchSpec, rank: int) -> None:
    """Send descriptors 1 and 2 to this rank's files, each line at once. C code writes to the same descriptors."""
    for descriptor, kind in ((1, "out"), (2, "err")):
        file = os.open(spec.file(kind, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    out, err = (io.FileIO(descriptor, "w", closefd=False) for descriptor in (1, 2))
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(out), encoding="utf-8", errors="replace", line_buffering=True)
    sys.stderr = io.TextIOWrapper(io.BufferedWriter(err), encoding="utf-8", errors="replace", line_buffering=True)


def _join(spec: LaunchSpec, rank: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if spec.debug:
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    # torch read the variable when the fork server imported torch
    dist.set_debug_level_from_env()  # pyright: ignore[reportPrivateImportUsage]
    info.set_launcher_limit(spec.limit)
    # bytes, and no address: a path may have blanks, `%`, `#` or bytes that are not UTF-8
    path: Any = os.fsencode(spec.folder / "store")
    store = dist.FileStore(path, spec.world_size)  # pyright: ignore[reportPrivateImportUsage]
    with status.waiting("rendezvous of all ranks"):
        info.join_group(
            meeting=store, rank=rank, world_size=spec.world_size, local_rank=rank,
            local_world_size=spec.world_size, backend=spec.backend, device=spec.device, timeout=spec.group_timeout,
        )  # fmt: skip


def _answer(spec: LaunchSpec, rank: int, call: int, failed_calls: int) -> tuple[Any, ...]:
    """Call the function of payload `call` and store its result; return the message for the launcher."""
    try:
        info.tidy_between_calls(failed_calls)
        fn, args = pickling.unpack(spec.payload(call))
        result = fn(*args)
        _store(spec.file("result", rank, call), result)
    except BaseException as error:
        return ("failed", time.monotonic(), describe(error))
    finally:
        _flush()
    return ("returned", time.monotonic())


class _ResultPickler(cloudpickle.Pickler):
    """A pickler that moves tensors to the CPU, so that the caller needs no GPU to read them."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor) and obj.is_cuda:
            return obj.cpu().__reduce_ex__(5)
        return super().reducer_override(obj)


def _store(path: Path, result: Any) -> None:
    try:
        with path.open("wb") as file:
            _ResultPickler(file).dump(result)
    except Exception as error:
        raise TypeError(
            f"the result, of type {type(result).__name__}, cannot be sent back: {type(error).__name__}: {error}. "
            "Return plain numbers, strings, containers or tensors"
        ) from error


def describe(error: BaseException) -> Failure:
    """Return any exception as text, even if its own methods fail."""
    try:
        notes = sum(len(note.split("\n")) for note in getattr(error, "__notes__", ()))
        summary = traceback.format_exception_only(error)[-1 - notes].strip()
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, rank_cells.__file__):
            frames = frames.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
    except BaseException as second:
        summary = f"{type(error).__name__} (its text raised {type(second).__name__})"
        text = summary
    return Failure(summary, text.rstrip())


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)  # output that C code still buffers
