"""Pure functions that build the known schedules.

Each docstring gives the schedule as a program per rank (DualPipe's way of writing: `3F` runs three forwards), the share
of time its ranks idle, and the activations alive at once. Formulas hold for equal stages and free messages, and tests
hold the simulator to them. p = pp, m = microbatches, r = rank; F and B are the times of one forward and one backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from labkit.config import ScheduleConfig
from labkit.schedules.ir import KINDS, Schedule

_F, _B = KINDS.index("F"), KINDS.index("B")


def gpipe(pp: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (GPipe, arXiv 1811.06965).

    Program of every rank: `mF mB`.
    Bubble: makespan (m + p - 1)(F + B), fraction (p - 1)/(m + p - 1), ratio to the ideal time (p - 1)/m.
    Peak in flight: m on every rank, so memory grows with the batch.
    """
    _require_positive(pp=pp, microbatches=microbatches)
    order = np.arange(microbatches)
    kinds = np.repeat([_F, _B], microbatches)
    return _one_stage_per_rank("GPipe", pp, microbatches, [kinds] * pp, [np.tile(order, 2)] * pp)


def one_f_one_b(pp: int, microbatches: int) -> Schedule:
    """One forward, one backward, then a flush (PipeDream-Flush, arXiv 2006.09503; Megatron, arXiv 2104.04473).

    Program of rank r, with warm-up w = min(p - r - 1, m): `wF (m-w)(FB) wB`.
    Bubble: the same as GPipe's, (p - 1)/(m + p - 1) of the makespan, (p - 1)/m of the ideal time.
    Peak in flight: min(p - r, m) on rank r, whatever the batch. This is what 1F1B buys.
    """
    _require_positive(pp=pp, microbatches=microbatches)
    kinds, numbers = [], []
    for rank in range(pp):
        warmup = min(pp - rank - 1, microbatches)
        steady = microbatches - warmup
        kinds.append(np.concatenate([np.full(warmup, _F), np.tile([_F, _B], steady), np.full(warmup, _B)]))
        pairs = np.stack([np.arange(warmup, microbatches), np.arange(steady)], axis=1).ravel()
        numbers.append(np.concatenate([np.arange(warmup), pairs, np.arange(steady, microbatches)]))
    return _one_stage_per_rank("1F1B", pp, microbatches, kinds, numbers)


def without_backward(schedule: Schedule) -> Schedule:
    """The forwards of `schedule` alone, in their order, for evaluation: nothing is kept in flight."""
    keep = schedule.kinds == _F
    counts = np.bincount(schedule.ranks[keep], minlength=schedule.pp)
    return Schedule.from_columns(
        f"{schedule.name}, forward only",
        schedule.num_stages,
        schedule.num_microbatches,
        stages=schedule.stages[keep],
        kinds=schedule.kinds[keep],
        microbatches=schedule.microbatches[keep],
        offsets=np.concatenate([[0], np.cumsum(counts)]),
    )


def _one_stage_per_rank(
    name: str, pp: int, microbatches: int, kinds: Sequence[np.ndarray], numbers: Sequence[np.ndarray]
) -> Schedule:
    lengths = [len(row) for row in kinds]
    return Schedule.from_columns(
        name,
        pp,
        microbatches,
        stages=np.repeat(np.arange(pp), lengths),
        kinds=np.concatenate(kinds),
        microbatches=np.concatenate(numbers),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
    )


def _require_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} is {size!r}: give a whole number of at least 1")


def build_schedule(config: ScheduleConfig, *, pp: int, vpp: int = 1, microbatches: int) -> Schedule:
    """The schedule that a config names, or the one in the CSV file at `config.path`.

    Raises ValueError for an unknown name, a missing file, and a file for another number of ranks or microbatches.
    """
    if config.path is not None:
        return _from_file(Path(config.path), pp, microbatches)
    builders = {"auto": one_f_one_b, "1f1b": one_f_one_b, "gpipe": gpipe}
    if config.name not in builders:
        raise ValueError(
            f"schedule.name is {config.name!r}; choose one of {', '.join(builders)}, or give schedule.path"
        )
    return builders[config.name](pp, microbatches)


def _from_file(path: Path, pp: int, microbatches: int) -> Schedule:
    if not path.is_file():
        raise ValueError(f"schedule.path is {path}, and there is no such file")
    schedule = Schedule.from_csv(path.read_text(), name=path.stem)
    for given, wanted, what in ((schedule.pp, pp, "ranks"), (schedule.num_microbatches, microbatches, "microbatches")):
        if given != wanted:
            raise ValueError(f"{path} is a schedule for {given} {what}, the run has {wanted}")
    return schedule
