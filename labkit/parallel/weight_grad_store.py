"""Postponed weight gradients: the half of a backward that no other stage waits for.

The backward of a linear layer y = x W^T is two GEMMs of the same size. The stage before waits for dx = dy W; only the
optimizer needs dW = dy^T x. Zero-bubble schedules (arXiv 2401.10241) run the first as action I and fill their idle time
with the second, action W.

While a store is collecting, a layer's backward hands its weight gradient over as a closure (`deferred`). Autograd sees
no gradient for that parameter. W runs the closures. This postpones the weights and biases of the linear layers, the
output layer inside the fused loss, and the embedding table. Everything else (norms, position embeddings, a user's own
nn.Linear) gets its gradient in I, as autograd gives it.

A closure keeps x and dy alive, so activations are freed only by W. Communication that only dW needs (the
sequence-parallel gather of x) moves into W with it, and none is added. But the all-reduce of dx then has nothing left
in I to overlap with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.comm.ledger import Scope, comm_scope, current_scope
from labkit.parallel.parameters.parameter_record import record_of

Compute = Callable[[], Sequence[Tensor | None]]
"""Gradients in the order of the parameters; None for one that was added to `main_grad` already."""


@dataclass(frozen=True, slots=True)
class _Deferred:
    """One layer's weight gradients, and the ledger scope under which they will communicate."""

    parameters: tuple[Tensor | None, ...]
    compute: Compute
    scope: Scope


_collecting: list[_Deferred] | None = None
"""Gradients that the running I has postponed. The list belongs to the process, not to a thread, because on a GPU
autograd has its own threads."""


def is_collecting() -> bool:
    """Return True while a store may take weight gradients."""
    return _collecting is not None


def deferred(parameters: Sequence[Tensor | None], compute: Compute) -> bool:
    """Offer `compute` to the collecting store, in a layer's backward. Do not run it now if this returns True.

    parameters: those whose gradients `compute` returns; None stands for one that needs none. A parameter that is not a
        leaf is rejected, because its gradient has to travel on through the graph.
    """
    if _collecting is None or not all(p is None or p.is_leaf for p in parameters):
        return False
    _collecting.append(_Deferred(tuple(parameters), compute, current_scope()))
    return True


class WeightGradStore:
    """The weight gradients between an I and its W. Keys are (stage, microbatch), or whatever else names a backward."""

    def __init__(self) -> None:
        self._pending: dict[Hashable, list[_Deferred]] = {}

    def __len__(self) -> int:
        """Return the number of backward passes that still lack their W."""
        return len(self._pending)

    @property
    def pending(self) -> tuple[Hashable, ...]:
        """Their keys, oldest first."""
        return tuple(self._pending)

    @contextmanager
    def collecting(self, key: Hashable) -> Iterator[None]:
        """Postpone the weight gradients of the backward in the block until `run(key)`; one that raises leaves nothing.

        Raises:
            ValueError: `key` already waits for its W, or another I is running.
        """
        global _collecting
        if key in self._pending:
            raise ValueError(f"the input gradient of {key} was computed already: run its weight gradient (W) first")
        if _collecting is not None:
            raise ValueError(f"the input gradient of {key} was started inside that of another backward")
        _collecting = taken = []
        try:
            yield
        finally:
            _collecting = None
        self._pending[key] = taken

    def join(self, key: Hashable, other: Hashable) -> None:
        """Let `run(key)` run the gradients of `other` too: what both give one parameter is added first."""
        self._pending[key] += self._pending.pop(other)

    def run(self, key: Hashable) -> None:
        """Run W: compute the gradients of `key` in the order in which its backward met them, and free its activations.

        They arrive as in a whole backward: bit for bit, in `main_grad` or `.grad`, with the hooks of the parameters.

        Raises:
            ValueError: no I of `key` has run, or its W has run already.
        """
        if key not in self._pending:
            waiting = ", ".join(str(other) for other in list(self._pending)[:8]) or "none"
            raise ValueError(
                f"the weight gradient (W) of {key} runs once, after its input gradient (I); waiting for W: {waiting}"
            )
        taken = self._pending.pop(key)
        uses = Counter(id(p) for item in taken for p in item.parameters if p is not None)
        sums: dict[int, Tensor] = {}
        taken.reverse()
        with torch.no_grad():
            while taken:
                _run_one(taken.pop(), uses, sums)


def _run_one(item: _Deferred, uses: Counter[int], sums: dict[int, Tensor]) -> None:
    """Compute one layer's gradients; those of a parameter are accumulated at its last use, as autograd does."""
    with comm_scope(*item.scope):
        gradients = item.compute()
    for parameter, gradient in zip(item.parameters, gradients, strict=True):
        if parameter is None:
            continue
        uses[id(parameter)] -= 1
        earlier = sums.pop(id(parameter), None)
        if earlier is not None:
            gradient = earlier if gradient is None else earlier + gradient
        if uses[id(parameter)]:
            if gradient is not None:
                sums[id(parameter)] = gradient
        elif gradient is None:
            _tell(parameter)
        else:
            torch.autograd.backward(parameter, gradient)  # of a leaf: adds to .grad and calls its hooks


def _tell(parameter: Tensor) -> None:
    """Call the data-parallel wrapper's hook: the layer added to `main_grad` itself, so no autograd engine calls it."""
    hook = record_of(parameter).on_gradient
    if hook is not None:
        hook(parameter)
