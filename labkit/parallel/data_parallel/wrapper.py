"""The base of both data-parallel wrappers: a module around a model chunk that answers like the chunk.

A wrapper knows when backwards only accumulate (`no_sync`), and can look for gradients that are not finite.

A reduction makes one rank's NaN everybody's. Nobody who looks afterwards can say where the NaN came from. So the
wrappers look before, in the same pass over memory that scales a buffer for its mean, and leave the answer on the
device: nobody reads it in a good step (`labkit.train.not_finite`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class ChunkWrapper(nn.Module):
    """A model chunk, called and asked through its wrapper."""

    def __init__(self, module: nn.Module) -> None:
        """Wrap `module`."""
        super().__init__()
        self.module = module
        self._may_sync = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Whatever the module returns."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Attributes that the wrapper lacks are the module's, so that a wrapped chunk answers like a bare one."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside the block only accumulate; asking for a synchronisation there is an error."""
        outer, self._may_sync = self._may_sync, False
        try:
            yield
        finally:
            self._may_sync = outer

    def _check_may_sync(self, what: str) -> None:
        if not self._may_sync:
            raise RuntimeError(
                f"{what} was called inside no_sync(), where backwards only accumulate; leave the block first"
            )


def scale_and_look(x: Tensor, factor: float) -> Tensor:
    """Multiply x by `factor` in place; returns [1] on x's device, above 0 where some value of x was not finite.

    No synchronisation with the host. With a factor of 1, x is only read.
    """
    if factor == 1.0:
        return (~torch.linalg.vector_norm(x).isfinite()).float().view(1)
    found = torch.zeros(1, device=x.device)
    by = torch.full((1,), factor, device=x.device)
    if x.dtype == torch.float64:  # the fused operation takes its factor in fp32 only
        found += ~torch.linalg.vector_norm(x).isfinite()
        x.mul_(factor)
    else:
        torch._amp_foreach_non_finite_check_and_unscale_([x], found, by)  # pyright: ignore[reportPrivateImportUsage]
    return found
