"""Runs the fake device in a process of its own and returns what it found, for tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fake_device.library import Unavailable, built

CHILD = Path(__file__).parent / "child.py"
Verdicts = dict[str, dict[str, Any]]


def verdicts_of(*words: str) -> Verdicts:
    """What a child found, by case; a skip where there can be no fake device."""
    try:
        built()
    except Unavailable as reason:
        pytest.skip(f"no fake device: {reason}")
    child = subprocess.run([sys.executable, str(CHILD), *words], capture_output=True, text=True, check=False)
    lines = [line for line in child.stdout.splitlines() if line.startswith("{")]
    assert child.returncode == 0, f"after {len(lines)} cases:\n{child.stderr[-3000:]}"
    return {found["name"]: found for found in map(json.loads, lines)}
