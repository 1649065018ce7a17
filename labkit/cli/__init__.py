"""The `labkit` command. `main` reads the command line and returns the exit code; `train_script` does so
for a script that trains."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # nothing is imported before `main` can answer Ctrl-C
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from labkit.cli.train_command import train_script as train_script

__all__ = ["main", "train_script"]


def __getattr__(name: str) -> Any:
    if name != "train_script":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from labkit.cli.train_command import train_script

    return train_script


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (`sys.argv` by default) and return the exit code (`labkit.cli.command_line`)."""
    try:
        from labkit.cli.command_line import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return run(argv)
