"""The memory pool of graphs in a pipeline: its blocks, what a mistake overwrites, and its captures frame by frame.

Colours stand for microbatches, since every picture shows the memory that two microbatches share. A hatch marks
backwards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.patches import Patch, Rectangle

from labkit.config.errors import counted
from labkit.graphs.pool import Frame, Life, Overwritten, Playback, overwritten
from labkit.viz.figure import Figure
from labkit.viz.graphs.buffer_lives import MAX_LABELS, WIDTH, WRONG, thinned
from labkit.viz.live import LiveFigure, is_live
from labkit.viz.style import name_rows, new_figure, nth_color, styled

MAX_FRAMES = 24
"""Most frames that one picture shows."""
_BACKWARD = "////"
_TAKEN_OVER = "#000000"
_THIN = 0.04
"""Part of a panel's height below which a frame gets an arrow."""
_MOST_FRAMES = 3
"""Most collisions that a panel frames; more of them hide each other."""
_KIB = 1024


def pool_blocks(playback: Playback, *, what: str = "") -> Figure:
    """Draw every block of a pool: along x the moments that take or give back memory, along y the place of the block.

    Two colours next to each other at one height are memory that a later capture took over. The panel below shows the
    bytes held at each moment, which are fewer than the place of the highest block if there are gaps below it.

    what: the first words of the sentence.

    Raises ValueError for a pool without a history, which some machines do not give.
    """
    names = _short_names(playback)
    with styled():
        fig = new_figure(WIDTH, 5.2)
        axes, below = fig.subplots(2, 1, sharex=True, height_ratios=(4, 1))
        _draw_blocks(axes, playback)
        _draw_amount(below, playback)
        for _, border, _ in playback.captures:
            below.axvline(border, color="#BBBBBB", linewidth=0.5, zorder=0)
        middles = [(first + last + 1) / 2 for _, first, last in playback.captures]
        below.set_xticks(middles, thinned(names), rotation=90 if len(names) > 20 else 0)
        below.set_xlabel("captures, in the order in which they were made and are replayed")
        axes.set(xlim=(0, len(playback.live_bytes)), ylim=(0, playback.high_water / _KIB))
        axes.set_ylabel("place in the pool, KiB")
        for panel in (axes, below):
            panel.tick_params(axis="x", length=0)
        fig.legend(handles=_legend(playback.lives), loc="outside upper center", ncols=6)
    return Figure(fig, _pool_sentence(playback, what))


def pool_collisions(right: Playback, others: Mapping[str, Playback], *, what: str = "all rules kept") -> Figure:
    """Draw the blocks of a pool, and of pools with the same captures that give some blocks back too early.

    A red frame is around memory that one block has taken while another still needs it, for the largest few of a panel.

    others: what was done differently -> its pool.
    what: name of the pool that is right.

    Raises ValueError for a pool without a history, and for pools of other captures.
    """
    names = _short_names(right)
    panels = {what: right, **others}
    found = {name: overwritten(playback, right) for name, playback in others.items()}
    with styled():
        rows = -(-len(panels) // 2)
        fig = new_figure(WIDTH, 0.5 + 2.4 * rows)
        grid = fig.subplots(rows, 2, squeeze=False, sharey=True)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        top = max(playback.high_water for playback in panels.values()) / _KIB
        for axes, (name, playback) in zip(grid.flat, panels.items()):
            _draw_blocks(axes, playback)
            axes.set(xlim=(0, len(playback.live_bytes)), ylim=(0, top))
            overlaps = found.get(name, [])
            for each in sorted(overlaps, key=_bytes_in_both, reverse=True)[:_MOST_FRAMES]:
                _draw_overwritten(axes, each)
            some = f", largest {_MOST_FRAMES} of {len(overlaps)} framed" if len(overlaps) > _MOST_FRAMES else ""
            axes.set_title(f"{name}: at most {_size(playback.peak_bytes)}{some or ' held'}", loc="left")
            middles = [(first + last + 1) / 2 for _, first, last in playback.captures]
            axes.set_xticks(middles, thinned(names, MAX_LABELS // 2), fontsize=7, rotation=90)
            axes.tick_params(axis="x", length=0)
        for axes in grid[:, 0]:
            axes.set_ylabel("place in the pool, KiB")
        handles = [*_legend(right.lives), Patch(label="overwritten while it is needed", **WRONG)]
        fig.legend(handles=handles, loc="outside upper center", ncols=6)
    return Figure(fig, _collisions_sentence(found, what))


def _draw_blocks(axes: Any, playback: Playback) -> None:
    """Draw every block at its place, from the moment that takes it to the one that gives it back."""
    end = len(playback.live_bytes)
    for life in playback.lives:
        width = (end if life.died is None else life.died) - life.born
        axes.add_patch(Rectangle((life.born, life.offset / _KIB), width, life.nbytes / _KIB, **_block_style(life)))
    for _, border, _ in playback.captures:
        axes.axvline(border, color="#BBBBBB", linewidth=0.5, zorder=0)


def _bytes_in_both(each: Overwritten) -> int:
    return min(each.block.end, each.taker.end) - max(each.block.offset, each.taker.offset)


def _draw_overwritten(axes: Any, each: Overwritten) -> None:
    """Frame the bytes that both blocks have, from the second one's first moment until the first one is done with.

    An arrow points at a frame that is too low to be seen.
    """
    low, high = max(each.block.offset, each.taker.offset) / _KIB, min(each.block.end, each.taker.end) / _KIB
    corner, width = (each.taker.born, low), each.until - each.taker.born
    look: Any = WRONG | {"linewidth": 1.5}
    axes.add_patch(Rectangle(corner, width, high - low, zorder=3, **look))
    if high - low < _THIN * axes.get_ylim()[1]:
        axes.annotate(
            "",
            (each.taker.born, (low + high) / 2),
            xytext=(-28, 28),
            textcoords="offset points",
            arrowprops={"arrowstyle": "-|>", "color": WRONG["edgecolor"], "linewidth": 1.5},
            zorder=4,
        )


def _collisions_sentence(found: Mapping[str, Sequence[Overwritten]], what: str) -> str:
    said = [f"{what}: no block is overwritten while it is needed"]
    for name, each in found.items():
        first = f", first one of {each[0].block.owner} by {each[0].taker.owner}" if each else ""
        said.append(f"{name}: {counted(len(each), 'block')} overwritten{first}")
    return "; ".join(said) + "."


def _draw_amount(axes: Any, playback: Playback) -> None:
    """Draw the bytes held after each moment, and name the largest number."""
    held = [nbytes / _KIB for nbytes in playback.live_bytes]
    axes.stairs(held, range(len(held) + 1), fill=True, color="#888888")
    most = playback.peak_bytes / _KIB
    axes.axhline(most, color="#000000", linewidth=0.8, linestyle="--")
    axes.annotate(f"at most {most:,.0f}", (0, most), xytext=(3, -2), textcoords="offset points", va="top", fontsize=8)
    axes.set(ylim=(0, 1.1 * most), ylabel="held, KiB")


def pool_frames(playback: Playback, *, first: int = 0, count: int = MAX_FRAMES, what: str = "") -> Figure:
    """Draw the pool at the end of each capture, one strip per capture, from the top down: held blocks and their places.

    Blocks with a thick edge are where a block of an earlier graph was. An arrow leads to the largest of a forward from
    the last strip in which another microbatch held its memory.

    first, count: frames to show, at most MAX_FRAMES.
    what: the first words of the sentence.

    Raises ValueError for a pool without a history, and if there is no such frame.
    """
    names = _short_names(playback)
    shown = range(first, min(len(names), first + min(count, MAX_FRAMES)))
    if not shown:
        raise ValueError(f"there is no frame {first}: the pool has {len(names)}, 0 first")
    with styled():
        fig = new_figure(WIDTH, 1.2 + 0.27 * len(shown))
        axes = fig.subplots()
        for row, number in enumerate(shown):
            _draw_strip(axes, row, playback.frames[number])
        _draw_hand_overs(axes, playback, shown)
        axes.set(xlim=(0, _end(playback) / _KIB), xlabel="place in the pool, KiB")
        name_rows(axes, [names[number] for number in shown])
        handles = _legend([life for number in shown for life in playback.frames[number].live], taken_over=True)
        fig.legend(handles=handles, loc="outside upper center", ncols=6)
    return Figure(fig, _frames_sentence(playback, shown, names, what))


def pool_frame(playback: Playback, number: int) -> Figure:
    """Draw one frame: the held blocks and their places; below, the held bytes of all captures with a mark at this one.

    Raises ValueError if there is no such frame.
    """
    names = _short_names(playback)
    if not 0 <= number < len(names):
        raise ValueError(f"there is no frame {number}: the pool has {len(names)}, 0 first")
    frame = playback.frames[number]
    with styled():
        fig = new_figure(WIDTH, 3.4)
        above, below = fig.subplots(2, 1, height_ratios=(1, 1.6))
        _draw_strip(above, 0, frame)
        above.set(xlim=(0, _end(playback) / _KIB), ylim=(1, 0), yticks=[], xlabel="place in the pool, KiB")
        held = [each.live_bytes / _KIB for each in playback.frames]
        below.bar(range(len(held)), held, color=["#444444" if i == number else "#CCCCCC" for i in range(len(held))])
        below.set_xticks(range(len(names)), thinned(names), rotation=90 if len(names) > 20 else 0)
        below.set(ylabel="held, KiB", xlim=(-0.6, len(held) - 0.4))
        below.tick_params(axis="x", length=0)
        fig.legend(handles=_legend(playback.lives, taken_over=True), loc="outside upper center", ncols=6)
    over = sum(life.nbytes for life in frame.taken_over)
    blocks = counted(len(frame.live), "block")
    sentence = (
        f"Frame {number} of {len(names)}, {names[number]}: {_size(frame.live_bytes)} held in {blocks}, "
        f"{_size(over)} of it just taken from earlier graphs."
    )
    return Figure(fig, sentence)


def explore_pool(playback: Playback, *, what: str = "") -> Any:
    """Return `pool_frames`, or in a live notebook a player that steps through the frames, forward and back."""
    return _player(playback) if is_live() else pool_frames(playback, what=what)


def _player(playback: Playback) -> Any:
    import ipywidgets as widgets

    last = len(playback.frames) - 1
    play = widgets.Play(value=0, min=0, max=last, step=1, interval=700, show_repeat=False, description="play")
    slider = widgets.IntSlider(value=0, min=0, max=last, description="frame")
    widgets.jslink((play, "value"), (slider, "value"))
    shown = LiveFigure(pool_frame(playback, 0))
    shown.follow({"number": slider}, lambda given: pool_frame(playback, **given))
    return widgets.VBox([widgets.HBox([play, slider]), *shown.parts])


def _end(playback: Playback) -> int:
    """Return the end of the last block of any frame; blocks that live within one capture may be higher."""
    return max(life.end for frame in playback.frames for life in frame.live)


def _draw_strip(axes: Any, row: int, frame: Frame) -> None:
    over = set(frame.taken_over)
    for life in frame.live:
        style = _block_style(life)
        if life in over:
            style |= {"edgecolor": _TAKEN_OVER, "linewidth": 1.2, "zorder": 2}  # above its neighbours' edges
        box = Rectangle((life.offset / _KIB, row + 0.1), life.nbytes / _KIB, 0.8, **style)
        axes.add_patch(box)


def _draw_hand_overs(axes: Any, playback: Playback, shown: range) -> None:
    """Draw an arrow to the largest block that each forward took over from another microbatch."""
    for row, number in enumerate(shown):
        takers = sorted(playback.frames[number].taken_over, key=lambda life: -life.nbytes)
        found = [(life, _last_holder(playback, shown[:row], life)) for life in takers]
        life, giver = next((pair for pair in found if pair[1]), (None, None))
        if life is None or giver is None or _graph_of(life.owner)[2]:
            continue
        middle = (life.offset + life.end) / 2 / _KIB
        arrow: Any = {"arrowstyle": "-|>", "color": _TAKEN_OVER, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (middle, row + 0.1), xytext=(middle, giver[0] + 0.9), arrowprops=arrow, zorder=4)


def _last_holder(playback: Playback, before: range, life: Life) -> tuple[int, Life] | None:
    """Return (row, block) of the last strip in which another microbatch's forward held the middle of this block."""
    microbatch, middle = _graph_of(life.owner)[1], (life.offset + life.end) // 2
    for row in reversed(range(len(before))):
        for each in playback.frames[before[row]].live:
            _, other, backward = _graph_of(each.owner)
            if other != microbatch and not backward and each.offset <= middle < each.end:
                return row, each
    return None


def _block_style(life: Life) -> dict[str, Any]:
    _, microbatch, backward = _graph_of(life.owner)
    return {
        "facecolor": nth_color(microbatch),
        "hatch": _BACKWARD if backward else "",
        "edgecolor": "#FFFFFF",
        "linewidth": 0.3,
    }


def _graph_of(owner: str) -> tuple[str, int, bool]:
    """Parse `chunk 0 layer 1 microbatch 2 forward` into (chunk and layer, microbatch, True for a backward)."""
    found = re.search(r"(.*?)\s*microbatch (\d+)\s*(\w*)", owner)
    return (found[1], int(found[2]), found[3] != "forward") if found else (owner, 0, "backward" in owner)


def _short_names(playback: Playback) -> list[str]:
    """Name the captures F0, B0, ..; with the layer's number where there are several layers.

    Raises:
        ValueError: there are none.
    """
    if not playback.captures:
        raise ValueError(
            "the pool has no history to draw: nothing was captured, or the machine does not tell (impl emulated does)"
        )
    graphs = [_graph_of(name) for name, _, _ in playback.captures]
    layers = list(dict.fromkeys(layer for layer, _, _ in graphs))
    several = len(layers) > 1
    return [
        f"{'B' if backward else 'F'}{microbatch}{f' l{layers.index(layer)}' if several else ''}"
        for layer, microbatch, backward in graphs
    ]


def _legend(lives: Sequence[Life], *, taken_over: bool = False) -> list[Any]:
    microbatches = sorted({_graph_of(life.owner)[1] for life in lives})
    handles: list[Any] = [Patch(facecolor=nth_color(m), label=f"microbatch {m}") for m in microbatches[:8]]
    if any(_graph_of(life.owner)[2] for life in lives):
        handles.append(Patch(facecolor="#DDDDDD", hatch=_BACKWARD, edgecolor="#FFFFFF", label="of a backward"))
    if taken_over:
        handles.append(
            Patch(facecolor="#FFFFFF", edgecolor=_TAKEN_OVER, linewidth=1.2, label="memory of an earlier graph")
        )
    return handles


def _pool_sentence(playback: Playback, what: str) -> str:
    made = sum(life.nbytes for life in playback.lives)
    return (
        f"{what + ': ' if what else ''}{counted(len(playback.captures), 'capture')} took {_size(made)} in "
        f"{counted(len(playback.lives), 'block')}; at most {_size(playback.peak_bytes)} were held at once, in a "
        f"pool of {_size(playback.high_water)}."
    )


def _frames_sentence(playback: Playback, shown: range, names: Sequence[str], what: str) -> str:
    frames = [playback.frames[number] for number in shown]
    most = max(range(len(frames)), key=lambda i: frames[i].live_bytes)
    forwards = [number for number in shown if not _graph_of(playback.captures[number][0])[2]]
    first_over = next((number for number in forwards if _share_taken_over(playback, number) > 0.5), None)
    over = "no forward is mostly in memory of earlier graphs"
    if first_over is not None:
        share = _share_taken_over(playback, first_over)
        over = f"{names[first_over]} is the first forward that is mostly in memory of earlier graphs ({share:.0%})"
    return (
        f"{what + ': ' if what else ''}{counted(len(frames), 'frame')}, most held after {names[shown[most]]}, "
        f"{_size(frames[most].live_bytes)}; {over}."
    )


def _share_taken_over(playback: Playback, number: int) -> float:
    """Return the share of a capture's bytes that are where a block of an earlier graph was."""
    frame, (_, first, _) = playback.frames[number], playback.captures[number]
    left = sum(life.nbytes for life in frame.live if life.born >= first)
    return sum(life.nbytes for life in frame.taken_over) / left if left else 0.0


def _size(nbytes: int) -> str:
    return f"{nbytes / _KIB:,.0f} KiB"
