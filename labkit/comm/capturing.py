"""The state of recording: somebody records the device's work, to replay it later (a CUDA graph, or an emulated one).

A recording holds the device's work. Python runs while it is made, and at no replay. Most code need not care, but two
kinds must. Code that makes the host wait for the device cannot be recorded, so it is rejected here with an error that
names the user's line. Code whose effect on the host belongs to the device's work, such as switching random states, is
recorded and called again.

This module is below everything that asks. A capture is one of the `watchers` of the process (`labkit.events`), not of a
thread, because on CUDA autograd runs backward passes on threads of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from labkit.events import innermost, watchers, watching

T = TypeVar("T")


class GraphCaptureError(RuntimeError):
    """Code did something during capture that a CUDA graph cannot hold, or a replay would differ from the capture."""


class BrokenProcessError(GraphCaptureError):
    """A failed capture has left this process unable to go on: it must be left (`labkit.graphs.cuda.failed_capture`)."""


class Recorder(Protocol):
    """The service of an emulated capture to code that dispatch does not see (`labkit.graphs.emulated.recording`)."""

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` now, unrecorded, and again at each replay."""
        ...

    def transfer(self, issue: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Issue a transfer now and at each replay; the returned `Pending` records its `wait()` in the same way."""
        ...


class _Capture:
    """A capture under way: the watcher of a `graph_capturing` block."""

    def __init__(self, recorder: Recorder | None) -> None:
        self.recorder = recorder


class _State:
    """What this process remembers in addition to the captures under way."""

    warmup: int = 0
    """Blocks of `graph_warmup` under way, one inside the other."""
    broken: str | None = None
    """Why nothing can be captured or drawn here any more."""


_state = _State()


def is_graph_capturing() -> bool:
    """Return True while a graph is being captured: by one of our backends, or by anybody on the current CUDA stream."""
    if watchers and innermost(_Capture) is not None:
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_graph_warmup() -> bool:
    """Return True while a callable runs before its capture, so that lazy things are made outside the graph."""
    return _state.warmup > 0


def process_is_broken(why: str) -> BrokenProcessError:
    """Make `require_whole_process` raise from now on, and return the error to raise here."""
    _state.broken = why
    return BrokenProcessError(why)


def require_whole_process() -> None:
    """Raise the BrokenProcessError of an earlier capture that failed and could not be repaired, if there is one."""
    if _state.broken is not None:
        raise BrokenProcessError(_state.broken)


def active_capture() -> Recorder | None:
    """Return the emulated capture that records this process; None outside one, and inside a recorded call."""
    capture = innermost(_Capture) if watchers else None
    return None if capture is None else capture.recorder


@contextmanager
def graph_capturing(recorder: Recorder | None = None) -> Iterator[None]:
    """Inside the block `is_graph_capturing()` is true; `recorder` is told what dispatch does not see.

    Blocks nest: a helper captures around a backend, which goes on with the helper's recorder if it has none.
    """
    with watching(_Capture(active_capture() if recorder is None else recorder)):
        yield


@contextmanager
def graph_warmup() -> Iterator[None]:
    """Inside the block `is_graph_warmup()` is true."""
    _state.warmup += 1
    try:
        yield
    finally:
        _state.warmup -= 1


@contextmanager
def unrecorded() -> Iterator[None]:
    """Set `active_capture()` to None inside the block, so that what a recorder calls there records nothing."""
    capture = innermost(_Capture) or _Capture(None)  # outside a capture there is nothing to hide
    hidden, capture.recorder = capture.recorder, None
    try:
        yield
    finally:
        capture.recorder = hidden


def recorded_call(function: Callable[[], T]) -> T:
    """Return `function()`; under an emulated capture it is called again at each replay, at this place of the graph.

    This is for what must follow the device's work although the host does it. On CUDA it is a plain call, because the
    graph itself replays what corresponds to it there (registered generators).
    """
    recorder = active_capture()
    return function() if recorder is None else recorder.call(function)


def host_would_wait(x: Tensor) -> bool:
    """Return True if the host cannot read the values of `x` at once: on a GPU, or while work is recorded."""
    return x.is_cuda or is_graph_capturing()


def refuse_host_sync(what: str) -> None:
    """Raise GraphCaptureError if a graph is being captured, because `what` would make the host wait for the device."""
    if is_graph_capturing():
        caller = sys._getframe(1).f_code.co_filename
        raise GraphCaptureError(
            f"{call_site(caller)}: {what} makes the host wait for the device, which a CUDA graph cannot hold: while it "
            "is captured nothing has been computed yet. Move it out of the captured part, or compute on the device"
        )


_INTERNAL = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1] / "graphs"), __file__, "<frozen")


def call_site(*also_skipped: str) -> str:
    """Return `file:line (in function)` of the user: the innermost frame that is neither torch's nor of the graphs.

    also_skipped: prefixes of further file names to pass over.
    """
    skipped = (*_INTERNAL, *also_skipped)
    frame: FrameType | None = sys._getframe(1)
    found = frame
    while frame is not None:
        if not frame.f_code.co_filename.startswith(skipped) and Path(frame.f_code.co_filename).name != "contextlib.py":
            found = frame
            break
        frame = frame.f_back
    assert found is not None
    return f"{found.f_code.co_filename}:{found.f_lineno} (in {found.f_code.co_name})"
