"""Chapter 04, exercise `04.lookup`: lookup(ids, part, rank) -> the rows that this rank adds to the all-reduce."""

import numpy as np


def wrong_1(ids, part, rank):
    """Sends foreign ids to row 0, where a lookup is allowed, and forgets to take its result away."""
    local = ids - rank * len(part)
    own = (local >= 0) & (local < len(part))
    return part[np.where(own, local, 0)]


def wrong_2(ids, part, rank):
    """Asks only for ids beyond the part: a negative place is no error in NumPy, but a row from the end."""
    local = ids - rank * len(part)
    own = local < len(part)
    return np.where(own[:, None], part[np.where(own, local, 0)], 0)


def wrong_3(ids, part, rank):
    """Leaves out the tokens of other ranks: an all-reduce adds tensors of one shape, place by place."""
    local = ids - rank * len(part)
    return part[local[(local >= 0) & (local < len(part))]]
