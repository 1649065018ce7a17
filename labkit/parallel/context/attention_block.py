"""softmax(q k^T / sqrt(D)) v of one block of keys, and the log-sum-exp of each row, which joins blocks.

For block b, let lse_b = log sum_j exp(s_ij) over its keys j, and o_b its own softmax average. Blocks a and b of the
same row join as follows (the online softmax of arXiv 1805.02867, as used by 2205.14135):

    lse = log(exp(lse_a) + exp(lse_b))          o = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b

Backward joins nothing. With the whole row's `lse` and `out`, every block gives its own share of the gradients:

    p  = exp(s - lse)                [n, S, T]        dv = p^T do                          [n, T, D]
    ds = p (do v^T - sum(do out))    [n, S, T]        dq = ds k / sqrt(D)                  [n, S, D]
                                                      dk = ds^T q / sqrt(D)                [n, T, D]

`fused` calls the kernels of torch's scaled_dot_product_attention directly, because only these kernels return `lse`: on
the host for every type, on a GPU for half precision. Other cases, and `fused=False`, run one operation after the other.
No form keeps the probabilities.

Shapes: n query heads, m key/value heads (n a multiple of m), S queries, T keys, D head dimension.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_aten: Any = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums over blocks: float32 for half precision, else the type itself."""
    return torch.float32 if dtype in _HALF else dtype


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, fused: bool = True) -> tuple[Tensor, Tensor]:
    """Run the forward of one block: q [1, n, S, D], kv [1, m, T, D] -> out [1, n, S, D], lse [1, n, S]."""
    kernel = _kernel(q, fused)
    if kernel == "host":
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    if kernel == "gpu":
        return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    with torch.autocast(q.device.type, enabled=False):  # autocast would round scores to half precision
        scores, _, v_n = _scores(q, k, v, causal)
        lse = scores.logsumexp(dim=-1)
        return ((scores - lse[..., None]).exp() @ v_n).to(q.dtype), lse


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, fused: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv of one block, in the shapes of q, k, v. `out` and `lse` belong to the whole row."""
    kernel = _kernel(q, fused)
    if kernel == "host":
        backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad, q, k, v, out, lse, 0.0, causal)
    if kernel == "gpu":
        unused = torch.empty(0, dtype=torch.int64, device=q.device)  # dropout's seed and offset
        backward = _aten._scaled_dot_product_flash_attention_backward
        lengths = (None, None, q.shape[-2], k.shape[-2])
        return backward(grad, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, unused, unused)
    return _explicit_backward(grad, q, k, v, out, lse, causal)


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Add a block to the rows of `out` and `lse`, in place; shapes as in `attend`."""
    total = torch.logaddexp(lse, block_lse)
    out.mul_((lse - total).exp()[..., None]).add_(block_out * (block_lse - total).exp()[..., None])
    lse.copy_(total)


def has_kernel(q: Tensor) -> bool:
    """Return True if `fused` runs a kernel for blocks of these queries."""
    return _kernel(q, True) != "explicit"


def _kernel(q: Tensor, fused: bool) -> str:
    if fused and not q.is_cuda:
        return "host"
    if fused and q.dtype in _HALF and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256:
        return "gpu"
    return "explicit"


def _per_query_head(x: Tensor, heads: int) -> Tensor:
    """Repeat keys or values [1, m, T, D] for each of their query heads: [1, n, T, D]."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _scores(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return s [1, n, S, T], and k and v as every query head sees them, in the type of sums."""
    wide = accumulator_dtype(q.dtype)
    k_n, v_n = (_per_query_head(x, q.shape[1]).to(wide) for x in (k, v))
    scores = (q.to(wide) / math.sqrt(q.shape[-1])) @ k_n.transpose(-1, -2)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores, k_n, v_n


def _explicit_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the equations at the top of this file, one after the other."""
    scores, k_n, v_n = _scores(q, k, v, causal)
    p = (scores - lse[..., None]).exp()
    grad, out_n = grad.to(p.dtype), out.to(p.dtype)
    ds = p * (grad @ v_n.transpose(-1, -2) - (grad * out_n).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    dk, dv = ds.transpose(-1, -2) @ q.to(p.dtype), p.transpose(-1, -2) @ grad
    if k.shape[1] != q.shape[1]:
        dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
    return (ds @ k_n).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
