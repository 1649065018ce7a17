"""The benchmark of fp8 operands, tiny and on a CPU: its rows, and what it says of a maker that is missing."""

from __future__ import annotations

import gpu_fp8_cast
import pytest
import torch
from harness import Comparison

from labkit.fp8 import operands as fp8_operands
from labkit.fp8.casting import E4M3, cast

TINY = {"tiny": (32, 48), "smaller": (16, 16)}


def test_rows_come_one_by_one_and_name_what_is_missing() -> None:
    rows = gpu_fp8_cast.fp8_cast(sizes=TINY, device=torch.device("cpu"), at_once=2, copied_bytes=4096)
    assert next(rows).case == "fp8 operand and its transpose: tiny, 32 x 48, 2 at once"
    last = next(rows).row()
    assert last["repetitions"] == 15
    assert last["missing"] == {
        "labkit, Triton": "its kernels do not run here",
        "Transformer Engine": "it needs a tensor on a GPU",
    }
    assert last["copy_gb_per_s"] > 0
    with pytest.raises(StopIteration):
        next(rows)


def test_a_rate_is_the_least_traffic_over_the_time() -> None:
    """1,000 values of 4 bytes in a microsecond are 4 GB/s, half of a copy of 8 GB/s."""
    found = gpu_fp8_cast._rates(Comparison("x", {"ours": [1e-6] * 15}, 0.0), 4000, 8e9, {})
    assert found.facts == {"copy_gb_per_s": 8.0, "gb_per_s": {"ours": 4.0}, "share_of_copy": {"ours": 0.5}}
    noisy = gpu_fp8_cast._rates(Comparison("x", {"ours": [1e-6, 1e-3] * 8}, 0.0), 4000, 8e9, {})
    assert noisy.rejected and "gb_per_s" not in noisy.facts


def test_torch_is_measured_with_the_copy_that_it_needs() -> None:
    x = torch.randn(32, 48, generator=torch.Generator().manual_seed(1)).bfloat16()
    makers, _ = gpu_fp8_cast.makers(x.device)
    values, columns = makers["labkit, torch"](x)
    expected = cast(x, torch.ones(()), E4M3)
    assert torch.equal(values.float(), expected.float()) and torch.equal(columns.float(), expected.float().t())
    assert columns.is_contiguous() and not fp8_operands._State.torch_alone


def test_no_operand_of_a_repetition_shares_memory_with_another() -> None:
    """So none is in the L2 cache already; the smallest row alone moves several times what an H100's holds."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def make(x: torch.Tensor) -> torch.Tensor:
        kept.append((x, x.clone()))
        return kept[-1][1]

    step = gpu_fp8_cast._each(make, [torch.ones(4) for _ in range(3)])
    step()
    assert len({tensor.data_ptr() for pair in kept for tensor in pair}) == 6
    smallest = min(rows * columns for rows, columns in gpu_fp8_cast.SIZES.values())
    assert 10 * smallest * gpu_fp8_cast.BYTES_A_VALUE > 10 * 50 * 2**20
