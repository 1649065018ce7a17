"""Collectives on CUDA tensors: two ranks that share one GPU (gloo, through pinned host memory)."""

from __future__ import annotations

import pytest
import torch

from labkit.comm import collectives as c
from labkit.launch import run
from labkit.parallel import Group

pytestmark = pytest.mark.gpu


def through_the_host() -> None:
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    group = Group("tp", tuple(range(size)), rank, torch.distributed.group.WORLD)
    peer = 1 - rank
    for dtype in (torch.float32, torch.bfloat16):
        ours, theirs = (torch.arange(8, device="cuda").to(dtype).view(4, 2) * (r + 1) for r in (rank, peer))
        both = torch.stack([ours, theirs] if rank == 0 else [theirs, ours])
        results = {
            "all_reduce": (c.all_reduce(ours.clone(), group), ours + theirs),
            "all_reduce, new": (c.all_reduce(ours, group, "max", in_place=False), torch.maximum(ours, theirs)),
            "all_gather": (c.all_gather(ours, group, dim=1), torch.cat(both.unbind(), dim=1)),
            "reduce_scatter": (c.reduce_scatter(ours, group), (ours + theirs).chunk(2)[rank]),
            "all_to_all": (c.all_to_all(ours, group), torch.cat([x.chunk(2)[rank] for x in both])),
            "broadcast": (c.broadcast(ours.clone(), group, src=1), both[1]),
        }
        received = torch.empty_like(ours)
        transfers = c.batch([c.Message("send", ours, group, peer), c.Message("recv", received, group, peer)])
        for transfer in transfers:
            transfer.wait()
        results["messages"] = (received, theirs)
        for name, (got, expected) in results.items():
            assert got.is_cuda, f"{name} left the GPU"
            torch.testing.assert_close(got, expected, rtol=0, atol=0, msg=lambda m, name=name: f"{name}: {m}")


def test_ranks_that_share_a_gpu_get_what_the_definition_says() -> None:
    run(through_the_host, 2, backend="gloo", device="cuda", timeout=120.0)
