"""Chapter 04, exercise `04.lookup`: lookup(ids, part, rank) -> the rows that this rank adds to the all-reduce."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.int64]


def solution(ids: Array, part: Array, rank: int) -> Array:
    """Own ids read their row, and foreign ids get zeros, so that the sum over ranks has each row once."""
    local = ids - rank * len(part)
    own = (local >= 0) & (local < len(part))
    return np.where(own[:, None], part[np.where(own, local, 0)], 0)


def wrong_1(ids: Array, part: Array, rank: int) -> Array:
    """Sends foreign ids to row 0, where a lookup is allowed, and forgets to take its result away."""
    local = ids - rank * len(part)
    own = (local >= 0) & (local < len(part))
    return part[np.where(own, local, 0)]


def wrong_2(ids: Array, part: Array, rank: int) -> Array:
    """Asks only for ids beyond the part: a negative place is no error in NumPy, but a row from the end."""
    local = ids - rank * len(part)
    own = local < len(part)
    return np.where(own[:, None], part[np.where(own, local, 0)], 0)


def wrong_3(ids: Array, part: Array, rank: int) -> Array:
    """Leaves out the tokens of other ranks: an all-reduce adds tensors of one shape, place by place."""
    local = ids - rank * len(part)
    return part[local[(local >= 0) & (local < len(part))]]
