"""Times and bandwidths of collectives by the size of the tensor: predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from labkit.viz.figure import Figure
from labkit.viz.style import INK, LINES, SEQUENCE, color, new_figure, styled


def term_bars(
    sizes: Sequence[int], terms: Mapping[str, Sequence[float]], measured: Sequence[float], *, of: str
) -> Figure:
    """Draw for each size the predicted terms as outlines, one after another, and below them the measured time.

    terms: name -> seconds by size. of: what takes the time. The sentence gives no measured times.

    Raises ValueError if there are not as many times as sizes.
    """
    if not sizes or not terms or any(len(each) != len(sizes) for each in [*terms.values(), measured]):
        raise ValueError(f"give as many times as sizes for each term and measured; got {len(sizes)} sizes")
    hatches = dict(zip(terms, ("", "////", "....", "xxxx")))
    with styled():
        fig = new_figure(7.2, 0.7 + 0.5 * len(sizes))
        axes = fig.subplots()
        for row in range(len(sizes)):
            left = 0.0
            for name, seconds in terms.items():
                axes.barh(row - 0.2, 1e3 * seconds[row], 0.36, left, facecolor="#FFFFFF", edgecolor=INK,
                          hatch=hatches[name])  # fmt: skip
                left += 1e3 * seconds[row]
            axes.barh(row + 0.2, 1e3 * measured[row], 0.36, facecolor=color("collective"))
        axes.set_yticks(range(len(sizes)), [f"{size:,} bytes" for size in sizes])
        axes.invert_yaxis()
        axes.set_xlabel(f"time of {of} (ms)")
        axes.grid(axis="x")
        keys = [Patch(facecolor="#FFFFFF", edgecolor=INK, hatch=hatches[name], label=name) for name in terms]
        fig.legend(handles=[*keys, Patch(facecolor=color("collective"), label="measured")], loc="outside upper left",
                   ncols=len(terms) + 1)  # fmt: skip
    named = " and ".join(terms)
    return Figure(fig, f"Time of {of} of {min(sizes):,} to {max(sizes):,} bytes: {named} predicted, and measured.")


def bandwidth_by_size(
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    measured: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
    *,
    links: Mapping[str, float] | None = None,
) -> Figure:
    """Draw bus bandwidth over the size of the tensor; predicted are lines, measured are dots of the line's colour.

    lines: name -> (bytes, bytes per second). measured: the same, for names of `lines`. A short bar on a line is where
    it reaches half of its largest value. links: name -> bytes per second of one link, a thin level line.

    Raises ValueError without a line, and for measured points without one.
    """
    measured = measured or {}
    if not lines or not set(measured) <= set(lines):
        raise ValueError(f"measured points belong to a line; there are {', '.join(lines) or 'none'}")
    halves = {name: _half(*line) for name, line in lines.items()}
    with styled():
        fig = new_figure(7.2, 3.6)
        axes = fig.subplots()
        for number, (name, (sizes, rates)) in enumerate(lines.items()):
            axes.plot(sizes, [rate / 1e9 for rate in rates], LINES[number % 4], color=SEQUENCE[number], label=name)
            axes.plot([halves[name]], [max(rates) / 2e9], "|", color=SEQUENCE[number], ms=14, mew=2.5)
            if name in measured:
                axes.plot(measured[name][0], [rate / 1e9 for rate in measured[name][1]], "o", color=SEQUENCE[number],
                          label=f"{name}, measured")  # fmt: skip
        for name, rate in (links or {}).items():
            axes.axhline(rate / 1e9, color=INK, lw=0.8, label=name)
        axes.set(xscale="log", xlabel="size of the tensor", ylabel="bus bandwidth (GB/s)", ylim=(0, None))
        axes.xaxis.set_major_locator(LogLocator(10, numticks=12))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _in_bytes(value)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid()
        handles = [*axes.get_legend_handles_labels()[0], Line2D([], [], ls="", marker="|", ms=11, mew=2.5, color=INK,
                   label="half of its largest")]  # fmt: skip
        fig.legend(handles=handles, loc="outside upper left", ncols=2)
    told = "; ".join(f"{name} half at {_in_bytes(half)}" for name, half in halves.items())
    return Figure(fig, f"Bus bandwidth by size: {told}.")


def _half(sizes: Sequence[float], rates: Sequence[float]) -> float:
    """Return the first size at which the rate is half of the largest one."""
    return next(size for size, rate in zip(sizes, rates) if rate >= max(rates) / 2)


def _in_bytes(size: float) -> str:
    """Say a size in two digits: `8.8 MB`, `1 GB`."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{float(f'{size / unit:.2g}'):g} {name}"
    return f"{size:g} B"
