"""Makes `benchmarks/megatron_on_cpu.py` importable for the oracle tests, here and in the ranks they launch."""

from __future__ import annotations

import sys
from pathlib import Path

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
if BENCHMARKS not in sys.path:
    sys.path.append(BENCHMARKS)
