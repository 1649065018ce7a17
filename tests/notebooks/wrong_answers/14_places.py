"""Chapter 14, exercise `14.places`: places(weights, chosen, k, factor) -> the tokens of each expert, -1 for empty."""

import math

import numpy as np


def wrong_1(weights, chosen, k, factor):
    """Rounds the capacity down: with fewer places than rows on average, even an even load drops some."""
    capacity = min(int(factor * k * len(chosen) / chosen.shape[1]), len(chosen))
    table = []
    for weight, wanted in zip(weights.T, chosen.T):
        candidates = np.flatnonzero(wanted)
        best = candidates[np.argsort(-weight[candidates])[:capacity]]
        table.append(sorted(best.tolist()) + [-1] * (capacity - len(best)))
    return table


def wrong_2(weights, chosen, k, factor):
    """Gives places to whoever comes first, and asks no weight."""
    capacity = min(math.ceil(factor * k * len(chosen) / chosen.shape[1]), len(chosen))
    kept = [np.flatnonzero(wanted)[:capacity].tolist() for wanted in chosen.T]
    return [row + [-1] * (capacity - len(row)) for row in kept]


def wrong_3(weights, chosen, k, factor):
    """Believes that a token which one expert drops loses all its experts; it keeps the others."""
    table = solution(weights, chosen, k, factor)
    wanted = [set(np.flatnonzero(each).tolist()) for each in chosen.T]
    dropped = set().union(*(wishes - set(row) for wishes, row in zip(wanted, table)))
    kept = [[token for token in row if token not in dropped and token >= 0] for row in table]
    return [row + [-1] * (len(old) - len(row)) for row, old in zip(kept, table)]
