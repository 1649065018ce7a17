"""Chapter 06, exercise `06.sequence`: block(x, dy, gain, A, B, tp) -> (y, dx, dgain) of one rank."""

import numpy as np


def wrong_1(x, dy, gain, A, B, tp):
    """Leaves the gain's gradient as it is: each rank knows its own positions alone, and the gains drift apart."""
    inner = np.maximum(tp.all_gather(x * gain) @ A.T, 0)
    y = tp.reduce_scatter(inner @ B.T)
    d_scaled = tp.reduce_scatter(((tp.all_gather(dy) @ B) * (inner > 0)) @ A)
    return y, d_scaled * gain, (d_scaled * x).sum(0)


def wrong_2(x, dy, gain, A, B, tp):
    """Takes its own positions out of the gathered gradient instead of reduce-scattering: the gradient of one rank's
    columns of A, not the sum over all."""
    inner = np.maximum(tp.all_gather(x * gain) @ A.T, 0)
    y = tp.reduce_scatter(inner @ B.T)
    d_whole = ((tp.all_gather(dy) @ B) * (inner > 0)) @ A
    d_scaled = np.split(d_whole, tp.size)[tp.rank]
    return y, d_scaled * gain, tp.all_reduce((d_scaled * x).sum(0))


def wrong_3(x, dy, gain, A, B, tp):
    """All-reduces the whole output and keeps its own positions of it: right, and twice the bytes; a mean of the gain's
    gradients besides, as one takes over replicas."""
    inner = np.maximum(tp.all_gather(x * gain) @ A.T, 0)
    y = np.split(tp.all_reduce(inner @ B.T), tp.size)[tp.rank]
    d_scaled = tp.reduce_scatter(((tp.all_gather(dy) @ B) * (inner > 0)) @ A)
    return y, d_scaled * gain, tp.all_reduce((d_scaled * x).sum(0)) / tp.size
