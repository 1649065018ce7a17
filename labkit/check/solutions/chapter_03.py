"""Solutions of chapter 03, f and g."""

import numpy as np

from labkit.check.solution_source import solves


@solves("03.parts")
def parts(fc1, fc2, rank, t):
    """A's columns are fc1's rows; B's rows are fc2's columns."""
    return np.split(fc1, t, axis=0)[rank], np.split(fc2, t, axis=1)[rank]


@solves("03.f_and_g")
def mlp_by_hand(x, dy, fc1, fc2, bias, all_reduce):
    """g after the second matrix, f before the first; weights keep their own gradients."""
    ranks = range(len(fc1))
    inner = [np.maximum(x @ fc1[r].T, 0) for r in ranks]
    y = [total + bias for total in all_reduce([inner[r] @ fc2[r].T for r in ranks])]
    d_inner = [(dy @ fc2[r]) * (inner[r] > 0) for r in ranks]
    dx = all_reduce([d_inner[r] @ fc1[r] for r in ranks])
    dA, dB = [d_inner[r].T @ x for r in ranks], [dy.T @ inner[r] for r in ranks]
    return y, dx, dA, dB, [dy.sum(0) for r in ranks]


@solves("03.plan")
def plan(first, second):
    """What is added up and then cut is a reduce-scatter; its counterpart gathers for a matrix cut by columns."""
    start = ["f"] if first == "column" else ["split"]
    end = ["gather"] if second == "column" else ["g"]
    between = {
        ("column", "row"): ([], []),
        ("row", "row"): (["g_split"], []),
        ("column", "column"): ([], ["gather_f"]),
        ("row", "column"): (["g"], ["f"]),
    }
    return [start, *between[first, second], end]
