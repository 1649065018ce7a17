"""Send and receive between pipeline neighbours: Megatron's nine functions over an explicit communicator.

All of them are one `exchange` with up to four messages: to and from the previous stage, to and from the next.

    function                        to next  to previous  from previous  from next
    recv_forward                                               x
    recv_backward                                                            x
    send_forward                       x
    send_backward                                x
    send_forward_recv_backward         x                                     x
    send_backward_recv_forward                   x             x
    send_forward_recv_forward          x                       x
    send_backward_recv_backward                  x                           x
    send_forward_backward_...          x         x             x             x

Notable:
- **Batched** issues the messages as one batch. Messages carry no name: between two ranks the first send meets the first
  receive. With two stages both neighbours are the same rank, so what is sent to the previous stage must meet a receive
  from the *next*, and the batch is posted as send-previous, receive-next, send-next, receive-previous. Posted in
  Megatron's order (each send beside the receive from the same side) both would cross (Megatron-LM pull request 5271).
- **Even/odd** issues them one by one: even ranks send first, odd ranks receive first, so no two neighbours ever both
  wait to send. With two stages what odd ranks send goes over a second communicator, so that the directions can overlap.
- **Variable lengths**: three integers (the shape) go ahead of every tensor.
- The transfers themselves are `collectives.isend/irecv/batch`: ledger, Events and status slot see each.

Legend: S = sequence, B = microbatch, H = hidden; tensors between stages are (S, B, H).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from labkit.parallel.collectives import Message, Pending, batch, irecv, isend
from labkit.parallel.groups import Group, ParallelGroups, further_communicator

Shape = Sequence[int]
_Started = dict[tuple[str, str], Pending]
"""(`send`, `recv` or `sizes`; `prev` or `next`) -> the transfer."""
_Tensors = dict[str, Tensor | None]
"""`prev` and `next` -> what to send there, or to receive into."""


@dataclass(frozen=True, eq=False)
class P2PCommunicator:
    """How this rank talks to its pipeline neighbours. Make one with `p2p_communicator`."""

    groups: ParallelGroups
    """Place of this rank."""
    second: Group
    """A second communicator over the ranks of `groups.pp`; `groups.pp` itself where there is one stage."""
    batch_p2p_comm: bool = True
    """One batch per exchange (True), or one by one in even/odd order."""
    variable_seq_lengths: bool = False
    """Send the shape ahead of every tensor."""

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the first stage of an uninterleaved pipeline."""
        return self.groups.pp.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage of an uninterleaved pipeline."""
        return self.groups.pp.rank == self.groups.pp.size - 1


def p2p_communicator(
    groups: ParallelGroups,
    *,
    batch_p2p_comm: bool = True,
    variable_seq_lengths: bool = False,
    use_ring_exchange_p2p: bool = False,
) -> P2PCommunicator:
    """The communicator of this rank; every rank of the layout calls this, the first time, at the same point.

    Raises ValueError for `use_ring_exchange_p2p`.
    """
    if use_ring_exchange_p2p:
        raise ValueError(
            "use_ring_exchange_p2p: torch.distributed has no ring_exchange (it needs a patched build of torch); leave "
            "it False, batch_p2p_comm=True makes the same four transfers in one batch"
        )
    return P2PCommunicator(groups, second_communicator(groups), batch_p2p_comm, variable_seq_lengths)


_second: WeakKeyDictionary[ParallelGroups, Group] = WeakKeyDictionary()


def second_communicator(groups: ParallelGroups) -> Group:
    """A second process group over the pipeline's ranks, made on the first call and kept as long as `groups` lives."""
    if groups.pp.size == 1:
        return groups.pp
    if groups not in _second:
        _second[groups] = further_communicator(groups, groups.pp, "pp second")
    return _second[groups]


class Arrival:
    """A tensor on its way. `wait()` returns it, as a leaf that collects a gradient where its type has one."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def wait(self) -> Tensor:
        """Block until it is here."""
        tensor = self._pending.wait()
        return tensor.requires_grad_() if tensor.is_floating_point() else tensor


@dataclass
class Exchange:
    """Transfers under way; each field is None where nothing was asked for."""

    from_prev: Arrival | None
    from_next: Arrival | None
    sends: list[Pending]

    def wait(self) -> tuple[Tensor | None, Tensor | None]:
        """Complete everything; returns (from previous, from next)."""
        for pending in self.sends:
            pending.wait()
        return _wait(self.from_prev), _wait(self.from_next)


def _wait(arrival: Arrival | None) -> Tensor | None:
    return arrival.wait() if arrival else None


def exchange(
    p2p: P2PCommunicator,
    *,
    send_prev: Tensor | None = None,
    send_next: Tensor | None = None,
    recv_prev: Shape | None = None,
    recv_next: Shape | None = None,
    dtype: torch.dtype = torch.float32,
) -> Exchange:
    """Start up to four transfers; a receive is asked for by its shape (with variable lengths () will do).

    The neighbour must ask for the counterparts in the same call: nothing is matched by name.
    """
    shapes: dict[str, Shape | None] = {"prev": recv_prev, "next": recv_next}
    # detach: the sender may shrink its tensor (deallocation.py) while the transfer still reads the storage.
    sends = {side: None if x is None else x.detach() for side, x in (("prev", send_prev), ("next", send_next))}
    started: _Started = {}
    if p2p.variable_seq_lengths:
        shapes, sends = _exchange_shapes(p2p, sends, shapes, started)
    device = p2p.groups.device
    buffers = {
        side: None if shape is None else torch.empty(tuple(shape), dtype=dtype, device=device)
        for side, shape in shapes.items()
    }
    started |= _post(p2p, sends, buffers)
    arrivals = {
        side: Arrival(started["recv", side]) if ("recv", side) in started else None for side in ("prev", "next")
    }
    pending = [work for (operation, _), work in started.items() if operation != "recv"]
    return Exchange(arrivals["prev"], arrivals["next"], pending)


def _exchange_shapes(
    p2p: P2PCommunicator, sends: _Tensors, wanted: dict[str, Shape | None], started: _Started
) -> tuple[dict[str, Shape | None], _Tensors]:
    """Three integers each way, over the same communicators and in the same order as the tensors that follow.

    Returns the shapes to receive and the tensors still to send. Where sends do not block, the tensors leave together
    with their sizes, before anything is waited for: a neighbour that only receives needs the tensor to go on, and this
    rank may be waiting for what that neighbour computes from it (Megatron-LM issue 5100). NCCL runs a communicator's
    operations in order, so there the tensors have to follow in a second exchange.
    """
    device = p2p.groups.device
    for tensor in sends.values():
        if tensor is not None and tensor.dim() != 3:
            raise ValueError(
                f"variable lengths send three sizes (S, B, H); this tensor has shape {tuple(tensor.shape)}"
            )
    sizes = {
        k: None if x is None else torch.tensor(x.shape, dtype=torch.int64, device=device) for k, x in sends.items()
    }
    room = {k: None if x is None else torch.empty(3, dtype=torch.int64, device=device) for k, x in wanted.items()}
    works = _post(p2p, sizes, room)
    if p2p.groups.backend != "nccl":
        started |= _post(p2p, sends, {"prev": None, "next": None})
        started |= {("sizes", side): work for (operation, side), work in works.items() if operation == "send"}
        sends = {"prev": None, "next": None}
    else:
        for (operation, _), work in works.items():
            if operation == "send":
                work.wait()
    for (operation, _), work in works.items():
        if operation == "recv":
            work.wait()
    return {side: None if x is None else x.tolist() for side, x in room.items()}, sends


_BATCHED = (("send", "prev"), ("recv", "next"), ("send", "next"), ("recv", "prev"))
_EVEN = (("send", "next"), ("recv", "prev"), ("send", "prev"), ("recv", "next"))
_ODD = (("recv", "prev"), ("send", "next"), ("recv", "next"), ("send", "prev"))


def _post(p2p: P2PCommunicator, sends: _Tensors, buffers: _Tensors) -> _Started:
    """Start the transfers that have a tensor, in the order that this mode needs."""
    pp, odd = p2p.groups.pp, p2p.groups.pp.rank % 2 == 1
    peers = {"prev": p2p.groups.prev_rank, "next": p2p.groups.next_rank}
    order = _BATCHED if p2p.batch_p2p_comm else (_ODD if odd else _EVEN)
    due = [(op, side) for op, side in order if (sends if op == "send" else buffers)[side] is not None]
    tensors = {(op, side): (sends if op == "send" else buffers)[side] for op, side in due}
    if p2p.batch_p2p_comm:
        works = batch([Message(op, _some(tensors[op, side]), pp, peers[side]) for op, side in due])
        return dict(zip(due, works, strict=True))
    started: _Started = {}
    for op, side in due:
        from_odd = odd == (op == "send")
        group = p2p.second if from_odd and pp.size == 2 else pp
        started[op, side] = (isend if op == "send" else irecv)(_some(tensors[op, side]), group, peers[side])
    return started


def _some(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


# ---- the nine ----
# `tensor_shape` and `dtype` describe what is received. At the ends of the pipeline, where there is no neighbour, a
# receive returns None and a send does nothing, as in Megatron; with model chunks the ring has no ends, and the flags
# say whether this chunk is the first or last stage.


def recv_forward(
    p2p: P2PCommunicator, tensor_shape: Shape, dtype: torch.dtype, *, is_first_stage: bool | None = None
) -> Tensor | None:
    """The activation of the previous stage; None on the first."""
    if _flag(is_first_stage, p2p.is_first):
        return None
    return exchange(p2p, recv_prev=tensor_shape, dtype=dtype).wait()[0]


def recv_backward(
    p2p: P2PCommunicator, tensor_shape: Shape, dtype: torch.dtype, *, is_last_stage: bool | None = None
) -> Tensor | None:
    """The gradient of what was sent to the next stage; None on the last."""
    if _flag(is_last_stage, p2p.is_last):
        return None
    return exchange(p2p, recv_next=tensor_shape, dtype=dtype).wait()[1]


def send_forward(p2p: P2PCommunicator, output_tensor: Tensor, *, is_last_stage: bool | None = None) -> None:
    """Send the activation to the next stage."""
    if not _flag(is_last_stage, p2p.is_last):
        exchange(p2p, send_next=output_tensor).wait()


def send_backward(
    p2p: P2PCommunicator, input_tensor_grad: Tensor | None, *, is_first_stage: bool | None = None
) -> None:
    """Send the gradient of what came from the previous stage (None on the first, which has none) back to it."""
    if not _flag(is_first_stage, p2p.is_first):
        exchange(p2p, send_prev=_required(input_tensor_grad)).wait()


def send_forward_recv_backward(
    p2p: P2PCommunicator,
    output_tensor: Tensor,
    tensor_shape: Shape,
    dtype: torch.dtype,
    *,
    is_last_stage: bool | None = None,
) -> Tensor | None:
    """Send an activation on, receive the gradient of an earlier one."""
    if _flag(is_last_stage, p2p.is_last):
        return None
    return exchange(p2p, send_next=output_tensor, recv_next=tensor_shape, dtype=dtype).wait()[1]


def send_backward_recv_forward(
    p2p: P2PCommunicator,
    input_tensor_grad: Tensor | None,
    tensor_shape: Shape,
    dtype: torch.dtype,
    *,
    is_first_stage: bool | None = None,
) -> Tensor | None:
    """Send a gradient back, receive the next activation."""
    if _flag(is_first_stage, p2p.is_first):
        return None
    return exchange(p2p, send_prev=_required(input_tensor_grad), recv_prev=tensor_shape, dtype=dtype).wait()[0]


def send_forward_recv_forward(
    p2p: P2PCommunicator,
    output_tensor: Tensor | None,
    *,
    recv_prev: bool,
    tensor_shape: Shape,
    dtype: torch.dtype,
    overlap_p2p_comm: bool = False,
) -> Any:
    """Send an activation on and receive another. With `overlap_p2p_comm` returns the `Exchange` under way."""
    shape = tensor_shape if recv_prev else None
    under_way = _start(p2p, overlap_p2p_comm, send_next=output_tensor, recv_prev=shape, dtype=dtype)
    return under_way if overlap_p2p_comm else under_way.wait()[0]


def send_backward_recv_backward(
    p2p: P2PCommunicator,
    input_tensor_grad: Tensor | None,
    *,
    recv_next: bool,
    tensor_shape: Shape,
    dtype: torch.dtype,
    overlap_p2p_comm: bool = False,
) -> Any:
    """Send a gradient back and receive another. With `overlap_p2p_comm` returns the `Exchange` under way."""
    shape = tensor_shape if recv_next else None
    under_way = _start(p2p, overlap_p2p_comm, send_prev=input_tensor_grad, recv_next=shape, dtype=dtype)
    return under_way if overlap_p2p_comm else under_way.wait()[1]


def send_forward_backward_recv_forward_backward(
    p2p: P2PCommunicator,
    output_tensor: Tensor | None,
    input_tensor_grad: Tensor | None,
    *,
    recv_prev: bool,
    recv_next: bool,
    tensor_shape: Shape,
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None]:
    """All four at once; returns (activation from the previous stage, gradient from the next)."""
    return exchange(
        p2p,
        send_next=output_tensor,
        send_prev=input_tensor_grad,
        recv_prev=tensor_shape if recv_prev else None,
        recv_next=tensor_shape if recv_next else None,
        dtype=dtype,
    ).wait()


def _start(p2p: P2PCommunicator, overlap: bool, **messages: Any) -> Exchange:
    if overlap and p2p.batch_p2p_comm:
        raise ValueError(
            "overlap_p2p_comm needs transfers that can be waited for one by one: set batch_p2p_comm to False, or leave "
            "overlap_p2p_comm off"
        )
    return exchange(p2p, **messages)


def _required(gradient: Tensor | None) -> Tensor:
    if gradient is None:
        raise ValueError(
            "there is no gradient to send, and the previous stage would wait for it for ever: the backward has to "
            "reach the tensor that recv_forward returned (is it detached, or not used?)"
        )
    return gradient


def _flag(given: bool | None, default: bool) -> bool:
    return default if given is None else given
