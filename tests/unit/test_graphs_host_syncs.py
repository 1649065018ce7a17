"""What would make the host wait for a GPU is refused on the host too, with the line that did it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from labkit.graphs.emulated import EmulatedBackend
from labkit.parallel.capturing import GraphCaptureError, graph_capturing, refuse_host_sync

BACKEND = EmulatedBackend()

WAITS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "if": lambda x: 1 if x.sum() > 0 else 0,
    "index": lambda x: range(x.argmax()),
    "slice": lambda x: x[: x.argmax()],
    "print": lambda x: str(x),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "contains": lambda x: 3.0 in x,
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "to keyword": lambda x: x.to(device="cpu", dtype=torch.float64),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
}
SHAPES: dict[str, Callable[[Tensor], Any]] = {
    "nonzero": lambda x: x.nonzero(),
    "argwhere": lambda x: torch.argwhere(x),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "mask beside index": lambda x: x.expand(3, 3)[1, x > 0],
    "assign to mask": lambda x: x.clone().__setitem__(x > 0, torch.ones(2)),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "unique_consecutive": lambda x: x.unique_consecutive(),
    "bincount": lambda x: x.long().bincount(),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.tensor([1, 2, 1])),
}
FINE: dict[str, Callable[[Tensor], Any]] = {
    "where": lambda x: torch.where(x > 0, x, -x),
    "assign number to mask": lambda x: x.clone().__setitem__(x > 0, 3.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 3.0),
    "integers": lambda x: x[torch.tensor([2, 0])],
    "to type": lambda x: x.to(torch.float64).to(x),
    "to device": lambda x: x.to(x.device),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.tensor([1, 2, 1]), output_size=4),
    "repeat_interleave by number": lambda x: x.repeat_interleave(2),
    "shape": lambda x: [x.shape[0], len(x), x.numel()],
}


def _refusal(function: Callable[[Tensor], Any]) -> str:
    x = torch.tensor([1.0, 0.0, 3.0])
    with pytest.raises(GraphCaptureError) as error, BACKEND.capturing(BACKEND.new_pool(), "refused"):
        function(x)
    return str(error.value)


@pytest.mark.parametrize("name", WAITS)
def test_waiting_for_a_value(name: str) -> None:
    line = inspect.getsourcelines(WAITS[name])[1]
    message = _refusal(WAITS[name])
    assert f"{__file__}:{line} (in <lambda>)" in message
    assert "makes the host wait for the device" in message


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_depend_on_values(name: str) -> None:
    message = _refusal(SHAPES[name])
    assert f"{__file__}:{inspect.getsourcelines(SHAPES[name])[1]} (in <lambda>)" in message
    assert "shape depends on values" in message


@pytest.mark.parametrize("name", FINE)
def test_what_a_gpu_can_capture(name: str) -> None:
    x = torch.tensor([1.0, 0.0, 3.0])
    with BACKEND.capturing(BACKEND.new_pool(), "fine"):
        FINE[name](x)


class _ReadsInBackward(Function):
    """y = x; its backward does `read` with the gradient: [any] -> [any]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, read: Callable[[Tensor], Any]) -> Tensor:
        ctx.read = read
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.read(grads[0])
        return grads[0], None


@pytest.mark.parametrize("name", [*WAITS, *SHAPES])
def test_the_same_in_backward(name: str) -> None:
    function = (WAITS | SHAPES)[name]
    x, pool = torch.randn(3, requires_grad=True), BACKEND.new_pool()
    with BACKEND.capturing(pool, "forward"):
        y = _ReadsInBackward.apply(x, function)
    with pytest.raises(GraphCaptureError) as error, BACKEND.capturing(pool, "backward"):
        torch.autograd.grad(y, x, torch.tensor([1.0, 0.0, 3.0]))
    assert f"{__file__}:{inspect.getsourcelines(function)[1]} (in <lambda>)" in str(error.value)


def test_nothing_is_refused_outside_a_capture() -> None:
    x = torch.tensor([1.0, 0.0, 3.0])
    methods = [Tensor.cpu, Tensor.to, Tensor.tolist, Tensor.numpy]
    with BACKEND.capturing(BACKEND.new_pool(), "graph") as graph:
        x + 1
    graph.replay()
    for function in (WAITS | SHAPES | FINE).values():
        function(x)
    assert [Tensor.cpu, Tensor.to, Tensor.tolist, Tensor.numpy] == methods
    assert not {"cpu", "to", "tolist", "numpy"} & vars(Tensor).keys()


def test_refuse_host_sync_names_what_waits() -> None:
    refuse_host_sync("nothing")
    with graph_capturing(), pytest.raises(GraphCaptureError, match="a copy of the counts makes the host wait"):
        refuse_host_sync("a copy of the counts")
