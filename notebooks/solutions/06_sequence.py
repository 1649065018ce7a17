"""Chapter 06: a gain and an MLP under sequence parallelism, over ranks that are entries of a list."""

import numpy as np


def solution(x, dy, gain, A, B, all_gather, reduce_scatter, all_reduce):
    """Gather before A, reduce-scatter after B, the same two transposed backward; the gain saw other positions on each
    rank, so its gradients are parts of a sum."""
    ranks = range(len(A))
    whole = all_gather([x[r] * gain for r in ranks])
    hidden = [np.maximum(whole[r] @ A[r].T, 0) for r in ranks]
    y = reduce_scatter([hidden[r] @ B[r].T for r in ranks])
    dy = all_gather(dy)
    d_hidden = [(dy[r] @ B[r]) * (hidden[r] > 0) for r in ranks]
    d_scaled = reduce_scatter([d_hidden[r] @ A[r] for r in ranks])
    dgain = all_reduce([(d_scaled[r] * x[r]).sum(0) for r in ranks])
    return y, [d * gain for d in d_scaled], dgain


def wrong_1(x, dy, gain, A, B, all_gather, reduce_scatter, all_reduce):
    """Leaves the gain's gradient as it is: each rank knows its own positions alone, and the gains drift apart."""
    ranks = range(len(A))
    whole = all_gather([x[r] * gain for r in ranks])
    hidden = [np.maximum(whole[r] @ A[r].T, 0) for r in ranks]
    y = reduce_scatter([hidden[r] @ B[r].T for r in ranks])
    dy = all_gather(dy)
    d_scaled = reduce_scatter([((dy[r] @ B[r]) * (hidden[r] > 0)) @ A[r] for r in ranks])
    return y, [d * gain for d in d_scaled], [(d_scaled[r] * x[r]).sum(0) for r in ranks]


def wrong_2(x, dy, gain, A, B, all_gather, reduce_scatter, all_reduce):
    """Takes its own positions out of the gathered gradient instead of reduce-scattering: the gradient of one rank's
    columns of A, not the sum over all."""
    ranks = range(len(A))
    whole = all_gather([x[r] * gain for r in ranks])
    hidden = [np.maximum(whole[r] @ A[r].T, 0) for r in ranks]
    y = reduce_scatter([hidden[r] @ B[r].T for r in ranks])
    dy = all_gather(dy)
    d_whole = [((dy[r] @ B[r]) * (hidden[r] > 0)) @ A[r] for r in ranks]
    d_scaled = [np.split(d_whole[r], len(A))[r] for r in ranks]
    dgain = all_reduce([(d_scaled[r] * x[r]).sum(0) for r in ranks])
    return y, [d * gain for d in d_scaled], dgain


def wrong_3(x, dy, gain, A, B, all_gather, reduce_scatter, all_reduce):
    """All-reduces the whole output and keeps its own positions of it: right, and twice the bytes; a mean of the gain's
    gradients besides, as one takes over replicas."""
    ranks = range(len(A))
    whole = all_gather([x[r] * gain for r in ranks])
    hidden = [np.maximum(whole[r] @ A[r].T, 0) for r in ranks]
    y = [np.split(total, len(A))[r] for r, total in enumerate(all_reduce([hidden[r] @ B[r].T for r in ranks]))]
    dy = all_gather(dy)
    d_scaled = reduce_scatter([((dy[r] @ B[r]) * (hidden[r] > 0)) @ A[r] for r in ranks])
    dgain = all_reduce([(d_scaled[r] * x[r]).sum(0) for r in ranks])
    return y, [d * gain for d in d_scaled], [total / len(A) for total in dgain]
