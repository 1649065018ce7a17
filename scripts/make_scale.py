"""Write docs/scale.md and its figures: the tables of scale of the literature, predicted beside published.

    python scripts/make_scale.py

The words of the page are in scripts/scale_page/page.md; each `{{name}}` there is a table or number from `contents`.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable

from scale_page import (
    belief,
    figures,
    folding_tables,
    goodput_tables,
    megatron_tables,
    memory_tables,
    numbers,
    pipeline_tables,
    ranking_tables,
)
from scale_page.compared import ROOT

from labkit.viz.figure import Figure

TARGET = ROOT / "docs" / "scale.md"
TEMPLATE = ROOT / "scripts" / "scale_page" / "page.md"
FIGURES: dict[str, Callable[[], Figure]] = {
    "scale_errors.png": figures.errors,
    "scale_weak.png": figures.weak_scaling,
}
"""File in docs/ -> its figure."""


def contents() -> dict[str, Callable[[], str]]:
    """Return what the markers of the template stand for."""
    return {
        "errors by source": lambda: belief.errors_by_source(specified=True),
        "errors of other sources": lambda: belief.errors_by_source(specified=False),
        "ranking": ranking_tables.ranked,
        "where it is wrong": belief.where_it_is_wrong,
        "large errors": belief.large_errors,
        "bubbles": pipeline_tables.bubbles,
        "small messages": belief.small_messages,
        "not expressible": belief.not_expressible,
        "filled in": belief.filled_in,
        "what sources say": belief.what_sources_say,
        "filled in of recorded runs": belief.filled_in_of_recorded_runs,
        "memory of table 1": memory_tables.table_1,
        "weak scaling": megatron_tables.weak_scaling,
        "epochs": megatron_tables.epochs,
        "heads": megatron_tables.heads,
        "strong scaling": megatron_tables.strong_scaling,
        "a trillion": megatron_tables.a_trillion,
        "against ZeRO": megatron_tables.against_zero,
        "one layer": megatron_tables.one_layer,
        "recomputation": megatron_tables.recomputation,
        "pipelines 4": lambda: pipeline_tables.pipelines("zb_t4"),
        "pipelines 6": lambda: pipeline_tables.pipelines("zb_t6"),
        "too large": folding_tables.too_large,
        "foldings 3": lambda: folding_tables.foldings("fold_t3"),
        "foldings 2": lambda: folding_tables.foldings("fold_t2"),
        "foldings 4": lambda: folding_tables.foldings("fold_t4"),
        "foldings 5": lambda: folding_tables.foldings("fold_t5"),
        "recorded runs": memory_tables.recorded_runs,
        "recorded runs left out": memory_tables.recorded_left_out,
        "large models": memory_tables.large_models,
        "goodput of llama 3": goodput_tables.published,
        "goodput by size": goodput_tables.by_size,
        **numbers.numbers(),
    }


def page(pictures: dict[str, Figure]) -> str:
    """Return the page; `pictures` are those of `FIGURES`."""
    made = contents()
    made |= {name: (lambda name=name: f"![{pictures[name].sentence}]({name})") for name in pictures}
    text = TEMPLATE.read_text(encoding="utf-8")
    unused = made.keys() - set(re.findall(r"\{\{(.+?)\}\}", text))
    if unused:
        raise ValueError(f"{TEMPLATE.name} has no marker for {', '.join(sorted(unused))}")
    return wrapped(re.sub(r"\{\{(.+?)\}\}", lambda found: made[found[1]]().rstrip("\n"), text))


def wrapped(text: str) -> str:
    """Return the text with its paragraphs in lines of up to 120 characters; tables and pictures stay as they are."""
    wrapper = textwrap.TextWrapper(120, break_long_words=False, break_on_hyphens=False)
    blocks = text.rstrip("\n").split("\n\n")
    return (
        "\n\n".join(
            block
            if block.startswith(("#", "|", "!", "<"))
            else wrapper.fill(block.replace(" %", "\0%")).replace("\0%", " %")
            for block in blocks
        )
        + "\n"
    )


def drawn() -> dict[str, Figure]:
    """Return the figures by file."""
    return {name: draw() for name, draw in FIGURES.items()}


def main() -> int:
    """Write the page and its figures."""
    pictures = drawn()
    TARGET.write_text(page(pictures), encoding="utf-8")
    for name, picture in pictures.items():
        picture.save(TARGET.with_name(name))
    print(f"wrote {TARGET.relative_to(ROOT)} and {', '.join(pictures)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
