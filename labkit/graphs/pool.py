"""The history of a pool while graphs were captured, played back as blocks, and its peak predicted.

All graphs of a rank share one pool. A block is taken when a tensor is made in a capture and given back when its last
reference goes, often while a later graph is captured, and then somebody else may take the address. So the pool holds
not what all graphs make, only what is alive at once:

    capture     alive after it, in units of what a forward leaves        order 1 1 -1 1 -1 -1
    F0          A
    F1          A B
    B0          . B         A's tensors are weak references now: the graph knows the address, nobody keeps the memory
    F2          C B         C lies where A lay
    B1          C .
    B2          . .

Nothing here knows torch: a history is rows of (time, alloc or free, offset, bytes, owner), see `PoolStep`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Literal, NamedTuple

from labkit.graphs.order_table import layers_of_chunks, order_sizes, read_order

PoolHistory = Iterable[tuple[int, str, int, int, str]]
"""Rows of (time, "alloc" or "free", offset, bytes, graph whose capture took the block)."""


class PoolStep(NamedTuple):
    """One entry of a pool's history."""

    time: int
    """0, 1, 2, ..: one tick per entry."""
    kind: Literal["alloc", "free"]
    offset: int
    """Bytes from the start of the pool."""
    nbytes: int
    """Size of the block, rounding included."""
    owner: str
    """Name of the graph that was being captured when the block was taken."""


@dataclass(frozen=True, slots=True)
class Life:
    """One block from the moment it was taken until it was given back."""

    owner: str
    """Graph whose capture took it."""
    offset: int
    """Bytes from the start of the pool."""
    nbytes: int
    """Size."""
    born: int
    """Row of the history that took it."""
    died: int | None
    """Row of the history that gave it back; None while it is held."""

    @property
    def end(self) -> int:
        """Bytes from the start of the pool to the end of the block."""
        return self.offset + self.nbytes

    def alive(self, row: int) -> bool:
        """Whether it is held after a row of the history."""
        return self.born <= row and (self.died is None or self.died > row)


@dataclass(frozen=True, slots=True)
class Frame:
    """The pool when a capture has ended."""

    name: str
    """Graph that was captured."""
    live: tuple[Life, ...]
    """Blocks that are held, by offset."""
    taken_over: tuple[Life, ...]
    """Those among them that this capture took where an earlier graph's block lay."""
    peak_bytes: int
    """Most that was held at once during the capture."""

    @property
    def live_bytes(self) -> int:
        """Held."""
        return sum(life.nbytes for life in self.live)


@dataclass(frozen=True)
class Playback:
    """A history, readable: lives of blocks, one frame per capture."""

    lives: tuple[Life, ...]
    """Every block that was ever taken, in that order."""
    captures: tuple[tuple[str, int, int], ...]
    """(graph, first row, last row) in the order they were captured. A history tells of blocks and not of borders: a
    capture begins where its graph takes its first block, so what is given back before that counts to the one before."""
    live_bytes: tuple[int, ...]
    """Bytes held after each row of the history."""

    @property
    def peak_bytes(self) -> int:
        """Most that was held at once."""
        return max(self.live_bytes, default=0)

    @property
    def high_water(self) -> int:
        """End of the highest block: what the pool must be able to hold, gaps included."""
        return max((life.end for life in self.lives), default=0)

    @cached_property
    def frames(self) -> tuple[Frame, ...]:
        """The pool at the end of each capture."""
        frames: list[Frame] = []
        live: list[Life] = []
        touched: list[tuple[int, int]] = []  # bytes that blocks of the captures before have covered
        done = 0
        for name, first, last in self.captures:
            born = self.lives[done : bisect_right(self.lives, last, key=lambda life: life.born)]
            done += len(born)
            live = sorted((life for life in (*live, *born) if life.alive(last)), key=lambda life: life.offset)
            taken = tuple(life for life in live if first <= life.born and _on(life, touched))
            frames.append(Frame(name, tuple(live), taken, max(self.live_bytes[first : last + 1])))
            touched = _merged([*touched, *((life.offset, life.end) for life in born)])
        return tuple(frames)


def play_back(history: PoolHistory) -> Playback:
    """Read a pool's history.

    Raises:
        ValueError: a block taken where another one is held, or given back without being held: no pool does that.
    """
    lives: list[Life] = []
    held: dict[int, int] = {}  # offset -> index in `lives`
    edges: list[tuple[int, int]] = []  # (offset, index), by offset: neighbours of a new block
    live, total = [], 0
    owners: list[str] = []
    for row, (_, kind, offset, nbytes, owner) in enumerate(history):
        owners.append(owner if kind == "alloc" else "")
        if kind == "alloc":
            _require_room(offset, nbytes, edges, lives, row)
            held[offset] = len(lives)
            edges.insert(bisect_right(edges, (offset, len(lives))), (offset, len(lives)))
            lives.append(Life(owner, offset, nbytes, row, None))
            total += nbytes
        else:
            if offset not in held:
                raise ValueError(f"row {row} gives back offset {offset}, where no block is held")
            index = held.pop(offset)
            edges.remove((offset, index))
            born = lives[index]
            lives[index] = Life(born.owner, born.offset, born.nbytes, born.born, row)
            total -= born.nbytes
        live.append(total)
    return Playback(tuple(lives), tuple(_captures(owners)), tuple(live))


def _require_room(offset: int, nbytes: int, edges: list[tuple[int, int]], lives: list[Life], row: int) -> None:
    place = bisect_right(edges, (offset, len(lives)))
    for _, index in edges[max(0, place - 1) : place + 1]:
        other = lives[index]
        if offset < other.end and other.offset < offset + nbytes:
            raise ValueError(
                f"row {row} takes bytes {offset} to {offset + nbytes}, where {other.owner or 'somebody'} holds "
                f"{other.offset} to {other.end}"
            )


def _captures(owners: Sequence[str]) -> Iterable[tuple[str, int, int]]:
    found: list[tuple[str, int, int]] = []
    for owner, rows in groupby(range(len(owners)), key=owners.__getitem__):
        *_, last = first, *_ = list(rows)
        if found and (not owner or owner == found[-1][0]):
            found[-1] = (found[-1][0], found[-1][1], last)
        else:
            found.append((owner, first, last))
    return found


def _on(life: Life, ranges: Sequence[tuple[int, int]]) -> bool:
    """Whether a block covers a byte of the ranges, which are sorted and apart."""
    place = bisect_right(ranges, life.offset, key=lambda pair: pair[1])
    return place < len(ranges) and ranges[place][0] < life.end


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


# ---- prediction ----


@dataclass(frozen=True)
class LayerMemory:
    """What one layer's graphs do to a pool, in bytes."""

    forward_peak: int
    """Most that the forward's capture adds for a moment."""
    kept: int
    """What stays of it until the backward: output and saved activations."""
    backward_peak: int
    """Most that the backward's capture adds for a moment, beside `kept`."""
    grad_inputs: int
    """What stays of the backward until the layer before has read it."""


LAYER_ORDER = (1, 1, -1, 1, -1, -1)
"""An order that shows what a layer needs: after its first forward and after its first backward comes a forward, which
gives nothing back, so what stays is told apart from what the next capture drops."""


def layer_memory(history: PoolHistory) -> LayerMemory:
    """A layer's numbers, from a pool in which it alone was captured along LAYER_ORDER with buffers reused.

    Raises:
        ValueError: the pool has seen other captures than those six.
    """
    playback = play_back(history)
    if len(playback.captures) != len(LAYER_ORDER):
        raise ValueError(
            f"the pool has seen {len(playback.captures)} captures that take memory: capture one layer along "
            f"{list(LAYER_ORDER)}, in a pool of its own"
        )
    forward, _, backward, *_ = [playback.live_bytes[first : last + 1] for _, first, last in playback.captures]
    kept = forward[-1]
    return LayerMemory(
        forward_peak=max(forward), kept=kept, backward_peak=max(backward) - 2 * kept, grad_inputs=backward[-1] - kept
    )


@dataclass(frozen=True)
class PoolPrediction:
    """What a pool will hold while an order's graphs are captured."""

    peak_bytes: int
    """Most at once."""
    live_bytes: tuple[int, ...]
    """After each step of the order."""


def predict_pool(
    order: Sequence[float], layers_per_chunk: int | Sequence[int], memory: LayerMemory | Sequence[LayerMemory]
) -> PoolPrediction:
    """Bytes held in the shared pool along an order, from what one layer needs.

    A forward leaves `kept` until its backward has been captured. The gradient of a layer's input is read by the layer
    before and can go after that one's backward; the gradient of a chunk's input travels to another rank, so it stays
    until the next backward has been captured.

    memory: of every layer, chunk by chunk, or one for all.

    Raises:
        ValueError: an order that `read_order` refuses, or with weight gradients of their own (c - 0.5), which keep more
            alive than these numbers tell; layers or memory of another number.
    """
    passes = read_order(order)
    if any(one.kind == "W" for one in passes):
        raise ValueError(
            "the order has weight gradients of their own (c - 0.5): what stays alive until they have run is not "
            "predicted; measure the pool instead"
        )
    layers = layers_of_chunks(layers_per_chunk, order_sizes(passes)[0])
    of_layer = [memory] * sum(layers) if isinstance(memory, LayerMemory) else list(memory)
    if len(of_layer) != sum(layers):
        raise ValueError(f"memory of {len(of_layer)} layers for {sum(layers)}: give one for each, or one for all")
    live, peak, sent, after = 0, 0, 0, []
    for one in passes:
        first = sum(layers[: one.chunk])
        of_chunk = of_layer[first : first + layers[one.chunk]]
        if one.kind == "F":
            for layer in of_chunk:
                peak = max(peak, live + layer.forward_peak)
                live += layer.kept
        elif one.kind == "B":
            above = 0  # gradient of the input of the layer above
            for layer in reversed(of_chunk):
                peak = max(peak, live + layer.backward_peak)
                live += layer.grad_inputs - layer.kept - above
                above = layer.grad_inputs
            live, sent = live - sent, above
        after.append(live)
    return PoolPrediction(peak, tuple(after))
