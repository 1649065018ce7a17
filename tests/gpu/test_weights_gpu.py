"""Weights that a GPU draws itself: they lie there from the start, repeat, and are normal."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from labkit.config import ModelConfig
from labkit.models import GPTModel
from labkit.parallel import Group, make_parameter, single_process_groups
from labkit.parallel.parameters.weights import DeviceSeed

pytestmark = pytest.mark.gpu

ON_DEVICE = ModelConfig(layers=2, hidden=64, heads=4, vocab_size=301, seq_length=32, use_cpu_initialization=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_normal_and_repeat(dtype: torch.dtype) -> None:
    def part(rank: int) -> torch.Tensor:
        group = Group("tp", (0, 1), rank)
        made = {"seed": DeviceSeed(3), "std": 0.5, "dtype": dtype, "device": "cuda"}
        return make_parameter("w", (1000, 600), group=group, partition_dim=0, **made).detach()

    state = torch.cuda.get_rng_state()
    first, second = part(0), part(1)
    assert torch.equal(state, torch.cuda.get_rng_state()), "nobody else's numbers are used up"
    assert first.is_cuda and first.dtype == dtype and torch.equal(first, part(0)) and not torch.equal(first, second)
    both = torch.cat([first, second]).double()
    assert abs(float(both.mean())) < 0.005 and abs(float(both.std()) - 0.5) < 0.005


def test_a_model_starts_from_a_loss_like_that_of_weights_from_the_host() -> None:
    groups = single_process_groups()
    ids = torch.randint(0, ON_DEVICE.vocab_size, (3, 33), generator=torch.Generator().manual_seed(1)).cuda()
    losses = []
    for config in (ON_DEVICE, ON_DEVICE, replace(ON_DEVICE, use_cpu_initialization=True)):
        model = GPTModel(config, groups, layers=range(2), seed=1, device="cuda")
        assert all(parameter.is_cuda for parameter in model.parameters())
        losses.append(float(model(ids[:, :-1], labels_BS=ids[:, 1:]).mean().detach()))
    here, again, host = losses
    assert here == again != host and abs(here - host) < 0.1
