"""The order in which a rank posts its sends and receives. Imports no torch, because schedules are lowered without it.

A message travels forward (`F`, an activation to the next stage) or backward (`B`, a gradient to the previous stage).
Messages carry no name, so between two ranks the first send meets the first receive. Two orders keep them apart.

**Batched.** All messages start as one batch, gradients before activations. With two stages both neighbours are the same
rank, so its two sends must meet the right two receives: both ranks begin with the gradients. In Megatron's order, where
each send is next to the receive from the same side, both messages would cross (Megatron-LM pull request 5271).

**Even/odd.** Messages start one by one. Even ranks send first and odd ranks receive first, so no two neighbours ever
both wait to send:

    even rank   send F   recv F   send B   recv B
    odd rank    recv F   send F   recv B   send B
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

Operation = Literal["send", "recv"]
Way = tuple[str, str]
"""(`send` or `recv`, `F` or `B`)."""

BATCHED: tuple[Way, ...] = (("send", "B"), ("recv", "B"), ("send", "F"), ("recv", "F"))
_EVEN: dict[Way, int] = {("send", "F"): 0, ("recv", "F"): 1, ("send", "B"): 2, ("recv", "B"): 3}


def even_odd_place(operation: str, kind: str, rank: int) -> int:
    """Return a message's place, from 0, among the four that `rank` may exchange; odd ranks swap each pair's members."""
    return _EVEN[operation, kind] ^ (rank % 2)


def in_posting_order(ways: Iterable[Way], rank: int, *, batched: bool) -> list[Way]:
    """Sort `ways` as `rank` posts them: gradients first in a batch, else even ranks send first."""
    place = BATCHED.index if batched else lambda way: even_odd_place(way[0], way[1], rank)
    return sorted(ways, key=place)


def channel(source: int, target: int) -> Literal[0, 1]:
    """Return a message's communicator, first or second, if each direction between two ranks has one of its own.

    NCCL runs the messages of one communicator between two ranks in order of issue, so a send and a receive that both
    sides post in different orders would block each other (pytorch issue 127332). One direction has only one order.
    """
    return 1 if source > target else 0
