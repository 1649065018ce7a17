"""What forwards and steps count, and that a capture must not change: it runs them for its own sake."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from labkit.fp8.scaling import Float8Scaling


@contextmanager
def counters_kept(chunks: Sequence[Any]) -> Iterator[None]:
    """After the block, all that the model chunks count is what it was before."""
    before = [(tensor, tensor.clone()) for chunk in chunks for tensor in counters(chunk)]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)


def counters(chunk: Any) -> Iterator[Tensor]:
    """Buffers, what modules keep as `statistics.totals` (routers), and the magnitudes behind scales of fp8."""
    for module in chunk.modules():
        yield from nn.Module.buffers(module, recurse=False)  # a wrapper's own `buffers` are those of its gradients
        totals = getattr(getattr(module, "statistics", None), "totals", None)
        if isinstance(totals, Tensor):
            yield totals
    scaling = getattr(chunk, "precision", None)
    if isinstance(scaling, Float8Scaling):
        yield from scaling.state
