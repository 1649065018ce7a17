"""NCCL on one GPU: each collective called directly, eagerly and in a graph.

`collectives` leaves out the transfer in a group of one rank, so nothing above it would reach NCCL here. What a
collective of one rank returns is known; that it is called with arguments that NCCL takes, that its result is ordered
behind what computed the input, and that a capture holds it, is what these tests show. Messages need two GPUs: torch
refuses a send to oneself.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from labkit.comm import nccl
from labkit.launch import run
from labkit.parallel import Group

pytestmark = pytest.mark.gpu

Call = Callable[[Tensor, Group], Tensor]
CALLS: dict[str, Call] = {
    **{
        f"all_reduce, {op}{', in place' * in_place}": lambda x, group, op=op, in_place=in_place: nccl.all_reduce(
            x, group, op, in_place
        )()
        for op, in_place in product(("sum", "avg", "max"), (False, True))
    },
    "all_reduce of a transposed tensor": lambda x, group: nccl.all_reduce(x.t(), group, "sum", True)().t(),
    "all_gather": lambda x, group: nccl.all_gather(x, group, 0, None, None)(),
    "all_gather of columns": lambda x, group: nccl.all_gather(x, group, 1, None, None)(),
    "all_gather into its own part": lambda x, group: nccl.all_gather(x, group, 0, None, x)(),
    "all_gather of unequal parts": lambda x, group: nccl.all_gather(x, group, 0, [len(x)], None)(),
    "reduce_scatter": lambda x, group: nccl.reduce_scatter(x, group, 0, "sum", None, None)(),
    "reduce_scatter of columns": lambda x, group: nccl.reduce_scatter(x, group, 1, "sum", None, None)(),
    "reduce_scatter into its own part": lambda x, group: nccl.reduce_scatter(x, group, 0, "avg", None, x)(),
    "reduce_scatter of unequal parts": lambda x, group: nccl.reduce_scatter(x, group, 0, "sum", [len(x)], None)(),
    "all_to_all": lambda x, group: nccl.all_to_all(x, group, None, None)(),
    "all_to_all, uneven": lambda x, group: nccl.all_to_all(x, group, [len(x)], [len(x)])(),
    "broadcast": lambda x, group: nccl.broadcast(x, group, 0)(),
}
"""Each returns what it was given: the only rank's sum, mean, maximum and part."""


def eager(dtype: torch.dtype) -> dict[str, bool]:
    group = Group("dp", (0,), 0, dist.group.WORLD)
    assert dist.get_backend() == "nccl"
    found = {}
    for name, call in CALLS.items():
        x = torch.randn(2048, 2048, device="cuda")
        for _ in range(4):
            x = (x @ x).tanh()  # under way while the collective is called
        expected = x.to(dtype, copy=True)
        result = call(x.to(dtype), group)
        found[name] = result.shape == expected.shape and torch.equal(result, expected)
    return found


def captured() -> dict[str, bool]:
    group, side = Group("dp", (0,), 0, dist.group.WORLD), torch.cuda.Stream()
    found = {}
    for name, call in CALLS.items():
        given = torch.ones(64, 32, device="cuda")
        with torch.cuda.stream(side):
            call(given * 2, group)  # NCCL connects outside the capture
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            result = call(given * 2, group) + 1
        right = True
        for value in (3.0, 5.0):
            given.fill_(value)
            graph.replay()
            right &= torch.equal(result, torch.full_like(given, 2 * value + 1))
        found[name] = right
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_collective_returns_what_its_only_rank_gave(dtype: torch.dtype) -> None:
    [found] = run(eager, 1, dtype, backend="nccl", device="cuda", timeout=180)
    assert found == dict.fromkeys(CALLS, True)


def test_every_collective_is_captured_and_replayed_with_new_values() -> None:
    [found] = run(captured, 1, backend="nccl", device="cuda", timeout=180)
    assert found == dict.fromkeys(CALLS, True)
