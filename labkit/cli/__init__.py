"""The `labkit` command. `main` runs a command line and returns the exit code; `train_script` does the same for a script
that trains, and ends the process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from labkit.lazy import public_names

if TYPE_CHECKING:
    from labkit.cli.train_command import train_script as train_script

_, __getattr__, __dir__ = public_names(__name__)
__all__ = ["main", "train_script"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (`sys.argv` by default) and return the exit code (`labkit.cli.command_line`)."""
    try:
        from labkit.cli.command_line import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return run(argv)
