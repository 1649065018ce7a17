"""Pictures of benchmarks: the ratio of labkit's time to a peer's, with a dot for each row and peer."""

from __future__ import annotations

import json
import math
from pathlib import Path
from textwrap import shorten
from typing import Any

from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
"""Of Okabe and Ito, which colour-blind readers can tell apart."""
_MARKERS = "os^Dv<>P"


def with_ratios(page: str, folder: Path, link: str) -> str:
    """Return docs/benchmarks.md with a picture below the title of each benchmark that has peers.

    Writes the pictures into `folder`, to which `link` leads. Raises ValueError if the page lacks a benchmark's title.
    """
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        rows = [row for row in result["rows"] if row.get("ratio_to")]
        if not rows:
            continue
        title = f"## {result['title']}\n"
        if title not in page:
            raise ValueError(f"docs/benchmarks.md lacks {result['title']!r}; python benchmarks/table.py writes it anew")
        figure(rows).savefig(folder / f"{path.stem}.svg", transparent=True, metadata={"Date": None})
        ratios = [ratio for row in rows for ratio in row["ratio_to"].values()]
        words = f"Ratios of labkit's time to that of each peer, between {min(ratios):.2f} and {max(ratios):.2f}"
        page = page.replace(title, f"{title}\n![{words}]({link}/{path.stem}.svg)\n")
    return page


def figure(rows: list[dict[str, Any]]) -> Figure:
    """One line for each row, and a dot for each of its peers; to the left of 1 labkit takes less time."""
    drawn = Figure(figsize=(6.4, 1.2 + 0.5 * len(rows)), layout="constrained")
    axes = drawn.subplots()
    peers = list(dict.fromkeys(peer for row in rows for peer in row["ratio_to"]))
    for index, peer in enumerate(peers):
        dots = [(row["ratio_to"][peer], place) for place, row in enumerate(rows) if peer in row["ratio_to"]]
        axes.plot(*zip(*dots), _MARKERS[index % len(_MARKERS)], color=_COLOURS[index % len(_COLOURS)], label=peer)
    for place, row in enumerate(rows):
        axes.axhline(place, color="0.85", linewidth=0.8, zorder=0)
        words = shorten(row["case"], 80, placeholder=" ...")
        axes.annotate(words, (0, place), (2, 7), axes.get_yaxis_transform(), "offset points", fontsize=9)
    axes.axvline(1, color="black", linewidth=0.8, zorder=0)
    axes.set(xscale="log", yticks=[], ylim=(len(rows) - 0.5, -0.8), xlabel="labkit's time / the peer's, log scale")
    ratios = [ratio for row in rows for ratio in row["ratio_to"].values()]
    first, last = math.floor(math.log2(min(*ratios, 0.8))), math.ceil(math.log2(max(*ratios, 1.25)))
    ticks = [2.0**power for power in range(first, last + 1)]
    axes.set_xlim(ticks[0], ticks[-1])
    axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    drawn.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return drawn
