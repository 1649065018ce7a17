"""Keys and values of the tokens so far, so that a new token costs one position and not the whole sequence.

`caching` replaces each layer's core attention by a `CachedAttention` and puts it back afterwards. The layers themselves
do not know about it: they call their core with the queries, keys and values of the new positions.

Prompts of unequal length are padded on the left, so that all samples write the same position of the cache. A mask hides
the padding.

Shapes: B samples, n = B x query heads, m = B x key/value heads of this rank, D head dimension, S new positions, T all
positions so far, including the new ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.models.attention import ParallelAttention


class CachedAttention(nn.Module):
    """softmax(q k^T / sqrt(D)) v over the positions so far and the new ones; causal.

    Args:
        longest: positions for which the cache has room.
        padding_B: padded positions at the left end of each sample; None if no sample has any.
    """

    def __init__(self, longest: int, padding_B: Tensor | None) -> None:
        super().__init__()
        self.longest, self.padding_B = longest, padding_B
        self.used = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from the new positions: q [1, n, S, D], k and v [1, m, S, D] -> [1, n, S, D]."""
        first, self.used = self.used, self.used + q.shape[2]
        keys, values = self._appended(k, v, first)
        mask = self._mask(first, q.shape[1]) if self.padding_B is not None else None
        return F.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, is_causal=mask is None and first == 0 and q.shape[2] > 1,
            enable_gqa=q.shape[1] > k.shape[1],
        )  # fmt: skip

    def _appended(self, k: Tensor, v: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Store the new keys and values, and return all so far."""
        if self.keys is None or self.values is None:
            shape = (1, k.shape[1], self.longest, k.shape[3])
            self.keys, self.values = k.new_empty(shape), v.new_empty(shape)
        self.keys[:, :, first : self.used] = k
        self.values[:, :, first : self.used] = v
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]

    def _mask(self, first: int, heads: int) -> Tensor:
        """Return a mask [1, n, S, T], True where a query may attend: to itself, and to earlier positions that are not
        padding.

        A padded position attends to itself alone: its result is never used, but a row without any key would be nan.
        """
        assert self.padding_B is not None
        new = torch.arange(first, self.used, device=self.padding_B.device)
        all_T = torch.arange(self.used, device=self.padding_B.device)
        earlier_ST = all_T <= new[:, None]
        real_BT = all_T >= self.padding_B[:, None]
        mask_BST = (earlier_ST & real_BT[:, None]) | (all_T == new[:, None])
        return mask_BST.repeat_interleave(heads // len(self.padding_B), dim=0)[None]


@contextmanager
def caching(chunk: nn.Module, longest: int, padding_B: Tensor | None = None) -> Iterator[None]:
    """Let the attention layers of `chunk` keep keys and values in the block; each forward continues the one before."""
    layers = [module for module in chunk.modules() if isinstance(module, ParallelAttention)]
    cores = [layer.core for layer in layers]
    for layer in layers:
        layer.core = CachedAttention(longest, padding_B)
    try:
        yield
    finally:
        for layer, core in zip(layers, cores, strict=True):
            layer.core = core
