"""Chapter 07, exercise `07.backward`: dq, dk and dv of one rank, the sums of dk and dv passed round with their keys."""

import numpy as np


def wrong_1(rows, kv, cp, pass_on):
    """Adds up all shares of dk and dv that it computes, although they belong to the keys of different ranks."""
    sums = block_shares(rows, kv)
    for _ in range(cp - 1):
        kv = pass_on(kv)
        sums = [total + share for total, share in zip(sums, block_shares(rows, kv))]
    return tuple(sums)


def wrong_2(rows, kv, cp, pass_on):
    """Stops after cp - 1 hops, as the forward does: the sums that it returns belong to the keys of the next rank."""
    dq, dk, dv = block_shares(rows, kv)
    for _ in range(cp - 1):
        kv, dk, dv = pass_on((kv, dk, dv))
        share = block_shares(rows, kv)
        dq, dk, dv = dq + share[0], dk + share[1], dv + share[2]
    return dq, dk, dv


def wrong_3(rows, kv, cp, pass_on):
    """Believes that dk and dv need the rank's own queries alone, since only dq meets the keys of other ranks."""
    _, dk, dv = block_shares(rows, kv)
    dq = np.zeros_like(rows[0])
    for step in range(cp):
        kv = pass_on(kv) if step else kv
        dq = dq + block_shares(rows, kv)[0]
    return dq, dk, dv
