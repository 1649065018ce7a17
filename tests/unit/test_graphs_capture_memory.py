"""What captures keep, share and let go: gradients of inputs, of outputs, inputs of weight gradients, failed graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from graph_rules import Body, Machine, OnlyOutput, engine_linear, stack
from torch import Tensor, nn

from labkit.graphs import GraphCaptureError, make_graphed_callables
from labkit.graphs.emulated.emulated_backend import EmulatedBackend, EmulatedGraph

HOST = Machine("emulated", "cpu")


def x(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(*(shape or (4, 8))).requires_grad_(grad)


# ---- gradients of a chunk's input ----


def test_the_gradient_that_is_sent_stays_until_the_next_backward_is_captured() -> None:
    """Of a chunk's first layer: neither the first nor the last graph of that backward takes it over, but later ones."""
    layers = stack(HOST, 2)
    graphed = make_graphed_callables(
        tuple(layers), [(x(),) for _ in range(6)], order=[1, 1, 1, -1, -1, -1], num_layers_per_chunk=[2],
        reuse_buffers=True, num_warmup=1,
    )  # fmt: skip
    history = graphed[0].pool.history

    def times(kind: str, microbatch: int, layer: int) -> list[int]:
        owner = f"chunk 0 layer {layer} microbatch {microbatch} backward"
        return [step.time for step in history if step.kind == kind and step.owner == owner]

    let_go = times("free", 0, 0)[-1]
    assert len(times("free", 0, 0)) == len(times("alloc", 0, 0)), "at the end nothing of it is left"
    assert max(times("alloc", 1, 1) + times("alloc", 1, 0)) < let_go < min(times("alloc", 2, 1))


# ---- weight gradients that run later ----


class Plain(nn.Module):
    """A linear layer whose x is the static input and whose dy is the static one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, given: Tensor) -> Tensor:
        return self.layer(given)[0]


@pytest.mark.parametrize("wrap", [Plain, OnlyOutput], ids=["x is static", "x lies in the pool"])
@pytest.mark.parametrize("order", [[1, -1, 1, -1, -1.5, -1.5], [1, 1, -1, -1, -1.5, -1.5], [1, -1, 1, -1.5, -1, -1.5]])
def test_weight_gradients_read_what_their_own_microbatch_left(order: list[float], wrap: Any) -> None:
    layer, eager = wrap(engine_linear(HOST)), wrap(engine_linear(HOST))
    graphed = make_graphed_callables((layer,), [(x(),) for _ in range(2)], order=order, reuse_buffers=True)
    for parameter in layer.parameters():
        parameter.main_grad.zero_()
    inputs = [x(grad=False) for _ in range(2)]
    waiting, outputs, late = iter(range(2)), [], iter(range(2))
    for entry in order:
        if entry > 0:
            m = next(waiting)
            outputs.append(graphed[m](inputs[m].clone().requires_grad_()))
        elif entry == -1:
            outputs.pop(0).square().sum().backward()
        else:
            graphed[next(late)].backward_dw()
    for given in inputs:
        eager(given.clone().requires_grad_()).square().sum().backward()
    assert torch.equal(layer.layer.weight.main_grad, eager.layer.weight.main_grad)


def test_weight_gradients_of_a_forward_that_was_overwritten_are_refused() -> None:
    layer = Plain(engine_linear(HOST))
    (graphed,) = make_graphed_callables((layer,), [(x(),)], order=[1, -1, -1.5], reuse_buffers=True)
    graphed(x()).sum().backward()
    first = graphed.flight
    graphed(x()).sum().backward()
    graphed.backward_dw()
    graphed.flight = first
    with pytest.raises(GraphCaptureError, match="its graph was replayed again"):
        graphed.backward_dw()


# ---- failures ----


class Keeps(EmulatedBackend):
    """Holds on to every graph."""

    def __init__(self) -> None:
        self.made: list[EmulatedGraph] = []

    @contextmanager
    def capturing(self, pool: Any, name: str) -> Iterator[EmulatedGraph]:
        with super().capturing(pool, name) as graph:
            self.made.append(graph)
            yield graph


def test_graphs_of_a_capture_that_fails_are_reset() -> None:
    backend = Keeps()
    bad = Body(HOST, lambda self, given: self.linear(given) * self.linear(given).sum().item())
    with pytest.raises(GraphCaptureError, match="item"):
        make_graphed_callables((stack(HOST, 1)[0], bad), ((x(),), (x(),)), backend=backend, num_warmup=0)
    assert len(backend.made) == 2
    for graph in backend.made:
        with pytest.raises(GraphCaptureError, match="holds nothing"):
            graph.replay()
