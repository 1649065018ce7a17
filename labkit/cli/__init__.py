"""The `labkit` command. `main` reads the command line and returns the exit code."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.cli.command_line import main

__all__ = ["main"]


def __getattr__(name: str) -> Any:
    if name == "main":
        return importlib.import_module("labkit.cli.command_line").main
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
