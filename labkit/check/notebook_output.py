"""Show something to the reader, in a notebook or in a terminal."""

from __future__ import annotations

import sys
from typing import Any


def show(output: Any) -> None:
    """Display it as Jupyter does for the last line of a cell, or print it where there is no notebook."""
    ipython = sys.modules.get("IPython")
    if ipython and ipython.get_ipython():
        ipython.display.display(output)
    else:
        print(output)
