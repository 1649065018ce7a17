"""Chapter 03, exercise `03.parts`: parts(fc1, fc2, rank, t) -> this rank's parts of two stored weights."""

import numpy as np


def wrong_1(fc1, fc2, rank, t):
    """Cuts what torch stores as if it were A and B themselves, so A loses rows and B columns."""
    return np.array_split(fc1, t, axis=1)[rank], np.array_split(fc2, t, axis=0)[rank]


def wrong_2(fc1, fc2, rank, t):
    """Cuts both along dimension 0, as if every weight were cut alike."""
    return np.array_split(fc1, t, axis=0)[rank], np.array_split(fc2, t, axis=0)[rank]


def wrong_3(fc1, fc2, rank, t):
    """Deals the columns out one by one; the sum is right, but the parts do not fit Megatron's checkpoints."""
    return fc1[rank::t], fc2[:, rank::t]
