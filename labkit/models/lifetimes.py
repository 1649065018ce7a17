"""Note, kernel by kernel, which of some tensors are in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

KERNELS = ("native_layer_norm", "mm", "gelu", "native_layer_norm_backward", "gelu_backward")
"""Operations of torch that count as a moment: norms, products and GeLUs, in forward and in backward."""


class Lifetimes(TorchDispatchMode):
    """Keep a list of moments: `with Lifetimes() as memory: ...`, then `memory.moments`.

    A moment is the end of a kernel: its name, and the names of the watched tensors that are in memory then. A tensor is
    in memory as long as anything, such as a node of autograd's graph, holds its storage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moments: list[tuple[str, tuple[str, ...]]] = []
        self._watched: list[tuple[str, StorageWeakRef]] = []

    def results_of(self, function: Callable[..., Tensor], names: Sequence[str]) -> Callable[..., Tensor]:
        """Return `function`, whose first results are watched under these names."""
        waiting = list(names)

        def watched(*args: Any, **kwargs: Any) -> Tensor:
            result = function(*args, **kwargs)
            if waiting:
                self._watched.append((waiting.pop(0), StorageWeakRef(result.untyped_storage())))
            return result

        return watched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and note what is in memory after it."""
        result = func(*args, **(kwargs or {}))
        kernel = func.overloadpacket.__name__
        if kernel in KERNELS:
            here = tuple(name for name, storage in self._watched if not storage.expired())
            self.moments.append((kernel, here))
        return result
