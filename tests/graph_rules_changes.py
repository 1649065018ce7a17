"""What may change between replays, and what a capture that fails leaves: the same bits as without graphs.

Rules for `graph_rules.py`'s machines. Imported by tests/unit/test_graph_rules.py (emulated, on the host) and by
tests/gpu/test_failed_capture_gpu.py (local, on a GPU).
"""

from __future__ import annotations

import pytest
import torch
from graph_rules import Body, Machine, all_equal, grads, stack
from torch import Tensor


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_learning_rate_that_changes_reaches_every_step(machine: Machine, name: str) -> None:
    """The optimizer lies outside the graphs and changes weights in place, where replays read them."""
    [graphed_layer], [eager] = stack(machine, 1), stack(machine, 1)
    call = machine.make(graphed_layer, (machine.random(grad=True),))
    steps = [getattr(torch.optim, name)(layer.parameters(), lr=0.1) for layer in (graphed_layer, eager)]
    for rate in (0.1, 0.01, 1.0, 0.0):
        x = machine.random()
        for function, optimizer in zip((call, eager), steps, strict=True):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            (function(x.clone().requires_grad_()) ** 2).sum().backward()
            optimizer.step()
        assert all_equal(list(graphed_layer.parameters()), list(eager.parameters())), rate


def test_a_step_that_is_not_finite_is_as_without_graphs_and_so_is_the_next(machine: Machine) -> None:
    [graphed_layer], [eager] = stack(machine, 1), stack(machine, 1)
    call = machine.make(graphed_layer, (machine.random(grad=True),))
    good = machine.random()
    bad = good.clone()
    bad[0, 0] = float("nan")
    for x in (good, bad, good):
        results = []
        for layer, function in ((graphed_layer, call), (eager, eager)):
            layer.zero_grad()
            y = function(x.clone().requires_grad_())
            y.sum().backward()
            results.append([y.detach().clone(), *(g.clone() for g in grads([layer]) if g is not None)])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_out_of_memory_at_capture_leaves_an_eager_layer(machine: Machine) -> None:
    """Gradients, hooks and random states are as before; the layer computes, and can be captured after that."""
    machine.needs("emulated", "local")
    full = [False]

    def forward(body: Body, x: Tensor) -> Tensor:
        if full[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1024.00 GiB")
        return torch.nn.functional.dropout(torch.tanh(body.linear(x)), 0.3)

    torch.manual_seed(3)
    layer = Body(machine, forward)
    weight = layer.linear.weight
    weight.grad = torch.full_like(weight, 2.0)
    x, states = machine.random(grad=True), machine.states()
    full[0] = True
    with pytest.raises(torch.OutOfMemoryError, match=r"1024\.00 GiB"):
        machine.make(layer, (machine.random(grad=True),), num_warmup=0)
    full[0] = False
    assert torch.equal(weight.grad, torch.full_like(weight, 2.0))
    machine.set_states(states)
    eager = layer(x).detach().clone()
    machine.set_states(states)
    call = machine.make(layer, (machine.random(grad=True),))
    machine.set_states(states)
    assert torch.equal(call(x), eager)


def test_other_shapes_are_captured_beside_the_first(machine: Machine) -> None:
    """A graph has its shapes for ever. Both sets of graphs replay in turn, each as the eager layer."""
    [layer], [eager] = stack(machine, 1), stack(machine, 1)
    calls = {rows: machine.make(layer, (machine.random(rows, 8, grad=True),)) for rows in (4, 6)}
    for rows in (4, 6, 4):
        x = machine.random(rows, 8)
        for one in (layer, eager):
            one.zero_grad()
        y, z = calls[rows](x.clone().requires_grad_()), eager(x.clone().requires_grad_())
        y.square().sum().backward()
        z.square().sum().backward()
        assert torch.equal(y, z)
        assert all_equal(grads([layer]), grads([eager]))
    calls[4].reset()
    x = machine.random(6, 8, grad=True)
    assert torch.equal(calls[6](x), eager(x)), "the graphs of the other shapes live on"
