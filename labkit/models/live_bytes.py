"""Count the bytes of tensors in memory after each operation of a block, forward and backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Keep the bytes after each operation of torch: `with LiveBytes() as memory: ...`, then `memory.moments`.

    Memory that the block has made counts, from the operation that makes it until nothing holds it any more, a storage
    once and whole. What was there before the block does not count, nor what a kernel takes and gives back by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moments: list[int] = []
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def peak(self) -> int:
        """The most bytes at any moment."""
        return max(self.moments, default=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count after it."""
        self._note((args, kwargs), made=False)
        result = func(*args, **(kwargs or {}))
        self._note(result, made=True)
        self.moments.append(sum(size for storage, size in self._known.values() if not storage.expired()))
        return result

    def _note(self, tensors: Any, *, made: bool) -> None:
        for tensor in tree_leaves(tensors):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            known = self._known.get(storage._cdata)
            if known is None or known[0].expired():
                self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes() if made else 0
