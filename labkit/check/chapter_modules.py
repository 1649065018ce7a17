"""Import the modules that contain the exercises and predictions of chapters; each registers its own."""

from __future__ import annotations

import importlib
import sys
from pkgutil import iter_modules


def load_chapters(chapter: str | None = None) -> None:
    """Import the modules of all chapters, or that of one (`02`), where there is one."""
    for _, module, _ in iter_modules(sys.modules["labkit.check"].__path__):
        if module.startswith(f"chapter_{chapter or ''}") and module[8:].isdigit():
            importlib.import_module(f"labkit.check.{module}")
