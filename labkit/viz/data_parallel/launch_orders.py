"""Which buckets meet: the order in which two ranks start their all-reduces, below and above the gradients that arrive.

A collective has no name, so the first that rank 0 starts meets the first that rank 1 starts, whatever it contains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.viz.figure import Figure
from labkit.viz.style import ALERT, INK, box, new_figure, nth_color, styled

Step = Sequence[tuple[str, str]]
"""What a rank sees in a backward, in order: (`arrives` or `starts`, name of the bucket)."""
_ROW, _GAP, _TITLE, _BELOW = 0.24, 0.34, 0.3, 0.24
"""Inches of a row, of the lines between two ranks, of a title, and below a pair of ranks."""
_WIDE = 0.92
"""Width of a start; a gradient has the width 1."""
_NAMES, _LETTER = 1.45, 0.068
"""Inches of the rows' names, and of a letter in a box."""


def bucket_meetings(runs: Mapping[str, Sequence[Step]], *, names: Sequence[str] | None = None) -> Figure:
    """Draw for each run which gradients arrive on two ranks, which bucket each starts, and which of them meet.

    runs: name -> the steps of rank 0 and rank 1; a gradient and a start have the colour of their bucket. A start is
    below (above) the gradient after which it happens. A red line joins two starts of different buckets, whose gradients
    are then added up. names: the buckets in the order of their colours (default: by alphabet), so that a bucket keeps
    its colour from one picture to the next.

    The sentence says how many starts meet another bucket or collective. Raises ValueError if a run does not
    have two ranks, or if a bucket is not among names.
    """
    for name, ranks in runs.items():
        if len(ranks) != 2:
            raise ValueError(f"{name}: {len(ranks)} ranks; give the steps of two")
    every = sorted({bucket for ranks in runs.values() for step in ranks for _, bucket in step})
    if names is not None and (unknown := set(every) - set(names)):
        raise ValueError(f"no colour for {', '.join(sorted(unknown))}; names has {', '.join(names)}")
    fills = {bucket: nth_color(number) for number, bucket in enumerate(names or every)}
    every_step = [step for ranks in runs.values() for step in ranks]
    width = max(max(len([what for what, _ in step if what == "arrives"]), *(x + _WIDE for _, x in _starts(step)))
                for step in every_step)  # fmt: skip
    inches = 0.12 + _LETTER * max(map(len, every))
    panel = _TITLE + 4 * _ROW + _GAP + _BELOW
    with styled():
        fig = new_figure(_NAMES + inches * width + 0.2, panel * len(runs))
        axes = fig.subplots()
        for number, (name, ranks) in enumerate(runs.items()):
            axes.text(-_NAMES / inches, number * panel + _TITLE - 0.1, name, fontsize=9, fontweight="bold", va="bottom")
            _draw_pair(axes, ranks, fills, number * panel)
        axes.set(xlim=(-_NAMES / inches, width + 0.2 / inches), ylim=(panel * len(runs), 0))
        axes.axis("off")
    return Figure(fig, "; ".join(f"{name}: {_words(ranks)}" for name, ranks in runs.items()) + ".")


def _starts(step: Step) -> list[tuple[str, float]]:
    """Return the buckets that a rank starts, each with the place of its box; starts at one moment follow each other."""
    found: list[tuple[str, float]] = []
    arrived, free = 0, 0.0
    for what, bucket in step:
        if what == "arrives":
            arrived += 1
        else:
            place = max(arrived - _WIDE / 2, free)
            found.append((bucket, place))
            free = place + 1
    return found


def _draw_pair(axes: Any, ranks: Sequence[Step], fills: Mapping[str, str], top: float) -> None:
    """Draw two ranks: gradients of rank 0, its starts, the meetings, the starts of rank 1, its gradients."""
    first = top + _TITLE
    second = first + 2 * _ROW + _GAP
    rows = ((first, first + _ROW), (second + _ROW, second))
    for rank, (step, (gradients, starts)) in enumerate(zip(ranks, rows, strict=True)):
        for words, y in ((f"rank {rank}: gradients", gradients), (f"rank {rank}: starts", starts)):
            axes.text(-0.12, y + _ROW / 2, words, ha="right", va="center", fontsize=8)
        arrivals = [bucket for what, bucket in step if what == "arrives"]
        for place, bucket in enumerate(arrivals):
            box(axes, (place, gradients), 1, _ROW, fills[bucket], bucket, edgecolor="#FFFFFF")
        for bucket, place in _starts(step):
            box(axes, (place, starts + 0.02), _WIDE, _ROW - 0.04, fills[bucket], bucket, linewidth=1.4)
    for (mine, left), (theirs, right) in zip(*map(_starts, ranks)):
        ends = [left + _WIDE / 2, right + _WIDE / 2], [first + 2 * _ROW, second]
        axes.plot(*ends, color=INK if mine == theirs else ALERT, linewidth=1.2 if mine == theirs else 2.4)


def _words(ranks: Sequence[Step]) -> str:
    pairs = [(mine, theirs) for (mine, _), (theirs, _) in zip(*map(_starts, ranks))]
    mixed = sum(mine != theirs for mine, theirs in pairs)
    return f"{mixed} of {len(pairs)} starts {'meets' if mixed == 1 else 'meet'} something else"
