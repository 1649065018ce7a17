"""Synchronise the gradients and gather the parameters of a rank's chunks, while its program runs.

Backwards only accumulate inside a `no_sync` context. It is left for the backward that completes a chunk's gradients,
where the hooks of the data-parallel wrapper may then communicate. A `grad_sync_func` replaces these hooks: the program
launches it at places that all ranks of the pipeline reach at about the same time (`sync_places.py`).

Without interleaving Megatron's first rank leaves it to the hooks of its last backward even so, since it ends last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

NoSync = Callable[[], AbstractContextManager[Any]]
SyncFunc = Callable[[list[Any]], None]


def check_sync_functions(count: int, **given: Any) -> None:
    """Raise ValueError unless each is None, one function, or a list of `count` functions (of one, where it is a
    context)."""
    for name, value in given.items():
        if value is None or callable(value):
            continue
        if not isinstance(value, list | tuple) or not all(callable(function) for function in value):
            raise ValueError(f"{name} = {value!r}: must be a function, or a list with a function for each model chunk")
        if len(value) != count and (name != "no_sync_func" or len(value) != 1):
            raise ValueError(
                f"{name}: {len(value)} functions were given for {count} model chunks; give one function, or a list "
                f"of {count}"
            )


class GradientSync:
    """The contexts and functions of one rank during one run. Chunks are numbered as in the schedule."""

    def __init__(
        self,
        chunks: Sequence[Any],
        *,
        no_sync_func: NoSync | Sequence[NoSync] | None,
        grad_sync_func: SyncFunc | Sequence[SyncFunc] | None,
        param_sync_func: SyncFunc | Sequence[SyncFunc] | None,
    ) -> None:
        """chunks: those of the rank; none of them where nothing goes backward, and then nothing is done.

        no_sync_func: one for all chunks, or one each; None takes each chunk's own `no_sync`, where it has one.
        grad_sync_func, param_sync_func: one for all chunks, or one each. Without the first, gradients are left to the
            hooks of each chunk's last backward.
        """
        self._chunks = chunks
        self._gather = _one_each(param_sync_func, chunks)
        self._launch = _one_each(grad_sync_func, chunks)
        if no_sync_func is None:
            own = [getattr(chunk, "no_sync", None) for chunk in chunks]
            contexts = [context or nullcontext for context in own] if any(own) else []
        else:
            contexts = [no_sync_func] if callable(no_sync_func) else list(no_sync_func)
        if not chunks:
            contexts = []
        self._no_sync, self._open = contexts, [ExitStack() for _ in contexts]
        self._unfinished = set(range(len(chunks)))

    def __enter__(self) -> GradientSync:
        for context in range(len(self._no_sync)):
            self._hold(context)
        return self

    def __exit__(self, *exception: Any) -> None:
        for stack in self._open:
            stack.close()

    def _hold(self, context: int) -> None:
        self._open[context].enter_context(self._no_sync[context]())

    def _context(self, chunk: int) -> int:
        return chunk if len(self._no_sync) > 1 else 0

    def _let_go(self, chunk: int) -> None:
        if self._open:
            self._open[self._context(chunk)].close()
        self._unfinished.discard(chunk)

    def _hold_again(self, chunk: int) -> None:
        """Enter a context that other chunks share again, for their backwards."""
        if 0 < len(self._no_sync) < len(self._chunks) and self._unfinished:
            self._hold(self._context(chunk))

    def gather(self, chunk: int) -> None:
        """Launch the gathering of a chunk's parameters."""
        if self._gather:
            self._gather[chunk](list(self._chunks[chunk].parameters()))

    def before_last_backward(self, chunk: int) -> None:
        """Let the hooks of the backward that completes a chunk's gradients communicate, unless a function will."""
        if not self._launch:
            self._let_go(chunk)

    def after_last_backward(self, chunk: int) -> None:
        """Enter the context again that the other chunks share with this one."""
        if not self._launch:
            self._hold_again(chunk)

    def synchronise(self, chunk: int) -> None:
        """Launch the synchronisation of a chunk's gradients."""
        if self._launch:
            self._let_go(chunk)
            self._launch[chunk](list(self._chunks[chunk].parameters()))
            self._hold_again(chunk)


def _one_each(function: SyncFunc | Sequence[SyncFunc] | None, chunks: Sequence[Any]) -> list[SyncFunc]:
    if function is None:
        return []
    return [function] * len(chunks) if callable(function) else list(function)
