"""Solutions of chapter 09, The distributed optimizer (ZeRO)."""

import math

from labkit.check.solution_source import solves


@solves("09.bytes")
def kept_bytes(weight, d, stage):
    """Stage 1 divides master and moments, stage 2 the gradient as well, stage 3 all."""
    gradient = max(4, weight)
    state = (4 if weight < 4 else 0) + 2 * gradient  # moments are as wide as the gradient
    shares = [d if stage >= least else 1 for least in (3, 2, 1)]
    return sum(size / share for size, share in zip((weight, gradient, state), shares))


def up(number, multiple):
    return -(-number // multiple) * multiple


def laid_out(sizes, bucket_size, dp, order=None, align=64, multiple=128):
    """(start, end, [(parameter, first, last)]) of each bucket, in the buffer."""
    buckets, placed, start, end = [], [], 0, 0
    order = list(reversed(range(len(sizes)))) if order is None else order
    for parameter in order:
        first = up(end, align)
        end = first + sizes[parameter]
        placed.append((parameter, first, end))
        if end - start >= bucket_size or parameter == order[-1]:
            stop = start + up(end - start, math.lcm(dp, multiple))
            buckets.append((start, stop, placed))
            placed, start, end = [], stop, stop
    return buckets


def parts(buckets, dp):
    """The rank-th part of every bucket, as pieces of its parameters."""
    owned = [[] for _ in range(dp)]
    for start, end, placed in buckets:
        share = (end - start) // dp
        for rank in range(dp):
            low, high = start + rank * share, start + (rank + 1) * share
            for parameter, first, last in placed:
                if max(first, low) < min(last, high):
                    piece = (parameter, max(first, low) - first, min(last, high) - first)
                    owned[rank].append(piece)
    return owned


@solves("09.shards")
def shards(sizes, bucket_size, dp):
    """Lay out in the order of the backward, pad, and cut each bucket."""
    return parts(laid_out(sizes, bucket_size, dp), dp)


def squares(ranks, counts):
    """Sum of squares of the pieces for which `counts(rank, piece)` is true."""
    found = [p["grad"] for rank in ranks for p in rank["pieces"] if counts(rank, p)]
    return sum(g * g for grad in found for g in grad)


@solves("09.norm")
def norm(ranks):
    """All replicas, all parts over tp, no copy over tp, no copy of the tied weight."""
    once = lambda rank, p: not p["shared"] and (p["cut"] or rank["tp"] == 0)  # noqa: E731
    return squares(ranks, once) ** 0.5
