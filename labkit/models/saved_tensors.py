"""Measure the bytes that autograd keeps for backward, by storage and at any moment of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle


class SavedTensors:
    """Count the bytes that the graph keeps alive now: `with SavedTensors(model) as saved: ...`, then `saved.bytes`.

    A storage counts once and whole, however many operations keep views of it. Parameters and buffers of the models do
    not count. Memory that a backward or `CheckpointWithoutOutput` has freed no longer counts, so `bytes` may be read
    while a schedule runs. The random states of `checkpoint` do not count either, because they are not saved tensors. A
    model's three states take 16 kB per call on the host.
    """

    def __init__(self, *models: nn.Module) -> None:
        """models: their parameters and buffers do not count, and their modules give `by_module` its names."""
        self._models = models
        self._kept: dict[int, tuple[StorageWeakRef, str]] = {}
        self._inside: list[str] = []
        self._handles: list[RemovableHandle] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> SavedTensors:
        self._own = {
            tensor.untyped_storage()._cdata
            for model in self._models
            for tensor in (*model.parameters(), *model.buffers())
        }
        for model in self._models:
            for name, module in model.named_modules():
                self._handles.append(module.register_forward_pre_hook(self._entered(name)))
                self._handles.append(module.register_forward_hook(self._left, always_call=True))
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _entered(self, name: str) -> Callable[..., None]:
        return lambda *_: self._inside.append(name)

    def _left(self, *_: Any) -> None:
        self._inside.pop()

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        known = self._kept.get(storage._cdata)
        if storage._cdata not in self._own and (known is None or known[0].expired()):
            self._kept[storage._cdata] = StorageWeakRef(storage), self.inside
        return tensor if tensor.is_leaf else tensor.detach()  # an operation must not keep its own output alive

    @property
    def inside(self) -> str:
        """The innermost module whose forward runs now; "" outside all."""
        return self._inside[-1] if self._inside else ""

    @property
    def by_module(self) -> dict[str, int]:
        """Bytes alive now, by the innermost module whose operation kept them first; "" is outside all modules."""
        sizes: dict[str, int] = {}
        for reference, name in self._kept.values():
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)  # pyright: ignore[reportAttributeAccessIssue]
            if storage is not None and storage.nbytes():
                sizes[name] = sizes.get(name, 0) + storage.nbytes()
        return sizes

    @property
    def bytes(self) -> int:
        """Bytes alive now."""
        return sum(self.by_module.values())
