"""Solutions of chapter 26, eight bits."""

import math
from statistics import median

import numpy as np

from labkit.check.solution_source import solves


@solves("26.rounded")
def rounded(x, mantissa, lowest, largest):
    """Steps have one width within a power of two, and below the smallest normal number."""
    if x == 0:
        return 0.0
    exponent = max(math.floor(math.log2(abs(x))), lowest)
    step = 2.0 ** (exponent - mantissa)
    return max(-largest, min(largest, round(x / step) * step))  # round() takes a middle to the even one


@solves("26.guess")
def guess(history):
    """A middle value forgets an outlier, few steps follow a trend, and a reserve is cheap."""
    return 4 * median(history[:5])


@solves("26.blocks")
def product(a, a_scale, b, b_scale, block):
    """Add up the products of blocks, each divided by its own scales."""
    total = np.zeros((len(a), len(b)))
    for j in range(a.shape[1] // block):
        k = slice(j * block, (j + 1) * block)
        total += a[:, k] @ b[:, k].T / np.outer(a_scale[:, j], b_scale[:, j])
    return total


@solves("26.places")
def places(counts, alignment):
    """Each expert's rows begin at a multiple of the alignment."""
    found, start = [], 0
    for count in counts:
        found += range(start, start + count)
        start += -(-count // alignment) * alignment
    return found, start
