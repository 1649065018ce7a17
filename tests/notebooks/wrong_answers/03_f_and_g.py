"""Chapter 03: an MLP cut by columns and then by rows, forward and backward, over ranks that are entries of a list."""

import numpy as np


def _inner(x, A):
    return [np.maximum(x @ part.T, 0) for part in A]


def _weights(x, dy, B, inner):
    """dA and dB of all ranks; `dy` is one array for each rank."""
    d_inner = [(each @ part) * (hidden > 0) for each, part, hidden in zip(dy, B, inner)]
    return d_inner, [d.T @ x for d in d_inner], [each.T @ hidden for each, hidden in zip(dy, inner)]


def wrong_1(x, dy, A, B, bias, all_reduce):
    """Believes that g reduces in both directions: gradients that all ranks already hold alike are added up tp times."""
    inner = _inner(x, A)
    y = [total + bias for total in all_reduce([h @ part.T for h, part in zip(inner, B)])]
    summed = all_reduce([dy for _ in A])
    d_inner, dA, dB = _weights(x, summed, B, inner)
    dx = all_reduce([d @ part for d, part in zip(d_inner, A)])
    return y, dx, dA, dB, [each.sum(0) for each in summed]


def wrong_2(x, dy, A, B, bias, all_reduce):
    """Forgets f: the output is right, but each rank keeps only its own share of the input gradient."""
    inner = _inner(x, A)
    y = [total + bias for total in all_reduce([h @ part.T for h, part in zip(inner, B)])]
    d_inner, dA, dB = _weights(x, [dy for _ in A], B, inner)
    return y, [d @ part for d, part in zip(d_inner, A)], dA, dB, [dy.sum(0) for _ in A]


def wrong_3(x, dy, A, B, bias, all_reduce):
    """Adds the bias on every rank before g, so that the sum contains it tp times."""
    inner = _inner(x, A)
    y = all_reduce([h @ part.T + bias for h, part in zip(inner, B)])
    d_inner, dA, dB = _weights(x, [dy for _ in A], B, inner)
    return y, all_reduce([d @ part for d, part in zip(d_inner, A)]), dA, dB, [dy.sum(0) for _ in A]
