"""The embeddings before the first layer, the output layer after the last, and rotary positions (RoPE, arXiv
2104.09864). Embedding and output layer may share a table. RoPE turns pairs of features by an angle that grows with the
position.

Shapes: S sequence, B batch, H hidden, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labkit.models.build import Build
from labkit.parallel.parameters.parameter_record import record_of
from labkit.parallel.parameters.weights import make_parameter
from labkit.parallel.vocab.token_ids import check_token_ids
from labkit.parallel.vocab.vocab_parallel import VocabParallelEmbedding, make_vocab_parameter


class PositionEmbedding(nn.Module):
    """A learned vector per position (`position = learned`), whole on every rank of the first stage.

    Under sequence parallelism a rank adds the vectors of its own positions to its part of the words, whose sum is
    reduce-scattered and never whole. Its gradient lacks the other ranks' rows until `finalize_model_grads`.
    """

    def __init__(self, name: str, build: Build) -> None:
        super().__init__()
        shape = (build.config.seq_length, build.config.hidden)
        self.weight = build.whole_here(make_parameter(f"{name}.weight", shape, **build.drawn))
        self.sequence_parts = build.sequence_parts
        self.sequence_part = build.group.rank if build.sequence_parallel else 0

    def forward(self, length: int, position_ids_BS: Tensor | None) -> Tensor:
        """Return this rank's part of the vectors of positions 0, 1, .. as [S, 1, H], or of given ones as [S, B, H]."""
        own = self.own_positions(length)
        if position_ids_BS is None:
            return self.weight[own, None]
        return nn.functional.embedding(position_ids_BS.t()[own], self.weight)

    def own_positions(self, length: int) -> slice:
        """Return the slice of `length` positions that this rank holds between tensor-parallel regions."""
        each = length // self.sequence_parts
        return slice(self.sequence_part * each, (self.sequence_part + 1) * each)


class Embedding(nn.Module):
    """Tokens and, where they are learned, positions: [B, S] -> [S, B, H]."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        config = build.config
        self.word = VocabParallelEmbedding(
            "embedding.word",
            config.vocab_size,
            config.hidden,
            group=build.group,
            divisible_by=config.make_vocab_size_divisible_by,
            reduce_scatter_embeddings=build.sequence_parallel,
            **build.drawn,
        )
        tied = not config.untie_embeddings_and_output_weights
        record_of(self.word.weight).shared_embedding = tied
        self.position = PositionEmbedding("embedding.position", build) if config.position == "learned" else None
        self.dropout = build.dropout(config.embedding_dropout)

    def forward(self, tokens_BS: Tensor, position_ids_BS: Tensor | None = None) -> Tensor:
        """[B, S] -> [S, B, H]. TokenIdError for an id outside the vocabulary."""
        ids_BS = check_token_ids(tokens_BS, self.word.vocab_size)  # an error names the place in what was given
        x_SBH = self.word(ids_BS.t(), check_ids=False)  # transposing ids is cheaper than transposing vectors
        if self.position is not None:
            x_SBH = x_SBH + self.position(tokens_BS.shape[1], position_ids_BS)
        return self.dropout(x_SBH)


class OutputLayer(nn.Module):
    """Holds the output weight: its own where untied, or the last stage's copy of the word embedding.

    The copy is drawn under the embedding's name and therefore starts equal to it; `gradients.finalize_model_grads` sums
    the gradients of both (`shared_embedding`), so they stay equal. Only the copy is marked `shared`, so that norms and
    checkpoints count the weight once.
    """

    def __init__(self, build: Build) -> None:
        super().__init__()
        config = build.config
        tied = not config.untie_embeddings_and_output_weights
        self.weight = make_vocab_parameter(
            "embedding.word.weight" if tied else "output.weight",
            config.vocab_size,
            config.hidden,
            group=build.group,
            divisible_by=config.make_vocab_size_divisible_by,
            **build.drawn,
        )
        record = record_of(self.weight)
        record.shared = record.shared_embedding = tied

    def forward(self) -> Tensor:
        """Return the weight. It is called like any layer, so that hooks that wait for parameters work here too."""
        return self.weight


Rotary = tuple[Tensor, Tensor]
"""cos and sin, each [S, 1 or B x heads, 1, D/2]."""


def rotary_table(length: int, dim: int, theta: float) -> Tensor:
    """Return the angles of RoPE (arXiv 2104.09864) in float64, [length, dim / 2]: position x theta^(-2i / dim)."""
    if dim % 2:
        raise ValueError(f"rotary positions rotate pairs of features; a head needs an even number, not {dim}")
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return torch.outer(torch.arange(length, dtype=torch.float64), frequencies)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Turn feature i of each head with feature i + D/2 by the angle of its position; [S, heads, n, D] -> the same."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class RotaryTable(nn.Module):
    """cos and sin of every position, [seq_length, D/2]; a chunk's layers share them, and no checkpoint has them."""

    cos: Tensor
    sin: Tensor

    def __init__(self, build: Build) -> None:
        super().__init__()
        config = build.config
        angles = rotary_table(config.seq_length, config.hidden // config.heads, config.rope_theta)
        self.register_buffer("cos", angles.cos().to(**build.factory_kwargs), persistent=False)
        self.register_buffer("sin", angles.sin().to(**build.factory_kwargs), persistent=False)
        self.sequence_parts = build.sequence_parts
        self.heads = max(1, (config.kv_heads or config.heads) // build.group.size)

    def forward(self, x_SBH: Tensor, position_ids_BS: Tensor | None) -> Rotary:
        """Return cos and sin of this microbatch, [S, 1, 1, D/2]. With given positions they are [S, B x key/value heads
        of this rank, 1, D/2]."""
        if position_ids_BS is None:
            length = x_SBH.shape[0] * self.sequence_parts
            return self.cos[:length, None, None], self.sin[:length, None, None]
        alike = position_ids_BS.shape[0] == 1  # one row for all samples, and so for all heads
        positions = position_ids_BS.t().repeat_interleave(1 if alike else self.heads, dim=1)
        return self.cos[positions].unsqueeze(2), self.sin[positions].unsqueeze(2)
