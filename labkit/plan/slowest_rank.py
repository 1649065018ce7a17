"""A step waits for its slowest rank: the largest of n random times, exactly. No torch.

If F is the distribution of one rank's time, the largest of n independent ranks has the distribution F^n. So its
quantile at u is F^-1(u^(1/n)), which needs no n draws.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

_POINTS = 4096
"""Points at which an expectation is evaluated: the midpoints of equally probable intervals."""


def largest_normal_quantiles(ranks: int, points: int = _POINTS) -> np.ndarray:
    """Return the quantiles (points,) of the largest of `ranks` standard normal numbers, at the midpoints of `points`
    equally probable intervals; their mean is its expectation."""
    chances = (np.arange(points) + 0.5) / points
    above = -np.expm1(np.log(chances) / ranks)  # 1 - u^(1/n), which would be lost in 1 - 1e-5
    inverse = NormalDist().inv_cdf
    return np.array([-inverse(chance) for chance in above.tolist()])


def jitter_factor(ranks: int, spread: float) -> float:
    """Return how many times as long as the mean the slowest of `ranks` takes, on average over steps.

    The time of a rank is log-normal with mean 1: exp(spread z - spread^2 / 2), z standard normal. One rank alone loses
    nothing.
    """
    return float(np.exp(spread * largest_normal_quantiles(ranks) - spread**2 / 2).mean()) if ranks > 1 else 1.0


def straggler_chance(ranks: int, share: float) -> float:
    """Return the probability that at least one of `ranks` is slow, each with the chance `share`: 1 - (1 - share)^n."""
    return -math.expm1(ranks * math.log1p(-share)) if share < 1 else 1.0
