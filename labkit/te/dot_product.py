"""Core attention of Transformer Engine, context parallelism included.

Shapes: S sequence, D head dimension; n = batch x query heads on this rank, m = batch x key/value heads.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.groups import Group
from labkit.config import ModelConfig
from labkit.parallel.random import RngTracker
from labkit.te.engine import engine


class CoreAttention(nn.Module):
    """softmax(q k^T / sqrt(D)) v as `DotProductAttention`, context parallelism included; called like labkit's own.

    Args:
        config: heads, sizes and dropout.
        rng: random states; needed with attention dropout.
        tp: tensor-parallel group; each rank has its part of the heads.
        cp: context-parallel group; None is this rank alone.
        cp_comm_type: `p2p` or `all_gather`.

    Raises:
        ValueError: the unfused form, which only labkit's own layers have.
    """

    def __init__(
        self, config: ModelConfig, rng: RngTracker | None, tp: Group, cp: Group | None = None, cp_comm_type: str = "p2p"
    ) -> None:
        super().__init__()
        if config.attention_backend != "fused":
            raise ValueError(
                f"model.attention_backend is {config.attention_backend}: Transformer Engine chooses its kernels itself "
                "(its variables NVTE_FLASH_ATTN and NVTE_FUSED_ATTN); set it to fused, or transformer_impl to local"
            )
        self.dropout, self.rng = config.attention_dropout, rng
        self.heads, self.head_dim = config.heads // tp.size, config.hidden // config.heads
        over_ranks: dict[str, Any] = {}
        if cp is not None and cp.size > 1:
            over_ranks = {
                "cp_group": cp.process_group,
                "cp_global_ranks": list(cp.ranks),
                "cp_stream": torch.cuda.Stream() if torch.cuda.is_available() else None,
                "cp_comm_type": cp_comm_type,
            }
        attention = engine().DotProductAttention(
            config.heads,
            self.head_dim,
            num_gqa_groups=max(config.kv_heads or config.heads, tp.size),  # copies of a head count as heads
            attention_dropout=config.attention_dropout,
            qkv_format="sbhd",
            attn_mask_type="causal",
            tp_size=tp.size,
            tp_group=tp.process_group,
            **over_ranks,
        )
        self.engine_attention = (attention,)

    def train(self, mode: bool = True) -> CoreAttention:
        """Set the mode of the engine's module too, which is not a child: it drops only in training."""
        self.engine_attention[0].train(mode)
        return super().train(mode)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [1, n, S, D], k and v [1, m, S, D] with n a multiple of m -> [1, n, S, D]; causal."""
        length, batch = q.shape[2], q.shape[1] // self.heads
        q, k, v = (x[0].transpose(0, 1).unflatten(1, (batch, -1)) for x in (q, k, v))  # [S, B, heads, D], no copy
        (attention,) = self.engine_attention
        with self._random_state():
            y = attention(q, k, v)
        return y.view(length, batch * self.heads, self.head_dim).transpose(0, 1)[None]

    def _random_state(self) -> AbstractContextManager[Any]:
        if not (self.dropout and self.training):
            return nullcontext()
        assert self.rng is not None, "attention dropout needs the random states of model_parallel_seed"
        return self.rng.fork("model-parallel-rng")
