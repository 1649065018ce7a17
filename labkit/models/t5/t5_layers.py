"""The parts of T5's layers that no other family has: relative positions and cross-attention.

    encoder layer    x + attention(norm(x)), x + mlp(norm(x))
    decoder layer    x + attention(norm(x)), x + cross(norm(x), encoded), x + mlp(norm(x))

`model.position` chooses between two forms. `learned` is Megatron-LM's: an embedding table gives positions, and scores
are q k^T / sqrt(D). `relative` is that of arXiv 1910.10683: scores are q k^T plus a learned bias, one number for each
head and each bucket of distances. All layers of a half share its biases. Cross-attention has none.

Shapes: S positions of the encoder, T of the decoder, B batch, H hidden, D head dimension, n = B x heads of this rank.
With t tensor-parallel ranks under sequence parallelism, S and T are S/t and T/t.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding as lookup

from labkit.comm.groups import Group
from labkit.config import ModelConfig
from labkit.models.blocks import TransformerLayer
from labkit.models.build import Build, LayerSpec
from labkit.models.core_attention import CoreAttention
from labkit.parallel.layers import ColumnParallelLinear
from labkit.parallel.parameters.weights import make_parameter
from labkit.parallel.random import RngTracker


def score_scale(config: ModelConfig) -> float | None:
    """Return the factor of the scores: 1 with relative positions; None, which is 1 / sqrt(D), with learned ones."""
    return 1.0 if config.position == "relative" else None


class HalfSpec(LayerSpec):
    """The parts of the layers of one half."""

    def __init__(self, *, causal: bool) -> None:
        """causal: the kernel hides later positions. With relative positions the mask that holds the biases does."""
        self.causal = causal

    def core_attention(
        self, name: str, config: ModelConfig, rng: RngTracker | None, tp: Group, cp: Group | None, cp_comm_type: str
    ) -> nn.Module:
        """Return the module that computes softmax(scale q k^T + mask) v of this rank's heads."""
        causal = self.causal and config.position != "relative"
        return CoreAttention(config, rng, cp, cp_comm_type, name=name, causal=causal, scale=score_scale(config))


def relative_buckets(queries: int, keys: int, *, both_ways: bool, buckets: int, max_distance: int) -> Tensor:
    """Return the bucket of each pair of positions, int64 [queries, keys] (arXiv 1910.10683, section 2.1).

    Half of the buckets are for one distance each. The others grow with the logarithm of the distance up to
    `max_distance`, and the last one has all beyond. With `both_ways` the first half of all buckets is for keys at or
    before the query, the second for keys after it. Otherwise keys after the query are in bucket 0.
    """
    ahead = torch.arange(keys)[None, :] - torch.arange(queries)[:, None]
    first = torch.zeros_like(ahead)
    if both_ways:
        buckets //= 2
        first = (ahead > 0) * buckets
    distance = ahead.abs() if both_ways else (-ahead).clamp(min=0)
    exact = buckets // 2
    octaves = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (octaves * (buckets - exact)).long()).clamp(max=buckets - 1)
    return first + torch.where(distance < exact, distance, far)


class RelativeBias(nn.Module):
    """One number for each bucket of distances and each head: `weight` [buckets, heads], cut by heads over t.

    Under sequence parallelism a rank computes the scores of whole sequences, so its gradient is complete.
    """

    def __init__(self, name: str, build: Build, *, both_ways: bool) -> None:
        super().__init__()
        config, self.both_ways = build.config, both_ways
        self.buckets, self.max_distance = config.relative_buckets, config.relative_max_distance
        shape = (config.relative_buckets, config.heads)
        self.weight = make_parameter(f"{name}.weight", shape, group=build.group, partition_dim=1, **build.drawn)
        usual = config.seq_length if both_ways else config.decoder_seq_length or config.seq_length
        self.register_buffer("places", self._places(usual), persistent=False)

    def forward(self, length: int) -> Tensor:
        """Return the biases of a sequence of `length`, [heads of this rank, length, length]."""
        if length > len(self.places):  # kept on the device: a copy from the host at each call would break a capture
            self.places = self._places(length)
        return lookup(self.places[:length, :length], self.weight).permute(2, 0, 1)

    def _places(self, length: int) -> Tensor:
        """Return the bucket of each pair of positions, int32 [length, length], on the weight's device."""
        found = relative_buckets(
            length, length, both_ways=self.both_ways, buckets=self.buckets, max_distance=self.max_distance
        )
        return found.to(self.weight.device, torch.int32)


class CrossAttention(nn.Module):
    """Attention of the decoder's positions to the encoder's output, with whole heads on each rank.

    `q` reads the decoder, `kv` the encoder. `kv` has Megatron's order of columns, [k v] for each head. There is one
    all-reduce forward (after `proj`), and two backward (before `q` and `kv`), because there are two inputs.
    """

    def __init__(self, name: str, build: Build) -> None:
        super().__init__()
        config, linear = build.config, build.linear()
        self.name, self.recompute = name, build.recompute
        self.head_dim = config.hidden // config.heads
        self.norm, column = build.norm_before(f"{name}.norm")
        self.q = column(f"{name}.q", config.hidden, config.hidden, **linear)
        self.kv = ColumnParallelLinear(f"{name}.kv", config.hidden, 2 * config.hidden, **linear)
        self.core = CoreAttention(config, build.rng, name=name, causal=False, scale=score_scale(config))
        proj = build.linear(std=build.residual_std)
        self.proj = build.spec.row_parallel(f"{name}.proj", config.hidden, config.hidden, **proj)

    def forward(self, x_TBH: Tensor, encoded_SBH: Tensor, mask: Tensor | None) -> Tensor:
        """[T, B, H] -> [T, B, H], to be added to x. `mask` hides padding of the encoder's input."""
        q = self.recompute.norm(self.norm, x_TBH, lambda y_TBH: self.q(y_TBH)[0])
        kv, _ = self.kv(encoded_SBH)
        (length, batch, _), (keys, _, _) = q.shape, kv.shape
        k, v = kv.view(keys, -1, 2, self.head_dim).permute(2, 1, 0, 3)[:, None]
        q = q.view(length, -1, self.head_dim).transpose(0, 1)[None]
        attended = self.recompute.part("core_attn", self.core, q, k, v, mask)
        output, _ = self.proj(attended.transpose(1, 2).reshape(length, batch, -1))
        return output  # type: ignore[no-any-return]


class DecoderLayer(TransformerLayer):
    """A layer with cross-attention between its two halves."""

    def __init__(self, index: int, build: Build) -> None:
        super().__init__(index, build)
        self.cross_attention = CrossAttention(f"{build.prefix}layers.{index}.cross_attention", build)

    def forward(  # type: ignore[override]
        self, x_TBH: Tensor, encoded_SBH: Tensor, mask: Tensor | None, cross_mask: Tensor | None
    ) -> Tensor:
        """[T, B, H] -> [T, B, H]. The masks are those of `CoreAttention`, for attention and for cross-attention."""
        x_TBH = self.forward_attention(x_TBH, None, mask)  # pyright: ignore[reportArgumentType]
        x_TBH = x_TBH + self.dropout(self.cross_attention(x_TBH, encoded_SBH, cross_mask))
        return self.forward_mlp(x_TBH)
