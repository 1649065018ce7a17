"""Tables cut along the vocabulary: the embedding, and the weight of the output layer.

Rank r of t owns rows [r V'/t, (r+1) V'/t) of the padded vocabulary V'. Padding rows exist so that t and the GEMM's tile
divide V'; they are zero, take no part in the loss and get no gradient, so the layout never changes a result.

Shapes: S sequence, B batch, H hidden, V the vocabulary's columns on this rank; t = size of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from labkit.parallel.capturing import is_graph_capturing
from labkit.parallel.groups import Group
from labkit.parallel.layers import LinearPlan, column_parallel_linear, table_lookup
from labkit.parallel.ledger import comm_scope
from labkit.parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from labkit.parallel.weights import make_parameter


class TokenIdError(ValueError):
    """A token id outside the vocabulary. Without a check it would be looked up as zeros wherever tp > 1."""


class _Postponed:
    """Of this process."""

    note: Callable[[Tensor, int, str], None] | None = None


@contextmanager
def token_ids_noted(note: Callable[[Tensor, int, str], None]) -> Iterator[None]:
    """While a CUDA graph is captured inside the block, `check_token_ids` hands its arguments to `note`, which sees to
    it that these ids are looked at whenever the graph is replayed."""
    outer, _Postponed.note = _Postponed.note, note
    try:
        yield
    finally:
        _Postponed.note = outer


def check_token_ids(ids: Tensor, vocab_size: int, what: str = "token") -> None:
    """Refuse ids outside 0..vocab_size-1: the same error at every tp, and the same on every rank of a group.

    One pass over the ids on a host tensor; on a GPU one synchronisation. While a CUDA graph is captured the host must
    not look, and at a replay this is not called: whoever captures asks for the ids (`token_ids_noted`).

    Raises:
        TokenIdError: names the first such id, its position and the range.
    """
    if ids.numel() == 0:
        return
    if is_graph_capturing():
        if _Postponed.note is not None:
            _Postponed.note(ids, vocab_size, what)
        return
    lowest, highest = torch.stack(torch.aminmax(ids)).tolist()
    if lowest >= 0 and highest < vocab_size:
        return
    position = tuple(((ids < 0) | (ids >= vocab_size)).nonzero()[0].tolist())
    raise TokenIdError(
        f"{what} id {int(ids[position])} at position {position} of {tuple(ids.shape)} is outside the vocabulary "
        f"0..{vocab_size - 1}; check that the tokenizer and the model have the same vocabulary"
    )


def padded_vocab_size(vocab_size: int, divisible_by: int, tp: int) -> int:
    """The vocabulary rounded up to a multiple of divisible_by x tp: 50257, 128, 8 -> 51200."""
    multiple = divisible_by * tp
    return -(-vocab_size // multiple) * multiple


def make_vocab_parameter(
    name: str,
    vocab_size: int,
    hidden: int,
    *,
    group: Group,
    divisible_by: int = 128,
    seed: int = 0,
    std: float = 0.02,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> nn.Parameter:
    """This rank's rows of a vocabulary table, [V, H]: an embedding or an untied output layer."""
    return make_parameter(
        name,
        (vocab_size, hidden),
        seed=seed,
        std=std,
        group=group,
        partition_dim=0,
        padded_rows=padded_vocab_size(vocab_size, divisible_by, group.size),
        dtype=dtype,
        device=device,
    )


class VocabParallelEmbedding(nn.Module):
    """Rows of a table cut along the vocabulary: each rank looks up its own ids, zeros stand for the rest, g adds up.

    Args:
        name: name in the whole model; the parameter is `<name>.weight`, [V, H].
        vocab_size: tokens before padding.
        hidden: H.
        group: tensor-parallel group.
        divisible_by: the table is padded to a multiple of this x t rows.
        reduce_scatter_embeddings: sequence parallelism: return this rank's part of the first dimension, the sequence.
        seed, std: of the initial weight, N(0, std) by (seed, name).
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden: int,
        *,
        group: Group,
        divisible_by: int = 128,
        reduce_scatter_embeddings: bool = False,
        seed: int = 0,
        std: float = 0.02,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.name, self.vocab_size, self.group = name, vocab_size, group
        self.add_up = reduce_from_tensor_model_parallel_region
        if reduce_scatter_embeddings:
            self.add_up = reduce_scatter_to_sequence_parallel_region
        made: dict[str, Any] = {"divisible_by": divisible_by, "seed": seed, "std": std}
        made |= {"dtype": dtype, "device": device}
        self.weight = make_vocab_parameter(f"{name}.weight", vocab_size, hidden, group=group, **made)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [S, ..] -> [S, .., H], or [S/t, .., H]. TokenIdError for an id outside the vocabulary."""
        check_token_ids(tokens, self.vocab_size)
        if self.group.size == 1:
            return table_lookup(tokens, self.weight, self.name)
        rows = self.weight.shape[0]
        local = tokens - self.group.rank * rows
        foreign = (local < 0) | (local >= rows)
        with comm_scope(layer=self.name):
            own = table_lookup(local.masked_fill(foreign, 0), self.weight, self.name)
            own = own.masked_fill(foreign.unsqueeze(-1), 0.0)
            return self.add_up(own, self.group)


def parallel_lm_logits(
    hidden_SBH: Tensor, weight_VH: Tensor, group: Group, *, sequence_parallel: bool = False, name: str = "output"
) -> Tensor:
    """This rank's columns of the logits, [S, B, V]; f is included, so `hidden` is whole and alike on every rank.

    sequence_parallel: `hidden` is this rank's part of the sequence instead, [S/t, B, H]; the logits are of all of it.
    """
    plan = LinearPlan(name, group, sequence_parallel=sequence_parallel and group.size > 1)
    with comm_scope(layer=name):
        return column_parallel_linear(hidden_SBH, weight_VH, None, plan)
