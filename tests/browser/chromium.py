"""The browser of these tests, or why there is none."""

from __future__ import annotations

import importlib.util
import os
import shutil


def why_not() -> str:
    """What is missing for a test in a browser; empty where nothing is."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed (pip install playwright)"
    return "" if executable() else "no chromium on the path: install it, or set CHROMIUM to its executable"


def executable() -> str | None:
    """Path of the browser."""
    names = (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if name and (found := shutil.which(name))), None)
