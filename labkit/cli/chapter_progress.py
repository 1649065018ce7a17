"""The progress of a chapter on standard error: which cell runs, of how many, and for how long.

On a terminal of 60 columns or more one line is redrawn each second. It names the section and the first line of the
cell, and disappears when the chapter is over. Any other stream gets a whole line for each section that begins.
"""

from __future__ import annotations

import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from labkit.cli.output import room

NARROWEST = 60
"""Fewest columns of a terminal for a line that is redrawn."""
_FORMAT = "  {n_fmt}/{total_fmt} |{bar:12}| {elapsed}  {desc}"


@contextmanager
def showing_cells(chapter: str, cells: int) -> Iterator[Callable[..., None]]:
    """Yield a function for nbclient's hook `on_cell_start`. cells: all cells of the notebook, of any kind."""
    from tqdm.auto import tqdm

    bar = tqdm(
        total=cells, file=sys.stderr, disable=(room(sys.stderr) or 0) < NARROWEST, dynamic_ncols=True, leave=False,
        bar_format=_FORMAT, desc="starting the kernel",
    )  # fmt: skip
    over = threading.Event()
    section = told = ""

    def begin(cell: Any, cell_index: int) -> None:
        nonlocal section, told
        first = cell.source.strip().partition("\n")[0]
        if cell.cell_type != "code":
            section = first.lstrip("# ") if first.startswith("#") else section
        elif not bar.disable:
            bar.n = cell_index
            words = f"{section}: {first}" if section else first
            bar.set_description_str(textwrap.shorten(words, (room(sys.stderr) or NARROWEST) - 36, placeholder=" ..."))
        elif told != (told := section or first):
            print(f"{chapter}: cell {cell_index + 1} of {cells}, {told}", file=sys.stderr, flush=True)

    def tick() -> None:
        while not over.wait(1.0):
            bar.refresh()

    ticking = threading.Thread(target=tick)
    ticking.start()
    try:
        yield begin
    finally:
        over.set()
        ticking.join()
        bar.close()
