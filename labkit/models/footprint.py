"""Follow a run, operation by operation: how much it has computed, and how many bytes autograd keeps at that moment."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from labkit.models.saved_tensors import SavedTensors


class Footprint(TorchDispatchMode):
    """Count operations and kept bytes: `with Footprint(model, limit=10**6) as run: ...`, then `run.moments`.

    `operations` are the multiplications and additions of matrix products, as torch's FlopCounterMode counts them. Bytes
    are those of `SavedTensors`: what autograd keeps for backward, each storage once. An allocator holds more, such as
    results and gradients that are just being used.
    """

    def __init__(self, *models: nn.Module, limit: float | None = None) -> None:
        """models: as in `SavedTensors`. limit: more kept bytes than this raise MemoryError."""
        super().__init__()
        self._saved, self.limit = SavedTensors(*models), limit
        self.operations = 0
        self.moments: list[tuple[int, int]] = [(0, 0)]
        """(operations so far, bytes that are kept) after each operation."""

    @property
    def peak(self) -> int:
        """The most bytes that were kept at a moment."""
        return max(size for _, size in self.moments)

    @property
    def kept(self) -> int:
        """Bytes that are kept now."""
        return self._saved.bytes

    def __enter__(self) -> Footprint:
        self._saved.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._saved.__exit__(*exception)
        self.moments.append((self.operations, self.kept))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and note how much has been computed and what is kept; `limit` says what raises."""
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        self.operations += count(*args, **(kwargs or {}), out_val=result) if count else 0
        self.moments.append((self.operations, self.kept))
        if self.limit is not None and self.moments[-1][1] > self.limit:
            where = self._saved.inside
            raise MemoryError(
                f"out of memory{' in ' + where if where else ''}: {self.moments[-1][1]:,} bytes are kept for backward, "
                f"and there is room for {self.limit:,.0f}"
            )
        return result
