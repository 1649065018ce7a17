"""Solutions of chapter 24, encoder-decoders."""

import math

import numpy as np

from labkit.check.solution_source import solves


@solves("24.cross")
def cross(x, encoded, wq, wk, wv, padding):
    """The decoder asks; keys and values are the encoder's, and no query sees padding."""
    scores = (x @ wq.T) @ (encoded @ wk.T).T / len(wq) ** 0.5
    powers = np.exp(scores - scores.max(-1, keepdims=True)) * ~padding
    return powers / powers.sum(-1, keepdims=True) @ (encoded @ wv.T)


@solves("24.bucket")
def bucket(ahead, both_ways, buckets, far):
    """Half of the buckets are for one distance each, the others grow by a constant factor."""
    first = buckets // 2 if both_ways and ahead > 0 else 0
    buckets = buckets // 2 if both_ways else buckets
    distance = abs(ahead) if both_ways else max(0, -ahead)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    octaves = math.log(distance / exact) / math.log(far / exact)
    return first + min(buckets - 1, exact + int(octaves * (buckets - exact)))


@solves("24.copies")
def copies(tp, pp, dp, split):
    """Both halves read words and positions; the last stage scores words."""
    rows = range(dp * tp)
    words = [[stage * dp * tp + row for stage in sorted({0, split, pp - 1})] for row in rows]
    return words, [[row, split * dp * tp + row] for row in rows]
