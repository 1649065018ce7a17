"""Gradients, hooks, random states and counters: put aside during warm-up and capture, and restored afterwards.

A run with graphs must equal a run without to the bit, so warm-up and capture must leave no trace in training. Both run
backwards, which fill `.grad` and call the hooks of parameters. At a replay autograd itself does that, so warm-up and
capture must not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.capturing import BrokenProcessError, GraphCaptureError, is_graph_capturing
from labkit.fp8.scaling import Float8Scaling
from labkit.parallel.parameters.parameter_record import ParameterRecord, record_of
from labkit.parallel.random import RngTracker, forks_noted


class Arrivals:
    """The parameters that a backward reached, in order.

    Some get no gradient from autograd, because the layer adds to `main_grad` itself or puts its weight gradient off."""

    def __init__(self) -> None:
        self._seen: dict[int, nn.Parameter] = {}
        self.without_gradient: dict[int, nn.Parameter] = {}
        """Parameters without a gradient from autograd in any backward; by id."""

    def note(self, parameter: Any) -> None:
        """A hook for autograd: the gradient of `parameter`, or a part of it, has arrived."""
        self._seen.setdefault(id(parameter), parameter)
        if parameter.grad is None:
            self.without_gradient[id(parameter)] = parameter

    def taken(self) -> list[nn.Parameter]:
        """The parameters noted since the last call."""
        found = list(self._seen.values())
        self._seen.clear()
        return found


@contextmanager
def parameters_put_aside(parameters: Sequence[nn.Parameter], arrivals: Arrivals) -> Iterator[None]:
    """Inside the block a backward fills empty `.grad`s, tells `arrivals`, and calls no other hook.

    Now and in all later steps a backward adds the first gradient to `main_grad` and does not replace it. The flag of a
    first gradient is Python, which a capture would freeze. So wrappers set these buffers to zero at the start of each
    step (`ParameterRecord.added_elsewhere`); 0 + g is g.
    """
    kept: list[tuple[nn.Parameter, Tensor | None, Any]] = []
    flags: list[tuple[ParameterRecord, bool, bool]] = []
    hooks: list[tuple[dict[int, Callable[..., Any]], dict[int, Callable[..., Any]]]] = []
    own: list[Any] = []
    try:
        for parameter in parameters:
            held: Any = parameter
            record = record_of(parameter)
            kept.append((parameter, parameter.grad, record.on_gradient))
            parameter.grad = None
            for of_kind in (held._backward_hooks, held._post_accumulate_grad_hooks):
                if of_kind:  # in place: autograd holds the same dictionary
                    hooks.append((of_kind, dict(of_kind)))
                    of_kind.clear()
            own.append(parameter.register_post_accumulate_grad_hook(arrivals.note))
            if hasattr(parameter, "main_grad"):
                record.on_gradient = arrivals.note
                flags.append((record, record.has_gradient, record.added_elsewhere))
                record.has_gradient = record.added_elsewhere = True
        yield
    except BaseException:  # no captured graph will add
        for record, has_gradient, added_elsewhere in flags:
            record.has_gradient, record.added_elsewhere = has_gradient, added_elsewhere
        raise
    finally:
        for handle in own:
            handle.remove()
        for of_kind, before in hooks:
            of_kind.update(before)
        for parameter, grad, on_gradient in kept:
            parameter.grad, record_of(parameter).on_gradient = grad, on_gradient


@contextmanager
def grads_emptied(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Empty `.grad` of all `tensors` before and after the block."""
    for tensor in tensors:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor in tensors:
            tensor.grad = None


def rng_trackers_of(functions: Sequence[Callable[..., Any]]) -> list[RngTracker]:
    """The named random states that these modules hold, at any depth, each once."""
    found: dict[int, RngTracker] = {}
    for function in functions:
        for module in function.modules() if isinstance(function, nn.Module) else ():
            found |= {id(value): value for value in vars(module).values() if isinstance(value, RngTracker)}
    return list(found.values())


@contextmanager
def random_states_kept(device_type: str, trackers: list[RngTracker]) -> Iterator[None]:
    """Restore torch's generator and the named states after the block, except in a broken process.

    trackers: the known trackers. A tracker that code in the block draws from for the first time, in the warm-up, is
    added to this list. A backend that holds the list then tells its graphs of the tracker.

    Raises:
        GraphCaptureError: on a GPU a capture draws from an unknown tracker, whose state cannot be read then.
    """
    on_cuda = device_type == "cuda"
    before = torch.cuda.get_rng_state() if on_cuda else torch.get_rng_state()
    named = [tracker.get_states() for tracker in trackers]

    def note(tracker: RngTracker) -> None:
        if any(tracker is one for one in trackers):
            return
        if tracker.generators and is_graph_capturing():
            raise GraphCaptureError(
                "captured code draws from an RngTracker that no warm-up has drawn from: pass it in rng_trackers=, or "
                "set num_warmup to 1 or more"
            )
        named.append(tracker.get_states())
        trackers.append(tracker)

    def put_back() -> None:
        if on_cuda:
            torch.cuda.set_rng_state(before)
        else:
            torch.set_rng_state(before)
        for tracker, states in zip(trackers, named, strict=True):
            tracker.set_states(states)

    try:
        with forks_noted(note):
            yield
    except BrokenProcessError:
        raise  # setting a state may fail too, and would hide the reason
    except BaseException:
        put_back()
        raise
    put_back()


# ---- counters ----


@contextmanager
def counters_kept(chunks: Sequence[Any]) -> Iterator[None]:
    """Restore all counters of the model chunks after the block."""
    before = [(tensor, tensor.clone()) for chunk in chunks for tensor in counters(chunk)]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)


def counters(chunk: Any) -> Iterator[Tensor]:
    """Buffers, the `statistics.totals` of routers, and the magnitudes from which fp8 scales are made."""
    for module in chunk.modules():
        yield from nn.Module.buffers(module, recurse=False)  # a wrapper has `buffers` of gradients
        totals = getattr(getattr(module, "statistics", None), "totals", None)
        if isinstance(totals, Tensor):
            yield totals
    scaling = getattr(chunk, "precision", None)
    if isinstance(scaling, Float8Scaling):
        yield from scaling.state
