"""Megatron's nine functions for a stage and its neighbours, and the exchange that they are made of.

Each makes up to four messages: an activation (`F`) and a gradient (`B`), to send and to receive.

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

Legend: S = sequence, B = microbatch, H = hidden; tensors between stages are (S, B, H).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.comm.p2p import MessageSpec, P2PCommunicator, P2POp, P2PWork, Shape, start
from labkit.comm.posting_order import channel, in_posting_order
from labkit.events import timed

# ---- an exchange with both neighbours ----


@dataclass
class Exchange:
    """Up to four messages under way, each with its (operation, kind)."""

    works: list[tuple[tuple[str, str], P2PWork]]

    def wait(self) -> tuple[Tensor | None, Tensor | None]:
        """Complete everything, and return (activation from the previous stage, gradient from the next)."""
        came = {way: work.wait() for way, work in self.works}
        activation, gradient = came.get(("recv", "F")), came.get(("recv", "B"))
        return activation[0] if activation else None, gradient[0] if gradient else None


def exchange(
    p2p: P2PCommunicator,
    *,
    send_prev: Tensor | None = None,
    send_next: Tensor | None = None,
    recv_prev: Shape | None = None,
    recv_next: Shape | None = None,
    dtype: torch.dtype = torch.float32,
) -> Exchange:
    """Start up to four transfers. The shape asks for a receive; with variable lengths () is enough.

    The neighbour must ask for the counterparts in the same call, because messages have no names on the wire.
    """
    pp = p2p.groups.pp
    before, after = (pp.rank - 1) % pp.size, (pp.rank + 1) % pp.size
    one_way = p2p.variable_seq_lengths or (not p2p.batch_p2p_comm and pp.size == 2)
    ops: dict[tuple[str, str], P2POp] = {}
    for kind, tensor, peer in (("F", send_next, after), ("B", send_prev, before)):
        if tensor is not None:
            ops["send", kind] = P2POp("send", peer, channel(pp.rank, peer) if one_way else 0, (tensor,))
    for kind, shape, peer in (("F", recv_prev, before), ("B", recv_next, after)):
        if shape is not None:
            spec = MessageSpec((tuple(shape),), dtype)
            ops["recv", kind] = P2POp("recv", peer, channel(peer, pp.rank) if one_way else 0, spec=spec)
    ways = in_posting_order(ops, pp.rank, batched=p2p.batch_p2p_comm)
    return Exchange(list(zip(ways, start(p2p, [ops[way] for way in ways]), strict=True)))


# ---- the nine ----
# `tensor_shape` and `dtype` describe the received tensor. At the ends of the pipeline a receive returns None and a send
# does nothing, as in Megatron. With several model chunks the ranks form a ring without ends, and the flags say that
# this chunk is the first or last stage. `timers` has Megatron's interface, as `labkit.train.Timers` does. A timer stops
# when the transfers are complete, or under `overlap_p2p_comm` when they have started.


def recv_forward(
    p2p: P2PCommunicator,
    tensor_shape: Shape,
    dtype: torch.dtype,
    *,
    is_first_stage: bool | None = None,
    timers: Any = None,
) -> Tensor | None:
    """Receive the activation of the previous stage; None on the first stage."""
    if _flag(is_first_stage, p2p.is_first):
        return None
    with timed(timers, "forward-recv"):
        return exchange(p2p, recv_prev=tensor_shape, dtype=dtype).wait()[0]


def recv_backward(
    p2p: P2PCommunicator,
    tensor_shape: Shape,
    dtype: torch.dtype,
    *,
    is_last_stage: bool | None = None,
    timers: Any = None,
) -> Tensor | None:
    """Receive the gradient of the activation that the next stage got; None on the last stage."""
    if _flag(is_last_stage, p2p.is_last):
        return None
    with timed(timers, "backward-recv"):
        return exchange(p2p, recv_next=tensor_shape, dtype=dtype).wait()[1]


def send_forward(
    p2p: P2PCommunicator, output_tensor: Tensor, *, is_last_stage: bool | None = None, timers: Any = None
) -> None:
    """Send the activation to the next stage."""
    if not _flag(is_last_stage, p2p.is_last):
        with timed(timers, "forward-send"):
            exchange(p2p, send_next=output_tensor).wait()


def send_backward(
    p2p: P2PCommunicator,
    input_tensor_grad: Tensor | None,
    *,
    is_first_stage: bool | None = None,
    timers: Any = None,
) -> None:
    """Send the gradient of the received activation back to the previous stage. The first stage gives None."""
    if not _flag(is_first_stage, p2p.is_first):
        with timed(timers, "backward-send"):
            exchange(p2p, send_prev=_required(input_tensor_grad)).wait()


def send_forward_recv_backward(
    p2p: P2PCommunicator,
    output_tensor: Tensor,
    tensor_shape: Shape,
    dtype: torch.dtype,
    *,
    is_last_stage: bool | None = None,
    timers: Any = None,
) -> Tensor | None:
    """Send an activation on, and receive the gradient of an earlier activation."""
    if _flag(is_last_stage, p2p.is_last):
        return None
    with timed(timers, "forward-send-backward-recv"):
        return exchange(p2p, send_next=output_tensor, recv_next=tensor_shape, dtype=dtype).wait()[1]


def send_backward_recv_forward(
    p2p: P2PCommunicator,
    input_tensor_grad: Tensor | None,
    tensor_shape: Shape,
    dtype: torch.dtype,
    *,
    is_first_stage: bool | None = None,
    timers: Any = None,
) -> Tensor | None:
    """Send a gradient back, and receive the next activation."""
    if _flag(is_first_stage, p2p.is_first):
        return None
    with timed(timers, "backward-send-forward-recv"):
        return exchange(p2p, send_prev=_required(input_tensor_grad), recv_prev=tensor_shape, dtype=dtype).wait()[0]


def send_forward_recv_forward(
    p2p: P2PCommunicator,
    output_tensor: Tensor | None,
    *,
    recv_prev: bool,
    tensor_shape: Shape,
    dtype: torch.dtype,
    overlap_p2p_comm: bool = False,
    timers: Any = None,
) -> Any:
    """Send an activation on and receive another. With `overlap_p2p_comm` returns the `Exchange` under way."""
    _check_overlap(p2p, overlap_p2p_comm)
    shape = tensor_shape if recv_prev else None
    with timed(timers, "forward-send-forward-recv"):
        under_way = exchange(p2p, send_next=output_tensor, recv_prev=shape, dtype=dtype)
        return under_way if overlap_p2p_comm else under_way.wait()[0]


def send_backward_recv_backward(
    p2p: P2PCommunicator,
    input_tensor_grad: Tensor | None,
    *,
    recv_next: bool,
    tensor_shape: Shape,
    dtype: torch.dtype,
    overlap_p2p_comm: bool = False,
    timers: Any = None,
) -> Any:
    """Send a gradient back and receive another. With `overlap_p2p_comm` returns the `Exchange` under way."""
    _check_overlap(p2p, overlap_p2p_comm)
    shape = tensor_shape if recv_next else None
    with timed(timers, "backward-send-backward-recv"):
        under_way = exchange(p2p, send_prev=input_tensor_grad, recv_next=shape, dtype=dtype)
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
    timers: Any = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Make all four transfers at once, and return (activation of the previous stage, gradient of the next)."""
    with timed(timers, "forward-backward-send-forward-backward-recv"):
        return exchange(
            p2p,
            send_next=output_tensor,
            send_prev=input_tensor_grad,
            recv_prev=tensor_shape if recv_prev else None,
            recv_next=tensor_shape if recv_next else None,
            dtype=dtype,
        ).wait()


def _check_overlap(p2p: P2PCommunicator, overlap: bool) -> None:
    if overlap and p2p.batch_p2p_comm:
        rule = "overlap_p2p_comm needs transfers that complete one by one"
        raise ValueError(f"{rule}: set batch_p2p_comm to False, or leave overlap_p2p_comm off")


def _required(gradient: Tensor | None) -> Tensor:
    if gradient is None:
        raise ValueError(
            "there is no gradient to send, and the previous stage would hang waiting for it: the backward has to "
            "reach the tensor that recv_forward returned (is it detached, or not used?)"
        )
    return gradient


def _flag(given: bool | None, default: bool) -> bool:
    return default if given is None else given
