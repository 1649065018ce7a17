"""The `labkit` command. `main` reads the command line and returns the exit code; `train_script` does so
for a script that trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.lazy import public_names

if TYPE_CHECKING:
    from labkit.cli.command_line import main as main
    from labkit.cli.train_command import train_script as train_script

__all__, __getattr__, __dir__ = public_names(__name__)
