"""The `labkit` command. `main` reads the command line and returns the exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.lazy import public_names

if TYPE_CHECKING:
    from labkit.cli.command_line import main as main

__all__, __getattr__, __dir__ = public_names(__name__)
