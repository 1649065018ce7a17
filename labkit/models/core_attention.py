"""softmax(q k^T / sqrt(D)) v, as one kernel or one operation after the other.

The kernel keeps q, k, v, its output and one number per row for backward. Separate operations keep the probabilities as
well, S x S for every head: the term 5 a s / h of arXiv 2205.05198. `model.attention_backend` chooses:

    fused                           the kernel that torch chooses for device, type, shape, mask and dropout
    flash, cudnn, efficient, math   this kernel of torch or an error; `math` is torch's own operation by operation
    unfused                         `unfused_attention` below

Under context parallelism a rank holds S / cp positions, and keys and values come from all ranks of `cp`
(`parallel/context/ring_attention.py`). No form keeps probabilities there.

A GPT's attention is causal. BERT's looks both ways, under a mask that hides padding. T5's decoder is causal, and its
encoder and cross-attention look both ways.

Shapes: n = batch x query heads on this rank, m = batch x key/value heads, S queries, T keys, D head dimension.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from labkit.comm.groups import Group
from labkit.comm.ledger import comm_scope
from labkit.config import ModelConfig
from labkit.models.norm_and_dropout import drop
from labkit.parallel.context.attention_block import has_kernel
from labkit.parallel.context.ring_attention import all_gather_attention, ring_attention
from labkit.parallel.random import RngTracker

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""Value of `model.attention_backend` -> the kernel of scaled_dot_product_attention that it demands."""
_computed: set[tuple[Any, ...]] = set()
"""Kinds of calls that a demanded kernel has computed. Only other calls are watched for warnings, because watching makes
Python forget which warnings it has shown already."""


def scores_of_padding(padding_mask_BS: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Return the mask of `CoreAttention` that hides padding, [1, B x heads, 1, S]: 0 for a token, very low for padding.

    The value for padding is half the lowest number, so that adding a score does not overflow. A sample of padding alone
    gives no NaN.

    padding_mask_BS: 1 for a token, 0 for padding. heads: number of heads on this rank.
    """
    hidden_BS = torch.zeros(padding_mask_BS.shape, dtype=dtype, device=padding_mask_BS.device)
    hidden_BS.masked_fill_(padding_mask_BS == 0, torch.finfo(dtype).min / 2)
    return hidden_BS.repeat_interleave(heads, dim=0)[None, :, None]


class CoreAttention(nn.Module):
    """Attention of this rank's heads; no parameters.

    Args:
        config: `attention_backend`, `attention_dropout`, and `family`: all but BERT's attention is causal.
        rng: random states; needed where attention drops.
        cp: context-parallel group; None is this rank alone.
        cp_comm_type: `p2p` (the ring) or `all_gather`.
        name: name of the attention block, under which the ledger books what it communicates over cp.
        causal: a position sees itself and those before it; None follows `family`.
        scale: factor of the scores; None is 1 / sqrt(D).

    Raises:
        ValueError: context parallelism with a family or a dropout that it does not have; in `forward`, a kernel of
            `KERNELS` that cannot run.
    """

    def __init__(
        self,
        config: ModelConfig,
        rng: RngTracker | None,
        cp: Group | None = None,
        cp_comm_type: str = "p2p",
        *,
        name: str | None = None,
        causal: bool | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.name, self.causal, self.scale = name, config.family != "bert" if causal is None else causal, scale
        self.backend, self.dropout, self.rng = config.attention_backend, config.attention_dropout, rng
        self.cp = cp if cp is not None and cp.size > 1 else None
        self.over_ranks = ring_attention if cp_comm_type == "p2p" else all_gather_attention
        if self.cp is not None and not self.causal:
            raise ValueError("BERT has no context parallelism: rings have no padding mask; set parallel.cp to 1")
        if self.cp is not None and self.dropout:
            raise ValueError(
                f"attention_dropout {self.dropout:g} does not work with context parallelism: the kernels that "
                "return log-sum-exps have no dropout. Set model.attention_dropout to 0, or parallel.cp to 1"
            )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """q [1, n, S, D], k and v [1, m, T, D] with n a multiple of m -> [1, n, S, D].

        mask: added to the scores; it has their type and a shape that broadcasts to [1, n, S, T]. Causal attention takes
            no mask.
        Under context parallelism S is this rank's part of the sequence, cut zigzag.
        """
        if self.cp is not None:
            if self.backend in KERNELS and not (self.backend == "flash" and has_kernel(q)):
                raise ValueError(
                    f"{_cannot_run(self.backend, q, k)}. Only flash computes blocks of a ring, on a GPU in bf16 or "
                    "fp16 with heads whose width is a multiple of 8 up to 256. Set it to fused, which falls back to "
                    "separate operations"
                )
            with comm_scope(layer=self.name):
                return self.over_ranks(q, k, v, self.cp, causal=True, fused=self.backend != "unfused")
        if not (self.dropout and self.training):
            return self._attend(q, k, v, mask, 0.0)
        assert self.rng is not None, "attention dropout needs the random states of model_parallel_seed"
        with self.rng.fork("model-parallel-rng"):  # ranks hold different heads, so they drop different probabilities
            return self._attend(q, k, v, mask, self.dropout)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float) -> Tensor:
        if self.backend == "unfused":
            return unfused_attention(q, k, v, mask, causal=self.causal, dropout_p=p, scale=self.scale)
        how = {"is_causal": self.causal, "dropout_p": p, "scale": self.scale, "enable_gqa": q.shape[1] > k.shape[1]}
        if self.backend in KERNELS:
            return attention_by_kernel(self.backend, q, k, v, mask, **how)
        return F.scaled_dot_product_attention(q, k, v, mask, **how)


def attention_by_kernel(
    backend: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **how: Any
) -> Tensor:
    """Call `F.scaled_dot_product_attention(q, k, v, mask, **how)` with the kernel of `KERNELS` that `backend` names.

    Raises ValueError with torch's reasons where that kernel cannot run.
    """
    kernel = KERNELS[backend]
    kind = (backend, q.dtype, q.device, q.shape, k.shape, mask is not None and mask.requires_grad, *how.values())
    if kind in _computed:
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(q, k, v, mask, **how)
    said: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as said, sdpa_kernel(kernel):
            warnings.simplefilter("always")  # torch gives its reasons as warnings, each only once
            out = F.scaled_dot_product_attention(q, k, v, mask, **how)
    except RuntimeError as error:
        if "No available kernel" not in str(error) and "No viable backend" not in str(error):
            raise
    else:
        _computed.add(kind)
        return out
    given = "" if mask is None else f", mask {list(mask.shape)}{' with a gradient' if mask.requires_grad else ''}"
    reasons = " ".join(str(warning.message).partition(" (Triggered")[0] for warning in said)
    why = f"torch's reasons: {reasons}" if reasons else f"torch has no such kernel for {q.device.type}"
    if backend == "flash" and q.device.type == "cpu" and mask is not None and mask.requires_grad:
        why = "a CPU's flash kernel gives a mask no gradient"  # torch does not say so
    raise ValueError(
        f"{_cannot_run(backend, q, k)}{given}, {', '.join(f'{name} {value}' for name, value in how.items())}; {why}. "
        "Set it to fused, and torch chooses a kernel that can"
    )


def _cannot_run(backend: str, q: Tensor, k: Tensor) -> str:
    return (
        f"model.attention_backend is {backend}, and this kernel cannot run here: q {list(q.shape)}, k and v "
        f"{list(k.shape)}, {str(q.dtype).removeprefix('torch.')} on {q.device}"
    )


def unfused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = True,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Compute `F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)`, one operation after the other."""
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = (q @ k.transpose(-1, -2)) * factor  # not q first: that would keep another q
    # Masks are added, not filled in, because an addition keeps no mask for backward.
    if causal:
        scores = scores + scores.new_full(scores.shape[-2:], -math.inf).triu(1)
    if mask is not None:
        scores = scores + mask
    probabilities = scores.softmax(dim=-1)
    return drop(probabilities, dropout_p) @ v
