"""What tests on ranks begin with: a group of all ranks, and random tensors that are the same everywhere."""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.parallel import Group


def whole_world(name: str = "tp") -> Group:
    """All ranks as a group of this name."""
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    return Group(name, tuple(range(size)), rank, torch.distributed.group.WORLD)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Draw from the normal distribution."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
