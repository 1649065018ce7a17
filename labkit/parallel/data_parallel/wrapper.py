"""The base of both data-parallel wrappers: a module around a model chunk that answers like the chunk.

A wrapper knows when backwards only accumulate (`no_sync`), and waits for parameters that other ranks have updated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from labkit.parallel.data_parallel.param_gather import ParamGather


class ChunkWrapper(nn.Module):
    """A model chunk, called and asked through its wrapper."""

    def __init__(self, module: nn.Module) -> None:
        """Wrap `module`."""
        super().__init__()
        self.module = module
        self._may_sync = True
        self.param_gather: ParamGather | None = None
        """Gathers the parameters that other ranks have updated; None without the distributed optimizer."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return whatever the module returns."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Look attributes that the wrapper lacks up in the module, so that a wrapped chunk answers like a bare one."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes inside the block only accumulate; asking for a synchronisation there is an error."""
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

    # ---- parameters ----

    def start_param_sync(self, *parameters: nn.Parameter) -> None:
        """Start gathering what the distributed optimizer has updated, as far as that has not been started; without it
        there is nothing to do. `parameters` are ignored; the pipeline runtime passes those of the chunk."""
        if self.param_gather is not None:
            self.param_gather.start()

    def finish_param_sync(self) -> None:
        """Wait until every parameter may be read. Forwards wait by themselves; all other readers call this."""
        if self.param_gather is not None:
            self.param_gather.finish()

    def disable_forward_pre_hook(self) -> None:
        """Gather all parameters and take the hooks that wait for them off the modules (Megatron's name)."""
        if self.param_gather is not None:
            self.param_gather.disable_hooks()

    def enable_forward_pre_hook(self) -> None:
        """Put the hooks back that `disable_forward_pre_hook` has removed."""
        if self.param_gather is not None:
            self.param_gather.enable_hooks()
