"""One clock for the recordings of all ranks, by Lamport's rule: a message arrives at least one moment after it left.

So ranks that work at the same time share a moment, a rank that has to wait comes later, and the picture does not depend
on how busy the machine was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from labkit.comm.motion import Moment, Motion, Move


@dataclass(frozen=True, slots=True)
class Arrow:
    """One message, on the common clock."""

    source: int
    """Rank that sent it."""
    target: int
    """Rank that received it."""
    start: int
    """Moment from which it left."""
    end: int
    """First moment at which the target says what it made of it."""
    leaves: tuple[str, ...]
    """Slots of the source."""
    arrives: tuple[str, ...]
    """Slots of the target."""
    operation: str
    bytes: int


@dataclass
class Movement:
    """What all ranks hold at each moment, and every message."""

    states: list[dict[int, Moment]]
    """By rank: moment on the common clock -> what the rank then begins to hold."""
    arrows: list[Arrow]

    @property
    def length(self) -> int:
        """Number of moments."""
        return 1 + max(time for state in self.states for time in state)

    def held(self, rank: int, time: int) -> Moment | None:
        """Return what a rank holds at a moment; None before its first."""
        known = [moment for moment in self.states[rank] if moment <= time]
        return self.states[rank][max(known)] if known else None


_UnderWay = dict[tuple[int, int, str, str], deque[tuple[Move, int]]]
"""(source, target, operation, group) -> messages as sent, with the moment from which they left, in their order."""


@dataclass
class _Rank:
    """One rank while its entries are put on the common clock."""

    left: deque[Moment | Move]
    now: int = 0
    """Moment that it has reached."""
    last: int = -1
    """Moment at which it last said what it holds."""
    state: dict[int, Moment] = field(default_factory=dict)
    arriving: list[tuple[Move, int, Move]] = field(default_factory=list)
    """(as sent, moment from which it left, as received) of messages since then."""


def movement(motions: Sequence[Motion]) -> Movement:
    """Put the recordings of ranks 0, 1, ... on one clock.

    Raises ValueError without a moment, and for a message whose other side was not recorded.
    """
    ranks = [_Rank(deque(motion.entries)) for motion in motions]
    under_way: _UnderWay = {}
    arrows: list[Arrow] = []
    moved = True
    while moved:
        moved = False
        for number, rank in enumerate(ranks):
            while rank.left and _can_go_on(rank.left[0], number, under_way):
                _take(rank.left.popleft(), number, rank, under_way, arrows)
                moved = True
    for number, rank in enumerate(ranks):
        if rank.left or any(key[0] == number and queue for key, queue in under_way.items()):
            raise ValueError(
                f"a message of rank {number} has no other side: record every rank around the same calls, and give all "
                "recordings in the order of ranks"
            )
    if not any(rank.state for rank in ranks):
        raise ValueError("no rank said what it holds: call holds(...) of the recording before the first message")
    return Movement([rank.state for rank in ranks], arrows)


def _can_go_on(entry: Moment | Move, rank: int, under_way: _UnderWay) -> bool:
    if isinstance(entry, Moment) or entry.is_sent:
        return True
    return bool(under_way.get((entry.peer, rank, entry.operation, entry.group)))


def _take(entry: Moment | Move, number: int, rank: _Rank, under_way: _UnderWay, arrows: list[Arrow]) -> None:
    """Put one entry of a rank on the clock."""
    if isinstance(entry, Moment):
        rank.now = rank.last = max(rank.now, rank.last + 1)
        rank.state[rank.now] = entry
        arrows += [_arrow(number, rank.now, *each) for each in rank.arriving]
        rank.arriving.clear()
    elif entry.is_sent:
        key = (number, entry.peer, entry.operation, entry.group)
        under_way.setdefault(key, deque()).append((entry, rank.now))
    else:
        sent, left_at = under_way[entry.peer, number, entry.operation, entry.group].popleft()
        rank.now = max(rank.now, left_at + 1)
        rank.arriving.append((sent, left_at, entry))


def _arrow(target: int, end: int, sent: Move, start: int, received: Move) -> Arrow:
    return Arrow(
        source=received.peer, target=target, start=start, end=end, leaves=sent.slots,
        arrives=received.slots or sent.slots, operation=sent.operation, bytes=sent.bytes,
    )  # fmt: skip
