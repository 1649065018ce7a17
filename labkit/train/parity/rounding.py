"""Rounding or a fault: the verdict on a layout's differences from its reference.

Rounding alone can exceed the tolerance, 1e-5 in float32 and 1e-10 in float64. Adam divides a gradient by the root of
its square, so if rounding moves an element of 1e-5 by 1e-9, its parameter moves by 1e-4 of a step. And large weights
saturate softmax, whose gradient is then a small difference of large terms. The effect of rounding depends on seed,
model and steps, so `compare` measures it: the reference runs again with its sums in other orders (`reordered_sums`).
The *spread* of a tensor at a step is its largest difference from the first run.

| difference of a tensor                       | verdict  |
|----------------------------------------------|----------|
| within the tolerance                         | equal    |
| beyond it, up to `MULTIPLE` times its spread | rounding |
| beyond that, or beyond its kind's `WIDEST`   | fault    |

Each tensor is compared with its own spread at its own step, and no spread excuses more than `WIDEST`. So a bias that
rounding moves far hides no fault in its weight or gradient, and a chaotic run hides no large fault. Float64 shows
smaller faults in a tensor that rounding moves, because its spread is smaller.

`reordered_sums` works below autograd, in forward and in backward. It leaves operations without a sum alone, so the
mathematics of the run does not change.

| sum                     | in another order                                                                     |
|-------------------------|--------------------------------------------------------------------------------------|
| product of matrices     | the inner dimension is permuted and cut into parts, whose products are added one by  |
|                         | one: the partial sums of tensor parallelism, and for a weight gradient split batches |
| `sum` and `mean`        | one of the dimensions is permuted: gradients of biases and of RMSNorm, losses        |

It also leaves kernels alone that sum internally, such as those of LayerNorm, attention and Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Verdict = Literal["equal", "rounding", "fault"]
Spread = Mapping[str, float]
"""Name of a compared tensor, with its step -> largest difference between orders of summation."""
MULTIPLE = 10.0
"""A tensor of a layout may differ by this multiple of its spread, which is the largest of few samples."""
WIDEST = {"output": 1e-4, "loss": 1e-4, "gradient": 1e-3, "parameter": 1e-2}
"""Kind of tensor -> largest difference that is rounding, however wide the spread. Parameters have the largest, since
Adam's division acts on them alone. A gradient feels it only through the parameters, from the second step on."""
ORDERS = (1, 2, 3, 4)
"""Orders of summation for the spread: numbers of parts into which `reordered_sums` cuts products."""


def judge(
    found: Iterable[tuple[str, str, float]], tolerance: float, spread: Callable[[], Spread]
) -> tuple[Verdict, str | None]:
    """Return the verdict on a layout, and the first tensor that rounding does not explain.

    If rounding explains every difference, the tensor is the first beyond the tolerance, or None.

    found: name, kind and difference of every compared tensor, in the order of training.
    tolerance: largest difference that is equal.
    spread: called if the verdict depends on it.
    """
    first = None
    for name, kind, difference in found:
        if difference <= tolerance:
            continue
        if difference > WIDEST[kind] or difference > MULTIPLE * spread().get(name, 0.0):
            return "fault", name
        first = first or name
    return ("equal", None) if first is None else ("rounding", first)


def widest(runs: Iterable[Iterable[tuple[str, str, float]]]) -> Spread:
    """Return the spread over runs of the reference, each given by its differences from the first run."""
    spread: dict[str, float] = {}
    for found in runs:
        for name, _, difference in found:
            spread[name] = max(spread.get(name, 0.0), difference)
    return spread


_aten = torch.ops.aten
_PRODUCTS: dict[Any, tuple[int, Callable[..., Any]]] = {
    _aten.mm.default: (0, _aten.addmm_.default),
    _aten.mm.out: (0, _aten.addmm_.default),
    _aten.addmm.default: (1, _aten.addmm_.default),
    _aten.addmm_.default: (1, _aten.addmm_.default),
    _aten.bmm.default: (0, _aten.baddbmm_.default),
    _aten.baddbmm.default: (1, _aten.baddbmm_.default),
    _aten.baddbmm_.default: (1, _aten.baddbmm_.default),
}
"""Operation -> place of the left factor, and the operation that adds another product to its result."""
_SUMS = (_aten.sum.default, _aten.sum.dim_IntList, _aten.sum.IntList_out, _aten.mean.default, _aten.mean.dim)


@contextmanager
def reordered_sums(parts: int) -> Iterator[None]:
    """Run sums in another order inside the block. `parts` is a product's number of parts, and selects the order."""
    with _Reordered(parts):
        yield


class _Reordered(TorchDispatchMode):
    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.order = cache(self._order)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS and args[_PRODUCTS[func][0]].is_floating_point():
            return self._product(func, list(args), kwargs)
        if func in _SUMS and args[0].is_floating_point() and args[0].dim():
            dims = args[1] if len(args) > 1 and args[1] else range(args[0].dim())
            longest = max(dims, key=lambda dim: args[0].shape[dim])
            return func(self._reordered(args[0], longest), *args[1:], **kwargs)
        return func(*args, **kwargs)

    def _product(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
        """Return the product of the first parts, plus the products of the other parts in turn."""
        place, add = _PRODUCTS[func]
        left = self._reordered(args[place], -1).chunk(self.parts, -1)
        right = self._reordered(args[place + 1], -2).chunk(self.parts, -2)
        result = func(*args[:place], left[0], right[0], *args[place + 2 :], **kwargs)
        for a, b in zip(left[1:], right[1:], strict=True):
            add(result, a, b, alpha=kwargs.get("alpha", 1))
        return result

    def _reordered(self, x: Tensor, dim: int) -> Tensor:
        return x.index_select(dim, self.order(x.shape[dim], x.device))

    def _order(self, length: int, device: torch.device) -> Tensor:
        generator = torch.Generator().manual_seed(self.parts)
        return torch.randperm(length, generator=generator).to(device)
