"""Tables cut along the vocabulary: the embedding, and the weight of the output layer.

Rank r of t owns rows [r V'/t, (r+1) V'/t) of the padded vocabulary V'. Padding rows exist so that t and the GEMM's tile
divide V'. They are zero, take no part in the loss and get no gradient, so the layout never changes a result.

Shapes: S sequence, B batch, H hidden, V the vocabulary's columns on this rank; t = size of the group.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from labkit.comm.groups import Group
from labkit.comm.ledger import comm_scope
from labkit.events import span
from labkit.parallel.layers import LinearPlan, column_parallel_linear
from labkit.parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from labkit.parallel.parameters.weights import WeightOptions, make_parameter
from labkit.parallel.vocab.token_ids import check_token_ids
from labkit.parallel.weight_grad_store import deferred


def padded_vocab_size(vocab_size: int, divisible_by: int, tp: int) -> int:
    """Return the vocabulary rounded up to a multiple of divisible_by x tp: 50257, 128, 8 -> 51200."""
    multiple = divisible_by * tp
    return -(-vocab_size // multiple) * multiple


def make_vocab_parameter(
    name: str,
    vocab_size: int,
    hidden: int,
    *,
    group: Group,
    divisible_by: int = 128,
    **weight: Unpack[WeightOptions],
) -> nn.Parameter:
    """Return this rank's rows of a vocabulary table, [V, H], for an embedding or an untied output layer."""
    weight.setdefault("std", 0.02)
    return make_parameter(
        name,
        (vocab_size, hidden),
        group=group,
        partition_dim=0,
        padded_rows=padded_vocab_size(vocab_size, divisible_by, group.size),
        **weight,
    )


class _Lookup(Function):
    """Rows of a table: a linear layer whose inputs are one-hot rows that nobody makes. The ids have no gradient.

    forward   y_n = W[id_n]                           [..] -> [.., I]
    wgrad     dW_v = sum of the dy_n with id_n = v    [.., I] -> [O, I], dense
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.parameter, ctx.name = weight, name
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (ids,), parameter, name = ctx.saved_tensors, ctx.parameter, ctx.name

        def wgrad() -> tuple[Tensor]:
            with span(f"{name} weight_grad", "weight_grad"):
                return (torch.ops.aten.embedding_dense_backward(grads[0], ids, parameter.shape[0], -1, False),)

        return None, None if deferred((parameter,), wgrad) else wgrad()[0], None


def table_lookup(ids: Tensor, weight: Tensor, name: str) -> Tensor:
    """Return the rows of `weight` [O, I] that `ids` name, [.., I]: `F.embedding` whose gradient can wait for W."""
    return _Lookup.apply(ids, weight, name)  # type: ignore[no-any-return]


class VocabParallelEmbedding(nn.Module):
    """Rows of a table cut along the vocabulary: each rank looks up its own ids, with zeros for the rest, and g sums.

    Args:
        name: name in the whole model; the parameter is `<name>.weight`, [V, H].
        vocab_size: tokens before padding.
        hidden: H.
        group: tensor-parallel group.
        divisible_by: the table is padded to a multiple of this x t rows.
        reduce_scatter_embeddings: sequence parallelism: return this rank's part of the first dimension, the sequence.
        weight: how the table is drawn, as in `make_vocab_parameter`.
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
        **weight: Unpack[WeightOptions],
    ) -> None:
        super().__init__()
        self.name, self.vocab_size, self.group = name, vocab_size, group
        self.add_up = reduce_from_tensor_model_parallel_region
        if reduce_scatter_embeddings:
            self.add_up = reduce_scatter_to_sequence_parallel_region
        self.weight = make_vocab_parameter(
            f"{name}.weight", vocab_size, hidden, group=group, divisible_by=divisible_by, **weight
        )

    def forward(self, tokens: Tensor, *, check_ids: bool = True) -> Tensor:
        """tokens [S, ..] -> [S, .., H], or [S/t, .., H]. TokenIdError for an id outside the vocabulary.

        check_ids: False if the caller has checked them already (`check_token_ids`).
        """
        if check_ids:
            tokens = check_token_ids(tokens, self.vocab_size)
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
    """Return this rank's columns of the logits, [S, B, V]; f is included, so `hidden` is whole and equal on every rank.

    sequence_parallel: `hidden` is this rank's part of the sequence instead, [S/t, B, H]; the logits cover all of it.
    """
    plan = LinearPlan(name, group, sequence_parallel=sequence_parallel and group.size > 1)
    with comm_scope(layer=name):
        return column_parallel_linear(hidden_SBH, weight_VH, None, plan)
