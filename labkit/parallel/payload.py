"""What one message between two pipeline stages carries: a few tensors, nearly always one.

An encoder-decoder's decoder stages send two, the decoder's hidden states and the encoder's output, which every later
stage attends to. All tensors of a message go one after the other over the same channel.

With variable lengths three integers per tensor go ahead, as one message, and the receiver makes its buffers from them.

Legend: S = sequence, B = microbatch, H = hidden; a tensor between stages is (S, B, H).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from labkit.events import start_observers
from labkit.parallel.collectives import Pending, comm_scope, irecv, isend
from labkit.parallel.lanes import Lane

Name = TypeVar("Name", bound=Hashable)
"""What a message is called; prints as what the ledger should call it."""
Payload = tuple[Tensor, ...]
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Format(Generic[Name]):
    """What messages look like; both sides must mean the same."""

    shapes: Callable[[Name], Shapes]
    """Shape of each tensor of a message. With variable lengths only how many there are counts."""
    phase: Callable[[Name], str]
    """`forward` or `backward`, for the ledger."""
    dtype: torch.dtype
    """Of every tensor."""
    device: torch.device
    """Where received tensors go."""
    variable_lengths: bool = False
    """Sizes go ahead of each message."""
    only_shape: tuple[int, ...] | None = None
    """The shape, if every message is one tensor of the same fixed shape, as nearly always."""

    def check(self, name: Name, payload: Payload, source: int, target: int) -> None:
        """Raise ValueError, naming both ranks and both shapes, if `payload` is not what `target` will expect."""
        expected = self.shapes(name)
        given = tuple(tuple(tensor.shape) for tensor in payload)
        if len(given) != len(expected):
            raise ValueError(
                f"rank {source} of the pipeline sends {name} as {len(given)} tensors {_listed(given)}, rank {target} "
                f"expects {len(expected)}: set tensor_shape to the shapes that this stage returns"
            )
        if not self.variable_lengths and given != expected:
            raise ValueError(
                f"{name} has shape {_listed(given)} on rank {source} of the pipeline, rank {target} expects "
                f"{_listed(expected)}: set tensor_shape to what the stages return, or let lengths vary"
            )
        if self.variable_lengths and any(len(shape) != 3 for shape in given):
            raise ValueError(f"{name} has shape {_listed(given)}; varying lengths send three sizes (S, B, H) a tensor")
        for tensor in payload:
            if tensor.dtype != self.dtype:
                raise ValueError(f"{name} is {tensor.dtype}, but the pipeline's dtype is {self.dtype}: set dtype")

    def buffers(self, shapes: Shapes) -> list[Tensor]:
        """Empty tensors to receive into."""
        return [torch.empty(shape, dtype=self.dtype, device=self.device) for shape in shapes]


def _listed(shapes: Shapes) -> str:
    return str(shapes[0]) if len(shapes) == 1 else ", ".join(map(str, shapes))


def _scope(name: Name, form: Format[Name]) -> AbstractContextManager[Any]:
    """What a ledger or a hook is told; nothing where there is none."""
    return comm_scope(layer=str(name), phase=form.phase(name)) if start_observers else nullcontext()


def start_send(name: Name, payload: Payload, form: Format[Name], lane: Lane) -> list[Pending]:
    """Start sending, sizes first where lengths vary. The storages must stay as they are until all is complete; the
    tensors themselves may be shrunk."""
    if len(payload) != 1 or payload[0].shape != form.only_shape or payload[0].dtype != form.dtype:
        form.check(name, payload, lane.group.rank, lane.position)
    elif lane.is_plain and payload[0].is_cpu and not start_observers:
        return [lane.send(payload[0].detach())]
    with _scope(name, form):
        pending = []
        if form.variable_lengths:
            sizes = torch.tensor([tensor.shape for tensor in payload], dtype=torch.int64, device=form.device)
            pending.append(isend(sizes, lane.group, lane.peer))
        return pending + [isend(tensor.detach(), lane.group, lane.peer) for tensor in payload]


def start_receive(name: Name, form: Format[Name], lane: Lane) -> list[Pending]:
    """Start receiving. Where lengths vary this waits for the sizes."""
    if lane.is_plain and not start_observers:
        return [lane.receive()]
    with _scope(name, form):
        shapes = form.shapes(name)
        if form.variable_lengths:
            sizes = torch.empty(len(shapes), 3, dtype=torch.int64, device=form.device)
            shapes = tuple(tuple(row) for row in irecv(sizes, lane.group, lane.peer).wait().tolist())
        return [irecv(buffer, lane.group, lane.peer) for buffer in form.buffers(shapes)]


def arrived(pending: list[Pending]) -> Payload:
    """Wait for a message; its tensors are leaves that collect a gradient where their type has one."""
    if len(pending) == 1:
        tensor = pending[0].wait()
        return (tensor.requires_grad_() if tensor.is_floating_point() else tensor,)
    tensors = [transfer.wait() for transfer in pending]
    return tuple(x.requires_grad_() if x.is_floating_point() else x for x in tensors)
