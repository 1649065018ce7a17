"""What a layer keeps for backward, tensor by tensor as areas, and what a stack of layers keeps over time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from labkit.viz.figure import Figure
from labkit.viz.style import ALERT, INK, SEQUENCE, box, handle, name_rows, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Moments = Sequence[tuple[float, float]]
"""(operations so far, bytes that are kept) at each moment."""


class TensorArea(NamedTuple):
    """One tensor of a layer."""

    name: str
    width: float
    """Numbers per token, in units of h."""
    bytes: int
    """Bytes of a number."""
    inside: bool = False
    """It is inside core attention."""

    @property
    def size(self) -> float:
        """Bytes in units of s b h."""
        return self.width * self.bytes


def layer_areas(tensors: Sequence[TensorArea], kept: Collection[str], right: Collection[str] | None = None) -> Figure:
    """Draw each tensor as a rectangle: its width is numbers per token, its height bytes per number.

    kept: names of the tensors that are filled, because they are kept; the others are outlines. right: what should be
    kept, if `kept` may be wrong; a tensor on which they differ is red.
    """
    wrong = set(kept) ^ set(kept if right is None else right)
    most = max(each.width for each in tensors)
    colors = {True: SEQUENCE[1], False: SEQUENCE[5]}
    with styled():
        fig = new_figure(8.2, 0.9 + 0.27 * len(tensors))
        axes = fig.subplots()
        for place, each in enumerate(tensors):
            high = 0.42 * each.bytes
            look: dict[str, Any] = {} if each.name in kept else {"linestyle": ":", "linewidth": 1.0}
            if each.name in wrong:
                look |= {"edgecolor": ALERT, "linewidth": 2.2}
            fill = colors[each.inside] if each.name in kept else "#FFFFFF"
            box(axes, (0.0, place + 0.5 - high / 2), each.width, high, fill, **look)
            words = f"{each.size:g}" if each.name in kept else f"({each.size:g})"
            if each.name in wrong:
                words += " is not kept" if each.name in kept else " is missing"
            axes.text(each.width + 0.012 * most, place + 0.5, words, va="center", fontsize=8,
                      color=ALERT if each.name in wrong else INK)  # fmt: skip
        name_rows(axes, [each.name for each in tensors])
        axes.set(xlim=(0, 1.2 * most), xlabel="numbers per token / h; height: bytes per number (2, or 1 for a mask)")
        axes.spines["left"].set_visible(False)
        legend = [handle("kept", colors[False]), handle("kept, inside core attention", colors[True])]
        legend.append(handle("not kept", "#FFFFFF"))
        legend[-1].set_linestyle(":")
        fig.legend(handles=legend, loc="outside lower center", ncols=3)
    sizes = [sum(each.size for each in tensors if each.name in kept and each.inside in where)
             for where in ((True, False), (True,))]  # fmt: skip
    off = f"; wrong: {', '.join(each.name for each in tensors if each.name in wrong)}" if wrong else ""
    number = sum(each.name in kept for each in tensors)
    return Figure(fig, f"{number} of {len(tensors)} tensors are kept: {sizes[0]:.1f} s b h, of which {sizes[1]:.1f} "
                       f"inside core attention{off}.")  # fmt: skip


def memory_over_time(
    runs: Mapping[str, Moments], room: float, forward: float, predicted: Mapping[str, Moments] | None = None
) -> Figure:
    """Draw what each run keeps, in GB, over the operations that it has done.

    A run is filled, and `predicted`, by the same names, is an outline over it. room: bytes that there are, drawn as a
    line. forward: operations of one forward of everything, the unit of the axis. What is over the line is red. A run
    whose peak is within 5 % of the room has a triangle over the peak, and the peak enlarged at its right.
    """
    predicted = predicted or {}
    last = max(moments[-1][0] for moments in runs.values()) / forward
    peaks = {name: max(size for _, size in moments) for name, moments in runs.items()}
    outlines = [size for moments in predicted.values() for _, size in moments]
    top = max(*peaks.values(), *outlines, room) / 1e9
    close = {name for name, peak in peaks.items() if abs(peak / room - 1) < 0.05}
    with styled():
        fig = new_figure(8.2, 0.9 + 1.45 * len(runs))
        columns = [4.2, 1.0] if close else [1.0]
        grid = fig.add_gridspec(len(runs), len(columns), width_ratios=columns)
        panels: list[Axes] = []
        for name, moments in runs.items():
            place, first = len(panels), panels[0] if panels else None
            axes = fig.add_subplot(grid[place, 0], sharex=first, sharey=first)
            axes.tick_params(labelbottom=place == len(runs) - 1)
            panels.append(axes)
            _draw_moments(axes, moments, predicted.get(name), room, forward)
            fits, extra = peaks[name] <= room, moments[-1][0] / forward / 3 - 1
            words = f"{'fits' if fits else 'does not fit'}, peak {peaks[name] / 1e9:.1f} GB, operations {extra:+.1%}"
            axes.set_title(f"{name}: {words}", loc="left", color=INK if fits else ALERT)
            if name in close:
                at = next(done for done, size in moments if size == peaks[name])
                axes.plot(at / forward, peaks[name] / 1e9 + 0.04 * top, "v", color=INK, ms=4)
                _enlarge_peak(fig.add_subplot(grid[place, 1]), moments, predicted.get(name), room, forward)
        panels[0].set(xlim=(0, max(last, 3.0) * 1.01), ylim=(0, 1.08 * top))
        panels[-1].set_xlabel("operations, in forwards of all layers (the first one is the forward)")
        fig.supylabel("kept for backward, GB", fontsize=9)
        entries = {label: entry for axes in panels for entry, label in zip(*axes.get_legend_handles_labels())}
        fig.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=4)
    told = [
        f"{name} {'fits' if peaks[name] <= room else 'does not fit'}, peak {peaks[name] / 1e9:.1f} GB, operations "
        f"{moments[-1][0] / forward / 3 - 1:+.1%}"
        for name, moments in runs.items()
    ]
    return Figure(fig, f"Room for {room / 1e9:.1f} GB: {'; '.join(told)}.")


def _draw_moments(axes: Axes, moments: Moments, outline: Moments | None, room: float, forward: float) -> None:
    """Fill what a run keeps, red where it is over the room, with the predicted outline and the line of the room."""
    x, y = [done / forward for done, _ in moments], [size / 1e9 for _, size in moments]
    axes.fill_between(x, y, step="post", color=SEQUENCE[5], lw=0, label="counted")
    over = [size > room / 1e9 for size in y]
    if any(over):
        axes.fill_between(x, room / 1e9, y, where=over, step="post", color=ALERT, lw=0, label="no room")
    if outline is not None:
        axes.plot([done / forward for done, _ in outline], [size / 1e9 for _, size in outline], color=INK, lw=1.3,
                  label="predicted")  # fmt: skip
    axes.axhline(room / 1e9, color=ALERT, lw=1.2, ls="--", label="room")


def _enlarge_peak(axes: Axes, moments: Moments, outline: Moments | None, room: float, forward: float) -> None:
    """Draw the surroundings of a run's peak, and by how much it is over or under the room."""
    _draw_moments(axes, moments, outline, room, forward)
    peak = max(size for _, size in moments)
    at = [done / forward for done, size in moments if size == peak]
    axes.set(xlim=(at[0] - 0.15, at[0] + 0.15), ylim=(0.9 * room / 1e9, 1.04 * room / 1e9))
    words = f"{abs(peak - room) / 1e9:.2f} GB {'to spare' if peak <= room else 'too much'}"
    axes.set_title(words, loc="left", color=INK if peak <= room else ALERT)
