"""Show something to the reader, in a notebook or in a terminal."""

from __future__ import annotations

import sys
import textwrap
from typing import Any

from labkit.check.boxed import WIDTH


def show(output: Any) -> None:
    """Display it as Jupyter does for the last line of a cell, or print it where there is no notebook, in lines of
    WIDTH, since the sentence of a picture may have more."""
    ipython = sys.modules.get("IPython")
    if ipython and ipython.get_ipython():
        ipython.display.display(output)
    else:
        lines = (textwrap.fill(line, WIDTH) if len(line) > WIDTH else line for line in str(output).split("\n"))
        print(*lines, sep="\n")
