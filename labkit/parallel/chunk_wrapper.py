"""What every data-parallel wrapper is: a module around a model chunk that answers like the chunk, and knows when
backwards only accumulate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


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
