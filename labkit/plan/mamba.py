"""Sizes of a Mamba layer, and its cost in closed form: parameters, operations, saved activations. No torch.

The input projection makes five things for each position. The gate z and the input x have W = R P columns for each
group, b and c have N each, and the step dt has one column for each of the R heads. `MambaMixer` stores the five group
by group.

H is the hidden size, G the number of groups, R the heads of a group, P the width of a head, W = R P, N the size of the
state. K is the width of the convolution, Q the chunk, t the tensor-parallel size. Each of t ranks has G / t groups.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.config import ModelConfig

CHUNK = 128
"""Q, the positions that the scan computes by one product; also the default of Megatron's `chunk_size`."""


@dataclass(frozen=True, slots=True)
class MambaSizes:
    """Sizes of a Mamba layer on one of `tp` ranks."""

    groups: int
    """G on this rank."""
    heads: int
    """R, heads of one group."""
    head_dim: int
    """P, the width of a head."""
    state: int
    """N, the size of the state."""

    @property
    def inner(self) -> int:
        """W, the width of one group."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Channels of one group that pass the convolution: x, b and c."""
        return self.inner + 2 * self.state

    @property
    def projected(self) -> int:
        """Columns of one group that the input projection makes: z, x, b, c and dt."""
        return self.inner + self.convolved + self.heads


def mamba_sizes(model: ModelConfig, tp: int = 1) -> MambaSizes:
    """Return the sizes on one rank of a layer that is cut over tp ranks."""
    groups = model.mamba_num_groups
    return MambaSizes(groups // tp, model.mamba_heads // groups, model.mamba_head_dim, model.mamba_state_dim)


def mamba_parameters(model: ModelConfig, tp: int = 1) -> int:
    """Return the parameters of one mixer on one rank, without the norm before it."""
    sizes, h = mamba_sizes(model, tp), model.hidden
    projections = sizes.projected * (h + model.bias) + sizes.inner * h
    convolution = sizes.convolved * (model.mamba_conv_width + 1)
    return sizes.groups * (projections + convolution + 3 * sizes.heads + sizes.inner) + h * model.bias


def mamba_linear_flops(model: ModelConfig) -> int:
    """Return the operations of both projections for one token: 2 H (columns of the first + rows of the second)."""
    sizes = mamba_sizes(model)
    return 2 * model.hidden * sizes.groups * (sizes.projected + sizes.inner)


def scan_flops(model: ModelConfig, *, causal: bool) -> int:
    """Return the operations of the products of one scan over one sequence.

    A chunk of q positions has c b^T (q^2 N for each group) and its product with x (q^2 P for each head). All chunks but
    the first read the state, and all but the last write it: q N P for each head. A multiply-add is two operations.

    causal: count only the q (q + 1) / 2 of the q^2 pairs that look back.
    """
    sizes, length = mamba_sizes(model), model.seq_length
    chunks = [min(CHUNK, length - first) for first in range(0, length, CHUNK)]
    pairs = sum(q * (q + 1) // 2 if causal else q * q for q in chunks)
    moved = 2 * length - chunks[0] - chunks[-1]
    of_head = pairs * sizes.head_dim + moved * sizes.state * sizes.head_dim
    return 2 * sizes.groups * (pairs * sizes.state + sizes.heads * of_head)


def mixer_saved(model: ModelConfig, samples: int, tp: int = 1) -> dict[str, int]:
    """Return tensor -> elements of float32 (or wider) that a mixer keeps for backward between its two projections.

    Every chunk has a decay and a weight for each pair of positions. The gate z is a view, so the gated norm keeps
    everything that the input projection made.
    """
    sizes, length = mamba_sizes(model, tp), model.seq_length
    groups, tokens = samples * sizes.groups, samples * length * sizes.groups
    kept = {
        "padded x, b, c": (length + model.mamba_conv_width - 1) * groups * sizes.convolved,
        "x, b, c before silu": tokens * sizes.convolved,
        "x, b, c": tokens * sizes.convolved,
        "dt": 2 * tokens * sizes.heads,
    }
    for first in range(0, length, CHUNK):
        kept |= _chunk_saved(sizes, groups, min(CHUNK, length - first), first > 0, first + CHUNK < length, first)
    return kept | {"gate": tokens * sizes.projected, "gated norm": tokens * (4 * sizes.inner + 1)}


def _chunk_saved(sizes: MambaSizes, groups: int, q: int, reads: bool, writes: bool, first: int) -> dict[str, int]:
    """Return the elements kept for a chunk of q positions from `first` on, which may read a state and write one."""
    heads = groups * sizes.heads
    kept = {
        "decays": heads * q * q,
        "weights": heads * q * q,
        "scores and mask": groups * q * q + q * q // 4,
        "dt x": heads * q * sizes.head_dim,
        "read of the state": reads * heads * (q + (sizes.head_dim + sizes.state) * q + sizes.state * sizes.head_dim),
        "written state": writes * heads * (q + (sizes.head_dim + sizes.state) * q),
    }
    return {f"{name} from {first}": size for name, size in kept.items()}
