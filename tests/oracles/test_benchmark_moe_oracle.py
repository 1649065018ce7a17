"""The benchmark of the MoE layer with one repetition: megatron-core computes the same, and bytes are the least."""

from __future__ import annotations

import pytest
import torch

from labkit.launch import run

pytestmark = pytest.mark.oracle
CASE = "h256, 32 experts of 128, top 4"


def _measured(ep: int):
    import moe

    return moe.measure_layer(CASE, ep, 1)  # raises where outputs or gradients differ


@pytest.mark.sweep
def test_megatrons_layer_computes_the_same_and_only_what_must_travels() -> None:
    for found, row in run(_measured, 2, 2, timeout=180):
        assert set(found.seconds) == {"labkit", "labkit, one by one", "megatron-core"}
        assert found.rejected is not None, "one repetition is not quoted"
        assert row["rows_over_least"] == 1.0
        assert 1.0 < row["all_over_least"] <= 1.01
        assert row["weights"] * 2 * 256 == row["rows"], "one number for each row of H that comes and goes"


def test_the_loads_of_the_experts_have_all_rows() -> None:
    import moe

    for experts in moe.EXPERTS.values():
        for counts in (moe.even(experts), moe.skewed(experts)):
            assert int(counts.sum()) == moe.ROWS and counts.dtype == torch.int64
        assert moe.skewed(experts)[:3].tolist() == [moe.ROWS // 2, moe.ROWS // 4, moe.ROWS // 8]
