"""The browser of these tests, or why there is none; a port and settings for a Jupyter of their own."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
from pathlib import Path


def why_not() -> str:
    """What is missing for a test in a browser; empty where nothing is."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed (pip install playwright)"
    return "" if executable() else "no chromium on the path: install it, or set CHROMIUM to its executable"


def executable() -> str | None:
    """Path of the browser."""
    names = (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def own_settings(folder: Path) -> dict[str, str]:
    """Variables by which Jupyter reads and writes its settings in `folder`, as for a user who has none."""
    return {name: str(folder / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")}
