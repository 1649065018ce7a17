"""Context parallelism: every rank of `cp` holds two chunks of each sequence, through all layers (arXiv 2310.01889).

Only attention mixes positions, so only attention communicates (ring_attention.py). Position embeddings, learned and
rotary, need the positions of the rank's rows: `zigzag_positions`.

Shapes: B batch, S whole sequence, L = S / cp positions of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.comm.groups import Group
from labkit.parallel.context.ring_plan import Layout, chunk_length, chunks_of_rank


def split_sequence(x: Tensor, cp: int, rank: int, dim: int, layout: Layout) -> Tensor:
    """Return this rank's two chunks of `dim`, one after the other; with cp 1 return x itself.

    Raises:
        ValueError: a length that 2 cp does not divide, an unknown rank or layout.
    """
    first, second = chunks_of_rank(cp, rank, layout)
    if cp == 1:
        return x
    chunk = chunk_length(x.shape[dim], cp)
    return torch.cat([x.narrow(dim, first * chunk, chunk), x.narrow(dim, second * chunk, chunk)], dim=dim)


def join_sequence(parts: Sequence[Tensor], dim: int, layout: Layout) -> Tensor:
    """Return the whole sequence from the parts of ranks 0 .. cp - 1: the inverse of `split_sequence`."""
    cp = len(parts)
    order = [chunk for rank in range(cp) for chunk in chunks_of_rank(cp, rank, layout)]
    chunks = [chunk for part in parts for chunk in part.chunk(2, dim)] if cp > 1 else list(parts)
    return torch.cat([chunks[order.index(place)] for place in range(len(chunks))], dim=dim)


def sequence_positions(
    seq_length: int, cp: int, rank: int, layout: Layout, *, device: torch.device | str | None = None
) -> Tensor:
    """Return the positions of this rank's rows in the whole sequence, int64 [L]. ValueError as in `split_sequence`."""
    return split_sequence(torch.arange(seq_length, device=device), cp, rank, 0, layout)


def zigzag_split(x: Tensor, cp: int, rank: int, dim: int) -> Tensor:
    """Return the chunks `rank` and `2 cp - 1 - rank` of `dim` (Megatron's split). See `split_sequence`."""
    return split_sequence(x, cp, rank, dim, "zigzag")


def zigzag_positions(seq_length: int, cp: int, rank: int, *, device: torch.device | str | None = None) -> Tensor:
    """Return the positions of this rank's rows under the zigzag split: int64 [S / cp]."""
    return sequence_positions(seq_length, cp, rank, "zigzag", device=device)


def get_batch_on_this_cp_rank(batch: Mapping[str, Tensor | None], group: Group) -> dict[str, Any]:
    """Return this rank's part of a batch whose tensors are [B, S, ...].

    An `attention_mask` [B, 1, S, S] is cut by queries. Position ids in the batch are cut like everything else. Without
    them the model takes `zigzag_positions`. None stays None. With a group of size 1 the tensors are the given tensors.

    Raises:
        ValueError: a length that 2 cp does not divide.
    """
    return {
        name: x if x is None else zigzag_split(x, group.size, group.rank, 2 if name == "attention_mask" else 1)
        for name, x in batch.items()
    }
