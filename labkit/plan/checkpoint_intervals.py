"""How often to save: the intervals of Young and of Daly, and Daly's expected time of a run. No torch.

delta is the seconds of a checkpoint, M the mean seconds between failures, which are exponential, R the seconds of a
restart. An interval is the training time between two checkpoints, without the checkpoints.
"""

from __future__ import annotations

import math


def young_interval(checkpoint: float, mtbf: float) -> float:
    """Return the seconds between checkpoints that lose least to first order: sqrt(2 delta M).

    Checkpoints cost delta / tau of the time, and a failure costs tau / 2 every M. Source: Young, "A first order
    approximation to the optimum checkpoint interval", CACM 17 (1974).
    """
    return math.sqrt(2 * checkpoint * mtbf)


def daly_interval(checkpoint: float, mtbf: float) -> float:
    """Return the seconds between checkpoints that lose least, to higher order:

        sqrt(2 delta M) [1 + 1/3 sqrt(delta / 2M) + 1/9 (delta / 2M)] - delta     for delta < 2M, otherwise M

    Source: Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22 (2006).
    """
    ratio = checkpoint / (2 * mtbf)
    if ratio >= 1:
        return mtbf
    return young_interval(checkpoint, mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint


def daly_seconds(work: float, interval: float, checkpoint: float, restart: float, mtbf: float) -> float:
    """Return the expected seconds of a run with `work` seconds of training: M e^(R/M) (e^((tau+delta)/M) - 1) work/tau.

    It is exact for exponential failures, which may also happen in checkpoints and restarts (Daly 2006, the "complete"
    model).
    """
    return mtbf * math.exp(restart / mtbf) * math.expm1((interval + checkpoint) / mtbf) * work / interval
