"""Context parallelism in pictures: the part of the mask that each rank computes, and the time that the ring waits.

Everything is counted in (query, key) pairs, from the plans that ranks follow (labkit/parallel/context/ring_plan.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.patches import Rectangle
from numpy.typing import ArrayLike

from labkit.comm.motion import Held
from labkit.config.errors import counted
from labkit.events import Event
from labkit.parallel.context.ring_plan import (
    LAYOUTS,
    Layout,
    chunk_length,
    chunks_of_rank,
    cut_load,
    ring_load,
    ring_time,
)
from labkit.viz.figure import Figure
from labkit.viz.style import INK, SEQUENCE, color, hatch, name_rows, new_figure, nth_color, styled, text_color

NAMES: dict[Layout, str] = {"contiguous": "plain cut", "zigzag": "zigzag"}
"""Titles of the two ways to cut a sequence."""
_ORDER: tuple[Layout, ...] = ("contiguous", "zigzag")
MOST_LETTERED = 8
"""Largest number of ranks at which cells and bars show their numbers."""

assert set(_ORDER) == set(LAYOUTS)


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
                Rectangle((0, 0), 1, 1, facecolor=nth_color(rank), edgecolor=INK, linewidth=0.5, label=f"rank {rank}")
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
            shade = nth_color(holder[query])
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


def ring_timeline(cuts: Mapping[str, Sequence[Sequence[int]]]) -> Figure:
    """Draw the work of each rank in each step of the causal ring, for several cuts, on one axis of time (pairs).

    cuts: name -> the positions that each rank holds. The strip above a panel has the positions in order, in the colour
    of their rank. A bar is a block, labelled with the rank whose keys it reads and in its colour. All ranks pass their
    keys on at the end of a step, so a step ends with its slowest block; until then the others wait (dotted).
    """
    loads = {name: cut_load(cut) for name, cut in cuts.items()}
    times = {name: ring_time(load) for name, load in loads.items()}
    most = max(map(len, cuts.values()))
    with styled():
        fig = new_figure(7.4, 0.5 + (0.85 + 0.24 * most) * len(cuts))
        panels = fig.subplots(2 * len(cuts), 1, height_ratios=[1, 1.2 * most] * len(cuts))
        for place, (name, cut) in enumerate(cuts.items()):
            strip, axes = panels[2 * place : 2 * place + 2]
            _draw_strip(strip, cut)
            strip.set_title(f"{name}: {times[name]:,} pairs of time", loc="left")
            _draw_steps(axes, loads[name])
            axes.set_xlim(0, 1.01 * max(times.values()))
            if place + 1 < len(cuts):
                axes.set_xticklabels([])
        panels[-1].set_xlabel("time, in (query, key) pairs; 'kv 2' reads the keys of rank 2; dotted: waits")
    return Figure(fig, _timeline_sentence(cuts, loads, times))


def _draw_strip(axes: Any, cut: Sequence[Sequence[int]]) -> None:
    """Draw all positions from left to right, each in the colour of the rank that holds it."""
    holder = sorted((position, rank) for rank, part in enumerate(cut) for position in part)
    start = 0
    for place, (_, rank) in enumerate(holder):
        if place + 1 == len(holder) or holder[place + 1][1] != rank:
            axes.barh(0, place + 1 - start, left=start, height=1, color=nth_color(rank), edgecolor=INK, linewidth=0.3)
            start = place + 1
    axes.set(xlim=(0, 2 * len(holder)), ylim=(-0.5, 0.5))  # half the width: this is no axis of time
    axes.set_xticks([0.5, len(holder) - 0.5], ["0", str(len(holder) - 1)])
    axes.set_yticks([0], ["positions"])
    axes.tick_params(length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


def _draw_steps(axes: Any, load: Sequence[Sequence[int]]) -> None:
    """Draw a row for each rank with bars for its blocks, dotted while the rank waits for the slowest."""
    cp, start = len(load), 0
    for step, longest in enumerate(max(steps) for steps in zip(*load, strict=True)):
        for rank in range(cp):
            work, source = load[rank][step], (rank - step) % cp
            _bar(axes, rank, start, work, source, f"kv {source}" if cp <= MOST_LETTERED else "")
            _wait(axes, rank, start + work, longest - work)
        start += longest
        axes.axvline(start, color=INK, linewidth=0.6)
    name_rows(axes, [f"rank {rank}" for rank in range(cp)], bars=True)


def _bar(axes: Any, row: int, start: float, length: float, source: int, text: str) -> None:
    if length <= 0:
        return
    face = nth_color(source)
    axes.barh(row, length, left=start, height=0.72, color=face, edgecolor=INK, linewidth=0.4)
    if text:
        axes.text(start + length / 2, row, text, ha="center", va="center", fontsize=7, color=text_color(face))


def _wait(axes: Any, row: int, start: float, length: float) -> None:
    if length > 0:
        look = {"color": color("idle"), "hatch": hatch("wait"), "edgecolor": INK, "linewidth": 0.4}
        axes.barh(row, length, left=start, height=0.72, **look)


def _timeline_sentence(cuts: Mapping[str, Any], loads: Mapping[str, list[list[int]]], times: Mapping[str, int]) -> str:
    first = next(iter(cuts.values()))
    busy = {name: sum(map(sum, load)) / (times[name] * len(load)) for name, load in loads.items()}
    words = [f"{name} {times[name]:,} pairs of time, ranks busy {busy[name]:.1%}" for name in cuts]
    return f"Ring over cp {len(first)}, {sum(map(len, first))} positions: {'; '.join(words)}."


def measured_ring(
    events: Mapping[str, Iterable[Event]], cp: int, predicted: Mapping[str, float] | None = None
) -> Figure:
    """Draw blocks as real processes ran them: a panel for each run, all on one axis of seconds.

    events: run -> the Events of all ranks. Blocks have the kind `forward` and are named after the rank whose keys they
        read (`kv 2`). Other Events are left out.
    cp: number of ranks.
    predicted: run -> seconds until its last block should end, drawn as a dashed line.

    Raises ValueError for a run without a block.
    """
    rows = {name: _blocks(list(found), name) for name, found in events.items()}
    ends = {name: max(event.end for event in blocks) for name, blocks in rows.items()}
    longest = max([*ends.values(), *(predicted or {}).values()])
    with styled():
        fig = new_figure(7.4, 0.6 + (0.35 + 0.25 * cp) * len(rows))
        panels = fig.subplots(len(rows), 1, sharex=True, squeeze=False).ravel()
        for axes, (name, blocks) in zip(panels, rows.items(), strict=True):
            for event in blocks:
                text = event.name if cp <= MOST_LETTERED and event.duration > longest / 25 else ""
                _bar(axes, event.rank, event.start, event.duration, int(event.name.split()[-1]), text)
            if predicted:
                axes.axvline(predicted[name], color=INK, linestyle="--", linewidth=1.2)
            name_rows(axes, [f"rank {rank}" for rank in range(cp)], bars=True)
            axes.set_xlim(0, 1.02 * longest)
            axes.set_title(name, loc="left")
        panels[-1].set_xlabel("seconds, measured" + ("; dashed: predicted end" if predicted else ""))
    words = [f"{name} {counted(len(blocks), 'block')}" for name, blocks in rows.items()]
    first = min(ends, key=lambda name: ends[name])
    return Figure(fig, f"Ring over cp {cp}, measured: {', '.join(words)}; {first} ended first.")


def _blocks(events: list[Event], name: str) -> list[Event]:
    """Move the blocks of all ranks so that the first block begins at 0."""
    blocks = [event for event in events if event.kind == "forward"]
    if not blocks:
        raise ValueError(f"nothing was measured for {name}: no event of kind forward")
    first = min(event.start for event in blocks)
    return [Event(e.rank, e.name, e.kind, e.start - first, e.end - first) for e in blocks]


def ring_box(array: ArrayLike, kvs: ArrayLike, shares: ArrayLike) -> tuple[str, Held]:
    """Return the slot and the box of an array that goes round the ring in backward, read off its numbers.

    array: [2, L, D], the kv of some rank, or dkv: the sum of some ranks' shares for one rank's keys.
    kvs: [cp, 2, L, D], each rank's.
    shares: [cp, cp, 2, L, D]; shares[r][s] is what rank r adds for the keys of rank s. Its dv is zero outside column r,
        so the columns of a sum of dv that are not zero show who has added something; D is at least the number of ranks.
        A sum of no shares is 0.
    """
    x, theirs, added = np.asarray(array), np.asarray(kvs), np.asarray(shares)
    tensor = torch.from_numpy(x)
    for owner, kv in enumerate(theirs):
        if np.array_equal(x, kv):
            return "kv", Held(f"kv {owner}", [owner], tensor)
    adders = [int(rank) for rank in np.flatnonzero(np.abs(x[1]).sum(axis=0))]
    if not adders:
        return "dkv", Held("0", (), tensor)
    owner = int(np.argmin([np.abs(x - total).sum() for total in added[adders].sum(axis=0)]))
    return "dkv", Held(f"dkv {owner}", adders, tensor)
