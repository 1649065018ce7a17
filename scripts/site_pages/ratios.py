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
        figure(rows).savefig(folder / f"{path.stem}.svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
        ratios = [ratio for row in rows for ratio in row["ratio_to"].values()]
        words = f"Ratios of labkit's time to that of each peer, between {min(ratios):.2f} and {max(ratios):.2f}"
        page = page.replace(title, f"{title}\n![{words}]({link}/{path.stem}.svg)\n")
    return page


def figure(rows: list[dict[str, Any]]) -> Figure:
    """One line for each row, and a dot for each of its peers; to the left of 1 labkit takes less time."""
    drawn = Figure(figsize=(8, 0.9 + 0.28 * len(rows)))
    axes = drawn.subplots()
    peers = list(dict.fromkeys(peer for row in rows for peer in row["ratio_to"]))
    for index, peer in enumerate(peers):
        found = [(row["ratio_to"][peer], place) for place, row in enumerate(rows) if peer in row["ratio_to"]]
        marker = "os^Dv<>P"[index % 8]
        axes.plot(*zip(*found), marker, color=_COLOURS[index % len(_COLOURS)], label=peer)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [shorten(row["case"], 60, placeholder=" ...") for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xscale("log")
    ratios = [ratio for row in rows for ratio in row["ratio_to"].values()]
    low, high = math.floor(math.log2(min(*ratios, 0.8))), math.ceil(math.log2(max(*ratios, 1.25)))
    ticks = [2.0**power for power in range(low, high + 1)]
    axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_xlabel("labkit's time / the peer's (log scale)")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize="small", frameon=False)
    return drawn
