"""Makes `benchmarks/megatron_on_cpu.py` importable for the oracle tests, here and in the ranks they launch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from labkit.launch import preload

# Every optimizer of torch imports the one, megatron-core the other: two seconds in each rank, or once in the server.
preload("torch._dynamo", "torch._inductor.compile_fx")

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
if BENCHMARKS not in sys.path:
    sys.path.append(BENCHMARKS)


@pytest.fixture(autouse=True)
def torch_stays_as_it_is() -> Iterator[None]:
    """`megatron_on_cpu` patches torch for good: imported here and not in a rank, it breaks later tests of others."""
    yield
    assert "megatron_on_cpu" not in sys.modules, "import megatron_on_cpu inside a function that `run` calls on a rank"
