"""A sample with masked words: the tokens of the text, and below each the token that the model sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.patches import Patch

from labkit.viz.figure import Figure
from labkit.viz.style import SEQUENCE, box, new_figure, styled

_WIDTH = 7.4
_CHARACTERS = 88
"""Characters that fit on a line, in the figure's font."""
_STEP = 2.2
"""Height of a line: a token, what the model sees in its place, and a gap."""
_PLAIN, _ADDED = "#F0F0F0", "#FFFFFF"
KINDS = {"mask": SEQUENCE[0], "random": SEQUENCE[1], "same": SEQUENCE[2]}
"""Colour of a token to predict, by the way in which the model sees it."""
_LABELS = {"mask": "shown as [MASK]", "random": "shown as a random token", "same": "shown as it is"}


def masked_words(text: Sequence[str], shown: Sequence[str], spans: Sequence[Sequence[int]], mask: str) -> Figure:
    """Draw the tokens of a sample in lines. Under each coloured token is the token that the model sees.

    text: the tokens. shown: the tokens that the model sees. spans: positions of each n-gram to predict; a black line
    joins the tokens of an n-gram. mask: the token that hides others.

    Raises ValueError if the two texts are not equally long, or if a token outside of the n-grams differs.
    """
    if len(text) != len(shown):
        raise ValueError(f"{len(text)} tokens of the text and {len(shown)} that the model sees are not pairs")
    chosen = {position for span in spans for position in span}
    if odd := [place for place, (a, b) in enumerate(zip(text, shown)) if a != b and place not in chosen]:
        raise ValueError(f"token {odd[0]} differs and is in no n-gram")
    kinds = {p: "mask" if shown[p] == mask else "same" if shown[p] == text[p] else "random" for p in chosen}
    places, lines = _places(text, shown, spans)
    with styled():
        fig = new_figure(_WIDTH, 0.6 + 0.48 * lines)
        axes = fig.subplots()
        for position, (line, start, width) in enumerate(places):
            _draw_token(axes, _STEP * line, start, width, text[position], shown[position], kinds.get(position))
        for span in spans:
            _draw_span(axes, [places[position] for position in span])
        axes.set(xlim=(0, _CHARACTERS), ylim=(_STEP * lines, 0))
        axes.axis("off")
        handles = [Patch(facecolor=shade, label=_LABELS[kind]) for kind, shade in KINDS.items()]
        fig.legend(handles=handles, loc="outside lower center", ncols=3)
    counts = [sum(kind == each for kind in kinds.values()) for each in KINDS]
    share = 100 * len(chosen) / max(1, len(text))
    return Figure(
        fig,
        f"{len(text)} tokens, of which {len(chosen)} ({share:.0f}%) in {len(spans)} n-grams are to be predicted: "
        f"{counts[0]} shown as {mask}, {counts[1]} as a random token, {counts[2]} as it is.",
    )


def _places(
    text: Sequence[str], shown: Sequence[str], spans: Sequence[Sequence[int]]
) -> tuple[list[tuple[int, float, float]], int]:
    """Return (line, first character, width) of each token, and the number of lines; an n-gram begins a line if it must.

    An n-gram that is longer than a line is broken like any text.
    """
    found, line, start = list[tuple[int, float, float]](), 0, 0.0
    widths = [max(map(len, pair)) + 1.6 for pair in zip(text, shown)]
    together = {span[0]: sum(widths[p] + 0.3 for p in span) - 0.3 for span in spans if span}
    for position, width in enumerate(widths):
        if start + max(width, together.get(position, 0.0)) > _CHARACTERS and start:
            line, start = line + 1, 0.0
        found.append((line, start, width))
        start += width + 0.3
    return found, line + 1


def _draw_token(axes: Any, top: float, start: float, width: float, token: str, seen: str, kind: str | None) -> None:
    special = token.startswith("[") and token.endswith("]")
    fill = KINDS[kind] if kind else _ADDED if special else _PLAIN
    box(axes, (start, top + 0.1), width, 0.9, fill, token, size=7, edgecolor="#CCCCCC")
    if kind:
        axes.text(start + width / 2, top + 1.5, seen, ha="center", va="center", fontsize=7, color="#333333")


def _draw_span(axes: Any, places: Sequence[tuple[int, float, float]]) -> None:
    """Draw a line above the tokens of an n-gram, in each line of text that it reaches."""
    for line in sorted({each[0] for each in places}):
        own = [each for each in places if each[0] == line]
        axes.hlines(_STEP * line + 0.03, own[0][1], own[-1][1] + own[-1][2], color="#000000", linewidth=1.6)
