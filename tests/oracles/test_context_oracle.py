"""Our cut of a batch beside megatron-core's, position ids and attention mask included."""

from __future__ import annotations

import pytest
import torch

from labkit.config import ParallelConfig
from labkit.launch import run
from labkit.parallel import initialize_model_parallel
from labkit.parallel.context.zigzag import get_batch_on_this_cp_rank, zigzag_positions

pytestmark = pytest.mark.oracle


def both(cp: int) -> None:
    """Compare on this rank."""
    from megatron.core.utils import get_batch_on_this_cp_rank as megatrons

    group = initialize_model_parallel(ParallelConfig(cp=cp)).cp
    length = 6 * cp
    batch = {
        "tokens": torch.randint(0, 99, (3, length), generator=torch.Generator().manual_seed(0)),
        "loss_mask": torch.rand(3, length, generator=torch.Generator().manual_seed(1)),
        "position_ids": torch.arange(length).expand(3, -1).contiguous(),
        "attention_mask": torch.ones(3, 1, length, length).tril() < 0.5,
        "packed": None,
    }
    ours, theirs = get_batch_on_this_cp_rank(batch, group), megatrons(dict(batch), group.process_group)
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name] is None if tensor is None else torch.equal(ours[name], tensor), name
    assert torch.equal(theirs["position_ids"][0], zigzag_positions(length, cp, group.rank))


@pytest.mark.parametrize("cp", [2, 4, pytest.param(8, marks=pytest.mark.sweep)])
def test_the_cut_is_megatrons(cp: int) -> None:
    run(both, cp, cp, timeout=120)
