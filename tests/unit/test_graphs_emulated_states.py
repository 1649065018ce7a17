"""Emulated graphs and what stands around them: random states, recomputation, flags, garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.comm.capturing import GraphCaptureError
from labkit.graphs import make_graphed_callables
from labkit.graphs.emulated.arena import Arena
from labkit.graphs.emulated.emulated_backend import EmulatedBackend
from labkit.parallel import CheckpointWithoutOutput, RngTracker, checkpoint
from labkit.parallel.parameters.parameter_record import record_of

BACKEND = EmulatedBackend()


@pytest.fixture
def pool() -> Iterator[Arena]:
    yield BACKEND.new_pool()


class Layer(nn.Module):
    """A norm, two products and an addition in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x)))).add_(x)


def test_named_random_states_are_switched_at_each_replay(pool: Arena) -> None:
    def tracker() -> RngTracker:
        made = RngTracker()
        made.add("model-parallel-rng", 7)
        return made

    def draw(rng: RngTracker) -> Tensor:
        outside = torch.rand(3)
        with rng.fork():
            inside = torch.rand(3)
        return torch.stack([outside, inside, torch.rand(3)])

    eager, graphed = tracker(), tracker()
    torch.manual_seed(1)
    expected = [draw(eager) for _ in range(4)]
    torch.manual_seed(1)
    with BACKEND.capturing(pool, "draw") as graph:
        y = draw(graphed)
    found = [y.clone()]
    for _ in range(3):
        graph.replay()
        found.append(y.clone())
    assert torch.equal(torch.stack(found), torch.stack(expected))


def test_recomputation_inside_graphs_makes_again_what_its_replay_made(pool: Arena) -> None:
    layer, x, dy = Layer(), torch.randn(2, 8, 16, requires_grad=True), torch.randn(2, 8, 16)
    wanted = [x, *layer.parameters()]
    with BACKEND.capturing(pool, "forward") as forward:
        y = checkpoint(layer, x)
    saved = pool.live_bytes
    with BACKEND.capturing(pool, "backward") as backward:
        torch.autograd.backward(y, dy)
    assert saved == y.nbytes
    grads = [tensor.grad for tensor in wanted]
    for _ in range(2):
        with torch.no_grad():
            x.copy_(torch.randn(2, 8, 16))
        expected = torch.autograd.grad(layer(x), wanted, dy)
        forward.replay()
        backward.replay()
        assert all(map(torch.equal, grads, expected))  # type: ignore[arg-type]


def test_an_output_dropped_and_made_again_keeps_its_values_in_a_graph(pool: Arena) -> None:
    norm, linear = nn.LayerNorm(8), nn.Linear(8, 8)
    x, dy = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8)
    wanted = [x, *norm.parameters(), *linear.parameters()]

    def run(x: Tensor) -> Tensor:
        dropped = CheckpointWithoutOutput()
        y = linear(dropped.checkpoint(norm, x))
        dropped.discard_output_and_register_recompute(y)
        return y

    with BACKEND.capturing(pool, "forward") as forward:
        y = run(x)
    with BACKEND.capturing(pool, "backward") as backward:
        grads = torch.autograd.grad(y, wanted, dy)
    with torch.no_grad():
        x.copy_(torch.randn(3, 8))
    forward.replay()
    backward.replay()
    expected = linear(norm(x))
    assert torch.equal(y, expected)
    assert all(map(torch.equal, grads, torch.autograd.grad(expected, wanted, dy)))


@pytest.mark.parametrize("num_warmup", [0, 2])
def test_random_states_that_no_module_holds_stand_as_before_after_the_capture(num_warmup: int) -> None:
    """The tracker lies in a dict, or in what a function closes over: found when it is forked."""
    rng = RngTracker()
    rng.add("model-parallel-rng", 7)
    held = {"rng": rng}

    def noisy(x: Tensor) -> Tensor:
        with held["rng"].fork():
            return x * torch.rand(3)

    before, outer = rng.get_states()["model-parallel-rng"], torch.get_rng_state()
    graphed = make_graphed_callables(noisy, (torch.ones(3, requires_grad=True),), num_warmup=num_warmup)
    assert torch.equal(rng.get_states()["model-parallel-rng"], before) and torch.equal(torch.get_rng_state(), outer)
    found = [graphed(torch.ones(3, requires_grad=True)).detach().clone() for _ in range(3)]
    rng.set_states({"model-parallel-rng": before})
    assert torch.equal(torch.stack(found), torch.stack([noisy(torch.ones(3)) for _ in range(3)]))


def test_a_failed_capture_leaves_the_flags_of_main_grad_as_they_were() -> None:
    """A flag that stayed would have the buffers zeroed, and a first gradient added, for graphs that do not exist."""
    layer: Any = nn.Linear(3, 3)
    layer.weight.main_grad, record_of(layer.weight).has_gradient = torch.zeros(3, 3), False
    layer.bias.main_grad, record_of(layer.bias).added_elsewhere = torch.zeros(3), True
    x = torch.ones(2, 3, requires_grad=True)
    body = nn.Sequential(layer)
    body.forward = lambda x: layer(x) * x.sum().item()  # type: ignore[method-assign]
    with pytest.raises(GraphCaptureError, match="host wait"):
        make_graphed_callables(body, (x,))
    assert not record_of(layer.weight).has_gradient and not record_of(layer.weight).added_elsewhere
    assert record_of(layer.bias).added_elsewhere and record_of(layer.bias).has_gradient


def test_garbage_collection_that_was_off_stays_off(pool: Arena) -> None:
    gc.disable()
    try:
        with BACKEND.capturing(pool, "a"):
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
    with BACKEND.capturing(pool, "b"):
        assert not gc.isenabled()
    assert gc.isenabled()
