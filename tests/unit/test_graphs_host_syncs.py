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

from labkit.comm.capturing import GraphCaptureError, graph_capturing, refuse_host_sync
from labkit.graphs.emulated.emulated_backend import EmulatedBackend

BACKEND = EmulatedBackend()
COUNTS, PLACES = torch.tensor([1, 2, 1]), torch.tensor([2, 0])

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
    "from_dlpack": lambda x: np.from_dlpack(x.detach()),
    "type": lambda x: x.type("torch.DoubleTensor"),
    "type of tensors": lambda x: x.type(dtype=torch.DoubleTensor),  # pyright: ignore[reportArgumentType, reportCallIssue]
    "inverse": lambda x: torch.linalg.inv(x.expand(3, 3) + torch.eye(3)),
    "solve": lambda x: torch.linalg.solve(torch.eye(3), x),
    "cholesky": lambda x: torch.linalg.cholesky(torch.eye(3) * x.sum()),
    "eigh": lambda x: torch.linalg.eigh(x.expand(3, 3)),
    "svd": lambda x: torch.linalg.svd(x.expand(3, 3)),
}
HOST: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: x * torch.tensor([2.0, 1.0, 0.0]),
    "tensor on a device": lambda x: torch.tensor([2.0], device=x.device),
    "new_tensor": lambda x: x.new_tensor([1, 2]),
    "list as index": lambda x: x[[0, 1]],
    "array": lambda x: x + torch.from_numpy(np.ones(3)),
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
    "repeat_interleave": lambda x: x.repeat_interleave(COUNTS),
}
FINE: dict[str, Callable[[Tensor], Any]] = {
    "where": lambda x: torch.where(x > 0, x, -x),
    "assign number to mask": lambda x: x.clone().__setitem__(x > 0, 3.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 3.0),
    "integers": lambda x: x[PLACES],
    "to type": lambda x: x.to(torch.float64).to(x),
    "to device": lambda x: x.to(x.device),
    "repeat_interleave": lambda x: x.repeat_interleave(COUNTS, output_size=4),
    "repeat_interleave by number": lambda x: x.repeat_interleave(2),
    "shape": lambda x: [x.shape[0], len(x), x.numel()],
    "type": lambda x: [x.type(torch.float64), x.type(), x.type_as(x.long())],
    "number as tensor": lambda x: x * torch.tensor(2.0),
    "prod": lambda x: [x.prod(), x.cumprod(0)],
    "inverse without check": lambda x: torch.linalg.inv_ex(x.expand(3, 3)),
    "default generator": lambda x: torch.rand(3, generator=torch.default_generator),
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


@pytest.mark.parametrize("name", HOST)
def test_tensors_of_numbers_that_python_holds(name: str) -> None:
    message = _refusal(HOST[name])
    assert f"{__file__}:{inspect.getsourcelines(HOST[name])[1]} (in <lambda>)" in message
    assert "copied from the host" in message


@pytest.mark.parametrize("function", [torch.prod, lambda x: x.prod(0), lambda x: x.cumprod(0)])
def test_products_whose_backward_asks_the_host_for_zeros(function: Callable[[Tensor], Any]) -> None:
    x = torch.randn(3, requires_grad=True)
    refused = pytest.raises(GraphCaptureError, match="prod of what requires grad has a backward that counts zeros")
    with refused, BACKEND.capturing(BACKEND.new_pool(), "refused"):
        function(x)
    with torch.no_grad(), BACKEND.capturing(BACKEND.new_pool(), "fine"):
        function(x)


def test_a_generator_that_the_graph_is_not_told_of() -> None:
    own = torch.Generator()
    for draw in (lambda: torch.rand(3, generator=own), lambda: torch.empty(3).normal_(generator=own)):
        refused = pytest.raises(GraphCaptureError, match=r"generator of its own is unknown .* RngTracker")
        with refused, BACKEND.capturing(BACKEND.new_pool(), "refused"):
            draw()


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


@pytest.mark.parametrize("name", [*WAITS, *SHAPES, *HOST])
def test_the_same_in_backward(name: str) -> None:
    function = {**WAITS, **SHAPES, **HOST}[name]
    x, dy, pool = torch.randn(3, requires_grad=True), torch.tensor([1.0, 0.0, 3.0]), BACKEND.new_pool()
    with BACKEND.capturing(pool, "forward"):
        y = _ReadsInBackward.apply(x, function)
    with pytest.raises(GraphCaptureError) as error, BACKEND.capturing(pool, "backward"):
        torch.autograd.grad(y, x, dy)
    assert f"{__file__}:{inspect.getsourcelines(function)[1]} (in <lambda>)" in str(error.value)


def test_nothing_is_refused_outside_a_capture() -> None:
    x = torch.tensor([1.0, 0.0, 3.0])
    watched = ("cpu", "to", "tolist", "numpy", "type", "__dlpack__")
    methods = [getattr(Tensor, name) for name in watched]
    with BACKEND.capturing(BACKEND.new_pool(), "graph") as graph:
        x + 1
    graph.replay()
    for function in (*WAITS.values(), *SHAPES.values(), *HOST.values(), *FINE.values()):
        function(x)
    assert [getattr(Tensor, name) for name in watched] == methods
    assert not {"cpu", "to", "tolist", "numpy", "type"} & vars(Tensor).keys()


def test_refuse_host_sync_names_what_waits() -> None:
    refuse_host_sync("nothing")
    with graph_capturing(), pytest.raises(GraphCaptureError, match="a copy of the counts makes the host wait"):
        refuse_host_sync("a copy of the counts")
