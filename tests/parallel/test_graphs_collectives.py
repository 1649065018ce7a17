"""Collectives and messages inside an emulated graph: made again at each replay, with the values of that replay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from inputs import random, whole_world
from torch import Tensor

from labkit.comm import collectives
from labkit.comm.capturing import GraphCaptureError
from labkit.comm.in_flight import all_to_all_start
from labkit.events import recording
from labkit.graphs.emulated.emulated_backend import EmulatedBackend
from labkit.parallel import CommLedger, Group, comm_scope, dropped
from labkit.parallel import mappings as m
from labkit.parallel.layers import ColumnParallelLinear, RowParallelLinear

BACKEND = EmulatedBackend()


def swap(x: Tensor, group: Group) -> Tensor:
    """Messages: to the next rank of the ring, from the previous one."""
    received = torch.empty_like(x)
    peers = [group.ranks[(group.rank + step) % group.size] for step in (1, -1)]
    sent, came = collectives.isend(x, group, peers[0]), collectives.irecv(received, group, peers[1])
    half = x * 0.5  # something to do on the way
    sent.wait()
    return came.wait() + half


def uneven(x: Tensor, group: Group) -> Tensor:
    splits = [x.shape[0] - group.size + 1] + [1] * (group.size - 1)  # most rows to rank 0
    came = [splits[group.rank]] * group.size
    return collectives.all_to_all(x, group, came, splits)


def unequal(x: Tensor, group: Group) -> Tensor:
    """The parts of tensor-parallel experts, which have their own path."""
    sizes = [x.shape[0] - group.size + 1] + [1] * (group.size - 1)
    own = collectives.reduce_scatter(x, group, sizes=sizes)
    return collectives.all_gather(own * 2, group, sizes=sizes) + 1


def bucket(x: Tensor, group: Group) -> Tensor:
    """As gradients are reduced: this rank's part in place, the sums gathered in place."""
    data = x.flatten() * 2
    part = data.view(group.size, -1)[group.rank]
    collectives.reduce_scatter_async(data, group, out=part).wait()
    return collectives.all_gather_async(part * 1, group, out=data).wait()


CALLS: dict[str, Callable[[Tensor, Group], Tensor]] = {
    "all_reduce in place": lambda x, group: collectives.all_reduce(x * 1, group) + 1,
    "all_reduce": lambda x, group: collectives.all_reduce(x, group, "max", in_place=False) * 2,
    "all_gather, last dimension": lambda x, group: collectives.all_gather(x.t(), group, dim=1) + 1,
    "reduce_scatter": lambda x, group: collectives.reduce_scatter(x, group, dim=1, op="avg") + 1,
    "uneven all_to_all": lambda x, group: uneven(x, group) + 1,
    "unequal parts": unequal,
    "broadcast": lambda x, group: collectives.broadcast(x * 1, group, src=1) + 1,
    "messages": swap,
    "bucket": bucket,
}


def check_calls() -> None:
    group = whole_world()
    for name, call in CALLS.items():
        x, pool = random(8, 4, seed=group.rank), BACKEND.new_pool()
        with comm_scope("layers.3", "forward"), CommLedger() as eager:
            first = call(x, group)
        with comm_scope("layers.3", "forward"), CommLedger() as captured, BACKEND.capturing(pool, name) as graph:
            static = call(x, group)
        assert torch.equal(static, first), name
        assert captured.records == eager.records, name
        address = static.data_ptr()
        for step in (1, 2):
            x.copy_(random(8, 4, seed=10 * step + group.rank))
            with CommLedger() as replayed, recording(group.rank) as events:
                graph.replay()
            assert torch.equal(static, call(x, group)), (name, step)
            assert static.data_ptr() == address
            assert replayed.records == eager.records, name  # the layer and phase of the capture included
            assert len([e for e in events.events if e.kind != "wait"]) == len(eager.records), name
        del static, graph
        assert pool.live_bytes == 0, name  # no thread of the transport holds a block


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_call_is_made_again_at_replay(on_ranks, ranks: int) -> None:
    on_ranks(check_calls, ranks)


def layers_in_graphs() -> None:
    """Column and row layers with sequence parallelism, forward and backward, against the same without graphs."""
    group = whole_world()
    cut = {"group": group, "sequence_parallel": True, "dtype": torch.float64}
    up, down = ColumnParallelLinear("up", 8, 16, **cut), RowParallelLinear("down", 16, 8, input_is_parallel=True, **cut)
    parameters = [*up.parameters(), *down.parameters()]
    pool = BACKEND.new_pool()
    x = random(3, 2, 8, seed=group.rank).requires_grad_()
    dy = random(3, 2, 8, seed=10 + group.rank)

    def forward() -> Tensor:
        return down(torch.tanh(up(x)[0]))[0]

    with BACKEND.capturing(pool, "forward") as forward_graph:
        y = forward()
    with BACKEND.capturing(pool, "backward") as backward_graph:
        grads = torch.autograd.grad(y, [x, *parameters], dy)
    for step in (1, 2):
        with torch.no_grad():
            x.copy_(random(3, 2, 8, seed=20 * step + group.rank))
            dy.copy_(random(3, 2, 8, seed=30 * step + group.rank))
            for parameter in parameters:
                parameter.add_(0.125)
        with CommLedger() as eager:
            expected = forward()
            expected_grads = torch.autograd.grad(expected, [x, *parameters], dy)
        with CommLedger() as replayed:
            forward_graph.replay()
            backward_graph.replay()
        assert torch.equal(y, expected)
        assert all(map(torch.equal, grads, expected_grads))
        assert replayed.records == eager.records


def test_tensor_parallel_layers_replay_to_the_bit(on_ranks) -> None:
    on_ranks(layers_in_graphs, 2)


def halves_in_graphs() -> None:
    """An all-to-all in two halves: rows leave and arrive within one graph, gradients within another."""
    group, pool = whole_world("ep"), BACKEND.new_pool()
    x = random(8, 3, seed=group.rank).requires_grad_()
    dy = random(8, 3, seed=5 + group.rank)

    def forward() -> Tensor:
        travelling = all_to_all_start(x * 2, group)
        beside = x.sin()
        return travelling.wait() * beside

    with BACKEND.capturing(pool, "forward") as forward_graph:
        y = forward()
    with BACKEND.capturing(pool, "backward") as backward_graph:
        (dx,) = torch.autograd.grad(y, x, dy)
    for step in (1, 2):
        with torch.no_grad():
            x.copy_(random(8, 3, seed=7 * step + group.rank))
        expected = forward()
        (expected_dx,) = torch.autograd.grad(expected, x, dy)
        forward_graph.replay()
        backward_graph.replay()
        assert torch.equal(y, expected) and torch.equal(dx, expected_dx)


def test_the_halves_of_an_all_to_all_replay(on_ranks) -> None:
    on_ranks(halves_in_graphs, 2)


def hooks_at_replay() -> None:
    """A call dropped at a replay is dropped there alone: the graph asks the hooks again each time."""
    group, pool = whole_world(), BACKEND.new_pool()
    x = random(4, seed=group.rank)
    with BACKEND.capturing(pool, "sum") as graph:
        y = m.reduce_from_tensor_model_parallel_region(x, group)
    whole = y.clone()
    with dropped(operation="all_reduce") as hook:
        graph.replay()
    assert hook.calls == 1 and torch.equal(y, x)
    graph.replay()
    assert torch.equal(y, whole)


def test_a_dropped_call_is_dropped_at_replay(on_ranks) -> None:
    on_ranks(hooks_at_replay, 2)


def refused() -> list[str]:
    group, pool, x = whole_world(), BACKEND.new_pool(), random(4, seed=0)
    before = collectives.all_reduce_async(x, group, in_place=False)
    messages = []
    for what in (
        lambda: messages.append(collectives.all_reduce_async(x * 1, group)),  # not waited for
        before.wait,
        lambda: collectives.barrier(group),
        lambda: collectives.gather_objects(1, group),
        lambda: torch.distributed.all_reduce(x * 1),
    ):
        with pytest.raises(GraphCaptureError) as error, BACKEND.capturing(pool, "refused"):
            what()
        messages.append(str(error.value))
    before.wait()
    return [message for message in messages if isinstance(message, str)]


def test_what_a_graph_cannot_hold_is_refused_with_the_line(on_ranks) -> None:
    for messages in on_ranks(refused, 2):
        words = ("not waited for", "before the capture", "barrier", "gather_objects", "labkit.comm.collectives")
        assert len(messages) == len(words)
        for message, word in zip(messages, words, strict=True):
            assert word in message and "test_graphs_collectives.py:" in message, message
