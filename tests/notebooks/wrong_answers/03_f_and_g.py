"""Chapter 03: an MLP cut by columns and then by rows, over ranks that are entries of a list."""

import numpy as np


def wrong_1(x, dy, A, B, bias, all_reduce):
    """Believes that g reduces in both directions: gradients that all ranks already hold alike are added up tp times."""
    ranks = range(len(A))
    hidden = [np.maximum(x @ A[r].T, 0) for r in ranks]
    y = [total + bias for total in all_reduce([hidden[r] @ B[r].T for r in ranks])]
    dy = all_reduce([dy for _ in ranks])
    d_hidden = [(dy[r] @ B[r]) * (hidden[r] > 0) for r in ranks]
    return y, all_reduce([d_hidden[r] @ A[r] for r in ranks])


def wrong_2(x, dy, A, B, bias, all_reduce):
    """Forgets f: the output is right, but each rank keeps only its own share of the input gradient."""
    ranks = range(len(A))
    hidden = [np.maximum(x @ A[r].T, 0) for r in ranks]
    y = [total + bias for total in all_reduce([hidden[r] @ B[r].T for r in ranks])]
    return y, [((dy @ B[r]) * (hidden[r] > 0)) @ A[r] for r in ranks]


def wrong_3(x, dy, A, B, bias, all_reduce):
    """Adds the bias on every rank before g, so that the sum contains it tp times."""
    ranks = range(len(A))
    hidden = [np.maximum(x @ A[r].T, 0) for r in ranks]
    y = all_reduce([hidden[r] @ B[r].T + bias for r in ranks])
    d_hidden = [(dy @ B[r]) * (hidden[r] > 0) for r in ranks]
    return y, all_reduce([d_hidden[r] @ A[r] for r in ranks])
