"""An adaptive `LossScaler` against megatron-core's `DynamicGradScaler`, on random sequences of good and bad steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.train.loss_scaler import BACKOFF, GROWTH, LossScaler

pytestmark = pytest.mark.oracle
megatron = pytest.importorskip("megatron.core.optimizer.grad_scaler", reason="needs megatron-core (extra: oracles)")


def theirs(**arguments: float) -> object:
    """Megatron's scaler on the host: its constructor asks for CUDA tensors, so it gets a torch without devices."""

    def tensor(values: list[float], *, dtype: torch.dtype, device: str) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron, "torch", SimpleNamespace(tensor=tensor, float=torch.float))
        return megatron.DynamicGradScaler(**arguments)


@settings(deadline=None, max_examples=200)
@given(
    steps=st.lists(st.booleans(), max_size=80),
    interval=st.integers(1, 6),
    hysteresis=st.integers(1, 4),
    min_scale=st.sampled_from([1.0, 16.0, 1024.0]),
)
def test_the_same_scales_step_by_step(steps: list[bool], interval: int, hysteresis: int, min_scale: float) -> None:
    common = {"min_scale": min_scale, "growth_interval": interval, "hysteresis": hysteresis}
    reference = theirs(initial_scale=4096.0, growth_factor=GROWTH, backoff_factor=BACKOFF, **common)
    ours = LossScaler(4096.0, adaptive=True, **common)
    for found_inf in steps:
        reference.update(found_inf)
        ours.update(found_inf)
        assert ours.scale == reference.scale.item()
        assert ours.good_steps == reference._growth_tracker
        assert ours.hysteresis_left == reference._hysteresis_tracker
