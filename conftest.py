"""`pytest --nbval notebooks` compares what chapters print; rounding is of the machine, not of the chapter."""

from pathlib import Path

import pytest

ROUNDING = Path(__file__).parent / "tests" / "notebooks" / "rounding.cfg"


def pytest_configure(config: pytest.Config) -> None:
    """nbval reads `ROUNDING` unless a command names a file of its own."""
    if getattr(config.option, "nbval", False) and not config.option.nbval_sanitize_with:
        config.option.nbval_sanitize_with = str(ROUNDING)
