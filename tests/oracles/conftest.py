"""Makes `benchmarks/megatron_on_cpu.py` importable for the oracle tests, here and in the ranks they launch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
if BENCHMARKS not in sys.path:
    sys.path.append(BENCHMARKS)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks started here see no GPU, on machines that have one too: these tests make CPU tensors."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
