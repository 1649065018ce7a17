"""The selective scan of Mamba-2: a linear recurrence along the sequence, one for each head (arXiv 2405.21060).

Position t has an input x_t and a step dt_t > 0. The state h_t is a matrix [N, P]:

    h_t = A_t h_{t-1} + B_t x_t        A_t = exp(dt_t a),  a < 0;  B_t x_t = dt_t b_t x_t^T
    y_t = C_t h_t + D x_t              C_t h_t = c_t^T h_t

A_t forgets, B_t x_t writes and C_t reads. The scan is selective because A_t, B_t and C_t depend on the input of
position t. `recurrence` computes these two lines. `selective_scan` gives the same numbers by large products. It cuts
the sequence into chunks of Q positions. Inside a chunk the recurrence is a masked product, as in attention:

    y_t = sum over s <= t of (c_t . b_s) A_{s+1} ... A_t dt_s x_s

Only the state passes from one chunk to the next. Take chunks of 2 positions, A = 1/2, b = c = dt = 1, D = 0 and x = 8,
0, 4, 0. The first chunk gives y = 8, 4 and the state 4. The second gives 2 + 4 = 6 and then 1 + 2 = 3.

Shapes: B batch, G groups, R heads of a group, S sequence, Q chunk, P width of a head, N size of the state. The heads of
a group share b and c, as query heads share a key and a value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.plan.mamba import CHUNK


def recurrence(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Compute the definition, position by position; arguments and result are those of `selective_scan`."""
    h_BGRNP = x.new_zeros(*x.shape[:3], b.shape[-1], x.shape[-1])
    y_of = []
    for t in range(x.shape[3]):
        x_t, dt_t, b_t, c_t = x[:, :, :, t], dt[:, :, :, t], b[:, :, None, t], c[:, :, None, t]
        decay = torch.exp(dt_t * a)[..., None, None]
        h_BGRNP = decay * h_BGRNP + (dt_t[..., None] * b_t)[..., :, None] * x_t[..., None, :]
        y_of.append((c_t[..., None, :] @ h_BGRNP).squeeze(-2) + d[..., None] * x_t)
    return torch.stack(y_of, dim=3)


def selective_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, *, chunk: int = CHUNK) -> Tensor:
    """Return y [B, G, R, S, P] of the recurrence, from a state of zeros.

    Args:
        x: inputs [B, G, R, S, P].
        dt: steps above 0, [B, G, R, S].
        a: rates below 0, [G, R].
        b, c: what each position writes and reads, [B, G, S, N].
        d: weight of the input itself, [G, R].
        chunk: Q. Any value gives the same numbers to rounding. The last chunk may be shorter.
    """
    length, state, y_of = x.shape[3], None, []
    for first in range(0, length, chunk):
        here = slice(first, first + chunk)
        x_here, b_here, c_here = x[..., here, :], b[..., here, :], c[..., here, :]
        written = dt[..., here, None] * x_here
        log_decay = (dt[..., here] * a[..., None]).cumsum(-1)
        y = _inside(written, log_decay, b_here, c_here) + d[..., None, None] * x_here
        if state is not None:
            y = y + log_decay.exp()[..., None] * (c_here[:, :, None] @ state)
        if first + chunk < length:
            state = _state_behind(written, log_decay, b_here, state)
        y_of.append(y)
    return torch.cat(y_of, dim=3)


def _inside(written: Tensor, log_decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return the part of y from positions of the same chunk. log_decay[t] is log(A_1 ... A_t), [B, G, R, Q]."""
    size = log_decay.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=b.device).triu(1)
    between = (log_decay[..., :, None] - log_decay[..., None, :]).masked_fill(later, -torch.inf)
    weights = (c @ b.mT)[:, :, None] * between.exp()
    return weights @ written


def _state_behind(written: Tensor, log_decay: Tensor, b: Tensor, state: Tensor | None) -> Tensor:
    """Return the state [B, G, R, N, P] after a chunk, from the state before it (None is zeros)."""
    left = (log_decay[..., -1:] - log_decay).exp()
    added = b.mT[:, :, None] @ (left[..., None] * written)
    return added if state is None else log_decay[..., -1, None, None].exp() * state + added
