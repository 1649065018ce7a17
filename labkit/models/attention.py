"""Self-attention with its norm and projections.

The fused projection `qkv` has Megatron's order of columns, [q ... q k v] [q ... q k v] ...: a block for each key/value
head, with the query heads that share it. Each rank holds whole blocks. With fewer key/value heads than ranks,
neighbouring ranks share a block: each has its own query heads and a copy of the key and value (`Replicated`), while
Megatron gathers the heads in every forward instead. The kernel takes the heads of all samples as one row of B x heads
heads, so activations stay [S, B, ...], and nothing is transposed in memory.

Shapes: S sequence, B batch, H hidden, D head dimension; t = tensor-parallel size.
"""

from __future__ import annotations

from torch import Tensor, nn

from labkit.config import ModelConfig
from labkit.models.build import Build
from labkit.models.embedding import Rotary, rotate
from labkit.parallel.parameters.parameter_record import Replicated


def kv_copies(config: ModelConfig, tp: int) -> int:
    """Return how many ranks of tp hold the same key/value head: 1 where each rank has key/value heads of its own.

    Raises:
        ValueError: heads that cannot be divided among the ranks of tp.
    """
    kv_heads = config.kv_heads or config.heads
    if config.heads % tp or (kv_heads % tp and tp % kv_heads):
        raise ValueError(
            f"{config.heads} heads and {kv_heads} key/value heads cannot be shared by tp={tp} ranks; heads must be a "
            "multiple of tp, and kv_heads a multiple or a divisor"
        )
    return max(1, tp // kv_heads)


class ParallelAttention(nn.Module):
    """Self-attention on the normalised input, with whole heads on each rank (arXiv 1909.08053, section 3).

    It needs one all-reduce forward (after `proj`) and one backward (before `qkv`), and none in between, because each
    head is whole on its rank. The copies of a key/value head add up their gradients once per step
    (`finalize_model_grads`).

    Raises:
        ValueError: heads that do not divide hidden, or that cannot be divided among the ranks of tp.
    """

    def __init__(self, name: str, build: Build) -> None:
        super().__init__()
        config, tp = build.config, build.group.size
        kv_heads = config.kv_heads or config.heads
        if config.hidden % config.heads or config.heads % kv_heads:
            rule = f"heads {config.heads} must divide hidden {config.hidden}, and kv_heads {kv_heads} must divide heads"
            raise ValueError(f"{name}: {rule}")
        self.name, self.recompute = name, build.recompute
        self.recomputes_norm = self.recompute.selects("layernorm")
        self.recomputes_core = self.recompute.selects("core_attn")
        self.head_dim = config.hidden // config.heads
        copies = kv_copies(config, tp)
        self.kv_heads = max(1, kv_heads // tp)
        self.queries_per_kv = config.heads // tp // self.kv_heads
        replicated = Replicated(copies, 2 * self.head_dim) if copies > 1 else None
        columns = (config.heads + 2 * kv_heads) * self.head_dim
        self.norm, column = build.norm_before(f"{name}.norm")  # Transformer Engine fuses the two
        self.core = build.spec.core_attention(name, config, build.rng, build.group, build.cp, build.cp_comm_type)
        self.qkv = column(f"{name}.qkv", config.hidden, columns, replicated=replicated, **build.linear())
        proj = build.linear(std=build.residual_std)
        self.proj = build.spec.row_parallel(f"{name}.proj", config.hidden, config.hidden, **proj)

    def forward(self, x_SBH: Tensor, rotary: Rotary | None = None, *mask: Tensor) -> Tensor:
        """[S, B, H] -> [S, B, H], to be added to x. `mask` is that of `CoreAttention`, or nothing."""
        if self.recomputes_norm:
            mixed = self.recompute.norm(self.norm, x_SBH, lambda y_SBH: self.qkv(y_SBH)[0])
        else:
            mixed, _ = self.qkv(self.norm(x_SBH))
        output, _ = self.proj(self.attend(mixed, rotary, *mask))
        return output

    def attend(self, mixed: Tensor, rotary: Rotary | None = None, *mask: Tensor) -> Tensor:
        """Attend with this rank's heads, softmax(q k^T / sqrt(D)) v: [S, B, (heads + 2 kv_heads) D] -> [S, B, H/t]."""
        length, batch, _ = mixed.shape
        per_group = mixed.view(length, batch * self.kv_heads, self.queries_per_kv + 2, self.head_dim)
        q, k, v = per_group.split((self.queries_per_kv, 1, 1), dim=2)
        if rotary is not None:
            # With a copy of v, `mixed` can be freed; otherwise backward would keep it next to the rotated q and k.
            q, k, v = rotate(q, rotary), rotate(k, rotary), v.clone()
        elif self.queries_per_kv > 1:  # `q.reshape` copies; views k and v alone would keep all of `mixed` for backward
            k, v = k.clone(), v.clone()
        rows = (length, -1, self.head_dim)
        q, k, v = q.reshape(rows), k.reshape(rows), v.reshape(rows)
        q, k, v = q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        inputs = (q, k, v, *mask)
        attended = self.recompute.part("core_attn", self.core, *inputs) if self.recomputes_core else self.core(*inputs)
        return attended.transpose(1, 2).reshape(length, batch, -1)
