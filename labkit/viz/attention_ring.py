"""Context parallelism in pictures: the part of the mask that each rank computes, and the time that the ring waits.

Everything is counted in (query, key) pairs, from the plans that ranks follow (labkit/parallel/context/ring_plan.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.patches import Rectangle

from labkit.events import Event
from labkit.parallel.context.ring_plan import LAYOUTS, Layout, chunk_length, chunks_of_rank, ring_load, ring_time
from labkit.viz.figure import Figure
from labkit.viz.style import INK, SEQUENCE, color, hatch, name_rows, new_figure, styled, text_color

NAMES: dict[Layout, str] = {"contiguous": "plain cut", "zigzag": "zigzag"}
"""Titles of the two ways to cut a sequence."""
_ORDER: tuple[Layout, ...] = ("contiguous", "zigzag")
MOST_LETTERED = 8
"""Largest number of ranks at which cells and bars show their numbers."""

assert set(_ORDER) == set(LAYOUTS)


def _shade(rank: int) -> str:
    return SEQUENCE[rank % len(SEQUENCE)]


def context_mask(seq_length: int, cp: int) -> Figure:
    """Draw the causal mask for each way to cut: rows are queries, columns keys, both in the order of the sequence.

    A cell is one chunk of queries against one of keys. Its colour is the rank that computes it, which is the rank with
    the queries. Its number is the ring step in which that rank has these keys. Half a cell is on the diagonal.

    Raises:
        ValueError: a length that 2 cp does not divide.
    """
    chunk = chunk_length(seq_length, cp)
    with styled():
        fig = new_figure(7.4, 4.1)
        for axes, layout in zip(fig.subplots(1, 2), _ORDER, strict=True):
            _draw_mask(axes, cp, layout, chunk)
            axes.set_title(NAMES[layout], loc="left")
        fig.legend(
            handles=[
                Rectangle((0, 0), 1, 1, facecolor=_shade(rank), edgecolor=INK, linewidth=0.5, label=f"rank {rank}")
                for rank in range(min(cp, len(SEQUENCE)))
            ],
            loc="outside lower center",
            ncols=min(cp, len(SEQUENCE)),
        )
    return Figure(fig, _mask_sentence(seq_length, cp))


def _draw_mask(axes: Any, cp: int, layout: Layout, length: int) -> None:
    """Draw one mask of 2 cp x 2 cp chunks of `length` positions."""
    holder = {chunk: rank for rank in range(cp) for chunk in chunks_of_rank(cp, rank, layout)}
    for query in range(2 * cp):
        for key in range(query + 1):
            shade = _shade(holder[query])
            corners = [(key, query), (key, query + 1), (key + 1, query + 1)]
            corners += [(key + 1, query)] if key < query else []
            axes.fill(*zip(*corners, strict=True), facecolor=shade, edgecolor="white", linewidth=0.8)
            if cp <= MOST_LETTERED:
                step = (holder[query] - holder[key]) % cp
                x, y = (key + 0.5, query + 0.5) if key < query else (key + 0.33, query + 0.68)
                axes.text(x, y, step, ha="center", va="center", fontsize=7, color=text_color(shade))
    axes.set(xlim=(0, 2 * cp), ylim=(2 * cp, 0), xlabel=f"chunk of keys ({length} positions each)", aspect="equal")
    axes.set_ylabel("chunk of queries (its rank)" if cp <= MOST_LETTERED else "chunk of queries")
    ticks = range(2 * cp) if cp <= MOST_LETTERED else []
    axes.set_xticks([tick + 0.5 for tick in ticks], [str(tick) for tick in ticks])
    axes.set_yticks([tick + 0.5 for tick in ticks], [f"{tick} ({holder[tick]})" for tick in ticks])
    axes.tick_params(length=0)


def _mask_sentence(seq_length: int, cp: int) -> str:
    words = []
    for layout in _ORDER:
        by_rank = [sum(steps) for steps in ring_load(seq_length, cp, layout=layout)]
        least, most = min(by_rank), max(by_rank)
        words.append(
            f"{NAMES[layout]} {most:,} for every rank"
            if least == most
            else f"{NAMES[layout]} {least:,} pairs for rank 0 and {most:,} for rank {cp - 1}"
        )
    total = seq_length * (seq_length + 1) // 2
    return f"Causal mask of {seq_length} positions over cp {cp}, {total:,} pairs: {', '.join(words)}."


def ring_timeline(seq_length: int, cp: int, *, causal: bool = True) -> Figure:
    """Draw the work of each rank in each step of the ring, for both ways to cut, on one axis of time (pairs).

    A bar is a block, labelled with the rank whose keys the block reads. All ranks hand their keys over at the end of a
    step, so a step ends with its slowest block.

    Raises:
        ValueError: a length that 2 cp does not divide.
    """
    loads: dict[Layout, list[list[int]]] = {
        layout: ring_load(seq_length, cp, causal=causal, layout=layout) for layout in _ORDER
    }
    times: dict[Layout, int] = {layout: ring_time(load) for layout, load in loads.items()}
    with styled():
        fig = new_figure(7.4, 1.3 + 0.5 * cp)
        panels = fig.subplots(2, 1, sharex=True)
        for axes, layout in zip(panels, _ORDER, strict=True):
            _draw_steps(axes, loads[layout])
            axes.set_title(f"{NAMES[layout]}: {times[layout]:,} pairs of time", loc="left")
            axes.set_xlim(0, 1.01 * max(times.values()))
        panels[-1].set_xlabel("time, in (query, key) pairs; 'kv 2' reads the keys and values of rank 2; dotted: idle")
    return Figure(fig, _timeline_sentence(seq_length, cp, causal, loads, times))


def _draw_steps(axes: Any, load: Sequence[Sequence[int]]) -> None:
    """Draw a row for each rank with bars for its blocks, dotted while the rank waits for the slowest."""
    cp, start = len(load), 0
    for step, longest in enumerate(max(steps) for steps in zip(*load, strict=True)):
        for rank in range(cp):
            work = load[rank][step]
            _bar(axes, rank, start, work, "forward", f"kv {(rank - step) % cp}" if cp <= MOST_LETTERED else "")
            _bar(axes, rank, start + work, longest - work, "wait", "")
        start += longest
        axes.axvline(start, color=INK, linewidth=0.6)
    name_rows(axes, [f"rank {rank}" for rank in range(cp)], bars=True)


def _bar(axes: Any, row: int, start: float, length: float, kind: str, text: str) -> None:
    if length <= 0:
        return
    face = color(kind) if kind != "wait" else color("idle")
    axes.barh(row, length, left=start, height=0.72, color=face, hatch=hatch(kind), edgecolor=INK, linewidth=0.4)
    if text:
        axes.text(start + length / 2, row, text, ha="center", va="center", fontsize=7, color=text_color(face))


def _busy(load: Sequence[Sequence[int]], time: int) -> float:
    return sum(map(sum, load)) / (time * len(load))


def _timeline_sentence(
    seq_length: int,
    cp: int,
    causal: bool,
    loads: dict[Layout, list[list[int]]],
    times: dict[Layout, int],
) -> str:
    kind = "causal" if causal else "not causal"
    words = [
        f"{NAMES[way]} {times[way]:,} pairs of time, ranks busy {_busy(loads[way], times[way]):.1%}" for way in _ORDER
    ]
    gain = times["contiguous"] / times["zigzag"]
    return f"Ring over cp {cp}, {seq_length} positions, {kind}: {'; '.join(words)}; zigzag is {gain:.2f} times as fast."


def measured_ring(events: dict[Layout, Iterable[Event]], cp: int) -> Figure:
    """Draw blocks as real processes ran them: one panel for each way to cut, both on one axis of seconds.

    Args:
        events: for each way to cut, the Events of all ranks. Blocks have the kind `forward` and are named after the
            rank whose keys they read (`kv 2`). Other Events are left out.
        cp: number of ranks.
        cp: ranks.

    Raises:
        ValueError: a way without a block.
    """
    rows: dict[Layout, list[Event]] = {way: _blocks(list(found), way) for way, found in events.items()}
    ends: dict[Layout, float] = {way: max(event.end for event in blocks) for way, blocks in rows.items()}
    with styled():
        fig = new_figure(7.4, 0.6 + (0.35 + 0.25 * cp) * len(rows))
        panels = fig.subplots(len(rows), 1, sharex=True, squeeze=False).ravel()
        for axes, (way, blocks) in zip(panels, rows.items(), strict=True):
            for event in blocks:
                text = event.name if cp <= MOST_LETTERED else ""
                _bar(axes, event.rank, event.start, event.duration, "forward", text)
            name_rows(axes, [f"rank {rank}" for rank in range(cp)], bars=True)
            axes.set(xlim=(0, 1.01 * max(ends.values())), title=NAMES[way])
            axes.title.set(ha="left", x=0)
        panels[-1].set_xlabel("seconds, measured")
    words = [f"{NAMES[way]} {len(blocks)} block{'s' * (len(blocks) != 1)}" for way, blocks in rows.items()]
    return Figure(fig, f"Ring over cp {cp}, measured: {', '.join(words)}; {_verdict(ends)}.")


def _blocks(events: list[Event], way: Layout) -> list[Event]:
    """Move the blocks of all ranks so that the first block begins at 0."""
    blocks = [event for event in events if event.kind == "forward"]
    if not blocks:
        raise ValueError(f"nothing was measured for the {NAMES[way]}: no event of kind forward")
    first = min(event.start for event in blocks)
    return [Event(e.rank, e.name, e.kind, e.start - first, e.end - first) for e in blocks]


def _verdict(ends: dict[Layout, float]) -> str:
    """Name the faster way, in words that do not change from run to run."""
    fastest = min(ends, key=lambda way: ends[way])
    return f"{NAMES[fastest]} ended first"
