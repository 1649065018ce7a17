"""Tell a result that is only rounded from one that is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np

FLOAT32 = 1e-6
"""Relative difference that a few roundings to float32 explain, each of which changes a number by up to 6e-8 of it."""

ROUNDED = "rounded"
"""The reason of every case that is only rounded, so that a score tells one of them."""


def rounding(value: Any, right: Any) -> str:
    """Return words for a result that differs from the right one by rounding alone; empty for any other difference.

    Whole numbers are counts, which nobody rounds.
    """
    try:
        mine, other = np.asarray(value, dtype=float), np.asarray(right, dtype=float)
    except (TypeError, ValueError):
        return ""
    if mine.shape != other.shape or not mine.size or not np.isfinite(mine).all() or not np.isfinite(other).all():
        return ""
    largest, apart = np.abs(other).max(), np.abs(mine - other).max()
    whole = bool((mine == mine.round()).all())
    if whole or not 0 < apart <= FLOAT32 * largest:
        return ""
    return f"this differs by {apart / largest:.0e} of the value, which is the rounding of float32; compute in float64"
