"""What the GPU benchmark of experts makes of a profile, and of its loads; measured it is elsewhere."""

from __future__ import annotations

import gpu_moe
import pytest
import torch
from gpu_moe_layers import before_activation
from gpu_profile import Op


def kernel(name: str, start: float, end: float) -> Op:
    return Op((name,), start, end, on_gpu=True)


def test_idle_time_is_what_no_kernel_covers() -> None:
    overlapping = [kernel("gemm", 0, 10), kernel("gemm", 5, 12), kernel("gemm", 20, 21), kernel("silu_kernel", 24, 30)]
    found = before_activation([overlapping[3], *overlapping[:3], kernel("mul", 40, 41)])
    assert found == {"launches": 3, "idle_us_between": 8, "idle_us_before_activation": 3}
    alone = before_activation([kernel("silu", 3, 4)])
    assert alone == {"launches": 0, "idle_us_between": 0, "idle_us_before_activation": 0}
    with pytest.raises(ValueError, match=r"no kernel is named like silu: \['gemm'\]"):
        before_activation([kernel("gemm", 0, 1)])


@pytest.mark.parametrize("experts", gpu_moe.SHAPES)
def test_every_load_has_all_rows(experts: int) -> None:
    loads = {name: spread(experts) for name, spread in gpu_moe.LOADS.items()}
    assert all(int(counts.sum()) == gpu_moe.ROWS and counts.dtype == torch.int64 for counts in loads.values())
    assert len(set(loads["even"].tolist())) == 1
    assert int(loads["nearly even"].max()) <= 1.1 * gpu_moe.ROWS / experts < int(loads["skewed"].max())
    assert int(loads["skewed"].min()) == 0
