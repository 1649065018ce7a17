"""The record of data in motion: what this rank holds, moment by moment, and the messages between two moments.

    with Motion() as motion:
        motion.holds({"chunk 0": Held("0", (0,), chunks[0]), ...}, title="start")
        ring_step(chunks)                                  # any function of labkit that communicates
        motion.holds({"chunk 0": Held("0+3", (0, 3), chunks[0]), ...})
    return motion                                          # `viz.in_motion` draws the records of all ranks

The caller says what a tensor means; which messages were sent, and from where to where, is seen. A message leaves the
slots whose memory it reads, and arrives in the slots that hold its memory at the next moment. A message that is
received into a temporary tensor (to be added to a chunk, for example) arrives in the slots of the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from labkit.comm.groups import Group
from labkit.events import watchers, watchers_of


class Held(NamedTuple):
    """What a rank holds in one slot."""

    text: str
    """What the slot contains, in a few characters: `2F0`, `0+1`."""
    colors: Sequence[int | str] = ()
    """One stripe for each: the number of a rank or chunk, or an activity such as `forward` (labkit/viz/style.py)."""
    tensor: Tensor | None = None
    """The tensor itself, by whose memory messages find the slot. It is not kept after the recording."""
    partial: bool = False
    """True for a part of a sum, which is drawn hatched."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What a rank holds at one moment."""

    slots: dict[str, Held]
    title: str


@dataclass(frozen=True, slots=True)
class Move:
    """One message of this rank, or its share of a collective with one other rank."""

    is_sent: bool
    """True on the rank that sends, False on the one that receives."""
    operation: str
    """`message`, or the name of the collective."""
    group: str
    """Name of the group."""
    peer: int
    """Global rank of the other side."""
    bytes: int
    """Payload in bytes."""
    slots: tuple[str, ...] = ()
    """Slots that it leaves, or in which it arrives; empty if it does so in no slot's memory."""


class Motion:
    """`with Motion() as motion:` records what this rank says that it holds, and every message of this process."""

    def __init__(self) -> None:
        self.entries: list[Moment | Move] = []
        """Moments and moves, in the order of this rank."""
        self._held: dict[str, Held] = {}
        self._arrived: dict[int, Tensor] = {}
        """Entry of a received message -> its tensor, until the next moment tells where it is."""
        self._alive: list[Tensor] = []
        """Every tensor of the recording, so that no later one gets the memory of an earlier one."""

    def __enter__(self) -> Motion:
        watchers.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        watchers.remove(self)
        self._held, self._arrived, self._alive = {}, {}, []

    def holds(self, slots: Mapping[str, Held], title: str = "") -> None:
        """State what this rank holds now; a slot that is not named is empty.

        title: words above this moment in the picture.
        """
        self._held = dict(slots)
        self._alive += [held.tensor for held in slots.values() if held.tensor is not None]
        for entry, tensor in self._arrived.items():
            move = self.entries[entry]
            assert isinstance(move, Move)
            self.entries[entry] = replace(move, slots=self._slots_in(tensor))
        self._arrived.clear()
        self.entries.append(Moment({name: held._replace(tensor=None) for name, held in slots.items()}, title))

    def holds_rows(self, title: str, rows: Tensor, numbers: Sequence[int], each: Held, name: str = "positions") -> None:
        """State that this rank holds these rows now, a slot for each, and nothing else.

        rows: tensor [number of rows, ...]. numbers: the number of each row in the whole tensor; row i of `rows` is in
        the slot `<name> <numbers[i]>`. each: what the slots contain; its tensor is not used.

        Raises ValueError if there are more or fewer numbers than rows.
        """
        slots = {f"{name} {number}": each._replace(tensor=row) for number, row in zip(numbers, rows, strict=True)}
        self.holds(slots, title)

    def sent(self, operation: str, group: Group, peer: int, x: Tensor) -> None:
        """Note that x, or a view of the tensor that was sent, leaves for global rank `peer`."""
        self._alive.append(x)
        self.entries.append(Move(True, operation, group.name, peer, x.nbytes, self._slots_in(x)))

    def received(self, operation: str, group: Group, peer: int, x: Tensor) -> None:
        """Note that x, or a view of the result, came from global rank `peer`."""
        self._alive.append(x)
        self._arrived[len(self.entries)] = x
        self.entries.append(Move(False, operation, group.name, peer, x.nbytes))

    def _slots_in(self, x: Tensor) -> tuple[str, ...]:
        """Return the slots whose memory overlaps that of x."""
        return tuple(name for name, held in self._held.items() if held.tensor is not None and _overlap(held.tensor, x))


def _overlap(one: Tensor, other: Tensor) -> bool:
    (start, end), (others_start, others_end) = _span(one), _span(other)
    return start < others_end and others_start < end


def _span(x: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of x, and of the first one after it."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) if x.numel() else -1
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


# ---- the shares of a transfer ----


def noted(
    operation: str, finish: Callable[[], Tensor], x: Tensor, group: Group, details: Sequence[Any]
) -> Callable[[], Tensor]:
    """Tell every open `Motion` what a transfer sends; return `finish`, which then also tells what has come.

    The arguments are those of `collectives.issue`.
    """
    motions = watchers_of(Motion)
    if not motions:
        return finish
    name = "message" if operation in ("send", "recv") else operation
    for peer, share in _shares_sent(operation, x, group, details):
        for motion in motions:
            motion.sent(name, group, peer, share)

    def finish_and_tell() -> Tensor:
        result = finish()
        for peer, share in _shares_received(operation, result, group, details):
            for motion in motions:
                motion.received(name, group, peer, share)
        return result

    return finish_and_tell


def _shares_sent(operation: str, x: Tensor, group: Group, details: Sequence[Any]) -> list[tuple[int, Tensor]]:
    """Return (global rank, what x sends there) for every other rank that gets something."""
    match operation:
        case "send":
            return [(details[0], x)]
        case "recv":
            return []
        case "broadcast":
            return _others(group, [x] * group.size) if group.rank == details[0] else []
        case "reduce_scatter":
            return _others(group, _parts(x, group.size, dim=details[0], sizes=details[2]))
        case "all_to_all":
            return _others(group, _parts(x, group.size, sizes=details[1]))
        case _:
            return _others(group, [x] * group.size)


def _shares_received(operation: str, result: Tensor, group: Group, details: Sequence[Any]) -> list[tuple[int, Tensor]]:
    """Return (global rank, what came from there) for every other rank that has sent something."""
    match operation:
        case "recv":
            return [(details[0], result)]
        case "send":
            return []
        case "broadcast":
            return [] if group.rank == details[0] else [(group.ranks[details[0]], result)]
        case "all_gather":
            return _others(group, _parts(result, group.size, dim=details[0], sizes=details[1]))
        case "all_to_all":
            return _others(group, _parts(result, group.size, sizes=details[0]))
        case _:
            return _others(group, [result] * group.size)


def _parts(x: Tensor, count: int, *, dim: int = 0, sizes: Sequence[int] | None) -> Sequence[Tensor]:
    return x.chunk(count, dim) if sizes is None else x.split(list(sizes), dim)


def _others(group: Group, parts: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    """Pair the parts with the other global ranks; an empty part is not a message."""
    own = group.ranks[group.rank]
    return [(peer, part) for peer, part in zip(group.ranks, parts, strict=True) if peer != own and part.numel()]
