"""The same training with every long sum taken in another order: how far rounding alone moves one process.

`reordered_sums` works below autograd, in forward and in backward. Operations without a sum stay as they are, so the
mathematics is that of the run without it.

| sum                     | in another order                                                                     |
|-------------------------|--------------------------------------------------------------------------------------|
| product of matrices     | the inner dimension is permuted and cut into parts, whose products are added one by  |
|                         | one: the partial sums of tensor parallelism, and for a weight gradient split batches |
| `sum` and `mean`        | one of the dimensions is permuted: gradients of biases and of RMSNorm, losses        |

Kernels that sum inside, such as LayerNorm's, attention's and Transformer Engine's, are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
    """Inside the block sums are taken in an order of their own for each number of `parts` that products are cut in."""
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
        """The product of the first part, to which those of the others are added."""
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
