"""Solutions of chapter 07, Context parallel."""

import numpy as np

from labkit.check.solution_source import solves


def block(q, kv, seen):
    """The chapter's `attend`."""
    k, v = kv
    s = np.where(seen, q @ k.T / np.sqrt(q.shape[1]), -np.inf)
    lse = np.logaddexp.reduce(s, axis=1)
    return np.exp(s - lse[:, None]) @ v, lse


@solves("07.ring")
def ring(q, kv, cut, cp):
    """Own keys first, then those that come by; a row joins a block only if it sees a key of it."""
    mine = cut[cp.rank]
    out, lse = block(q, kv, mine[:, None] >= mine)
    for step in range(1, cp.size):
        kv = cp.pass_on(kv)
        seen = mine[:, None] >= cut[(cp.rank - step) % cp.size]
        rows = seen.any(axis=1)
        more, more_lse = block(q[rows], kv, seen[rows])
        total = np.logaddexp(lse[rows], more_lse)
        old, new = np.exp(lse[rows] - total), np.exp(more_lse - total)
        out[rows] = old[:, None] * out[rows] + new[:, None] * more
        lse[rows] = total
    return out, lse


@solves("07.cut")
def cut(seq_length, cp):
    """Zigzag: of 2 cp chunks an early one, and the late one that is as far from the end."""
    chunks = np.arange(seq_length).reshape(2 * cp, -1)
    return [np.concatenate([chunks[r], chunks[2 * cp - 1 - r]]).tolist() for r in range(cp)]


def block_shares(q, kv, seen, lse, do, delta):
    """The chapter's `shares`."""
    (k, v), root = kv, np.sqrt(q.shape[1])
    p = np.exp(np.where(seen, q @ k.T / root, -np.inf) - lse[:, None])
    ds = p * (do @ v.T - delta[:, None]) / root
    return ds @ k, np.stack([ds.T @ q, p.T @ do])


@solves("07.backward")
def ring_backward(q, kv, cut, cp, lse, do, delta):
    """The sum of a key's gradients begins on the rank after its owner, travels with the key, and the owner adds its own
    share at home: cp - 1 hops of kv and cp - 1 of dkv. A sum that begins at home needs a hop more."""
    mine = cut[cp.rank]
    dq, own = block_shares(q, kv, mine[:, None] >= mine, lse, do, delta)
    dkv = np.zeros_like(own)
    for step in range(1, cp.size):
        kv, dkv = cp.pass_on(kv, dkv) if step > 1 else (cp.pass_on(kv), dkv)
        seen = mine[:, None] >= cut[(cp.rank - step) % cp.size]
        more, share = block_shares(q, kv, seen, lse, do, delta)
        dq, dkv = dq + more, dkv + share
    return dq, own + (cp.pass_on(dkv) if cp.size > 1 else dkv)
