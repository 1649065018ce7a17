"""Pure functions that build the known schedules, next to those of `zero_bubble.py`.

Each docstring gives the program of a rank in DualPipe's notation: `3F` runs three forwards. It also gives the idle time
and the activations alive at once. The formulas hold for equal stages and free messages; tests compare them with the
simulator. p = pp, v = vpp, m = microbatches, r = rank. F, B, I and W are the times that a stage takes for a forward, a
full backward, an input gradient and a weight gradient. The bubble is the makespan less the computation of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np

from labkit.config import ScheduleConfig
from labkit.config.choices import SCHEDULES, NamedSchedule, named_schedule
from labkit.config.errors import counted
from labkit.schedules.ir import KINDS, Schedule, ScheduleError, read_schedule
from labkit.schedules.tables import (
    from_programs,
    get_pp_rank_microbatches,
    legal_group_size,
    require_positive,
    table_columns,
)

_F, _B = KINDS.index("F"), KINDS.index("B")


def gpipe(pp: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (GPipe, arXiv 1811.06965).

    Program of every rank: `mF mB`.
    Makespan (m + p - 1)(F + B), of which (p - 1)(F + B) is bubble: (p - 1)/m of the ideal time. p = 4, m = 8: 3/11.
    Peak in flight: m on every rank, so memory grows with the batch.
    """
    require_positive(pp=pp, microbatches=microbatches)
    program = [(microbatches, "F"), (microbatches, "B")]
    return from_programs("GPipe", microbatches, [program] * pp, lambda rank, _: rank)


def one_f_one_b(pp: int, microbatches: int) -> Schedule:
    """One forward, one backward, then a flush (PipeDream-Flush, arXiv 2006.09503; Megatron, arXiv 2104.04473).

    Program of rank r, with warm-up w = min(p - r - 1, m): `wF (m-w)(FB) wB`.
    Bubble: the same as GPipe's, (p - 1)/(m + p - 1) of the makespan, (p - 1)/m of the ideal time.
    Peak in flight: min(p - r, m) on rank r, whatever the batch. GPipe keeps m.
    """
    require_positive(pp=pp, microbatches=microbatches)
    programs = []
    for rank in range(pp):
        warmup = min(pp - rank - 1, microbatches)
        programs.append([(warmup, "F"), (microbatches - warmup, "F B"), (warmup, "B")])
    return from_programs("1F1B", microbatches, programs, lambda rank, _: rank)


def interleaved(
    pp: int, vpp: int, microbatches: int, group_size: int | None = None, *, all_warmup: bool = False
) -> Schedule:
    """Interleaved 1F1B: v stages a rank, stage c p + r is chunk c of rank r (Megatron, arXiv 2104.04473 section 2.2).

    The schedule table (`tables.py`) gives the microbatch and the chunk of the k-th forward and backward, in groups of N
    microbatches. `group_size` None means N = p. With vpp 1 this is `one_f_one_b`.

    Program of rank r, with warm-up w = min(2(p - r - 1) + (v - 1)N, m v): `wF (mv-w)(FB) wB`.
    Bubble: (p - 1)(F + B) of stages that are one v-th of 1F1B's, whatever the group size.
    Makespan: (m v + p - 1)(F + B). Bubble: (p - 1)/(m v + p - 1) of the makespan, (p - 1)/(m v) of the ideal time.
    Peak in flight on rank r: min(2(p - r - 1) + (v - 1)N + 1, m v) of these smaller stages.
    This peak is higher than 1F1B's, and grows with the group size.

    all_warmup: Megatron's rule of 2023 for m = p: every rank runs all forwards before its first backward.
        Program of every rank: `mvF mvB`. The bubble is the same, and m v stages are in flight on every rank.

    Raises:
        ValueError: one pipeline rank with several chunks, the sizes that `legal_group_size` rejects, and `all_warmup`
            with one chunk per rank or with m other than p.
    """
    require_positive(pp=pp, vpp=vpp, microbatches=microbatches)
    if all_warmup and (vpp == 1 or microbatches != pp):
        given = "vpp is 1" if vpp == 1 else f"{microbatches} microbatches on {pp} pipeline ranks"
        raise ValueError(
            f"all_warmup: {given}; it is a rule of interleaving (vpp 2 or more) with as many microbatches as ranks"
        )
    if vpp == 1:
        return one_f_one_b(pp, microbatches)
    if pp == 1:
        raise ValueError(f"pp is 1 and vpp is {vpp}: one rank has nothing to interleave; set vpp to 1, or raise pp")
    size = legal_group_size(group_size, pp, microbatches)
    warmups = [
        get_pp_rank_microbatches(microbatches, vpp, size, forward_only=all_warmup, pp_size=pp, pp_rank=rank)[2]
        for rank in range(pp)
    ]
    name = "interleaved, all warm-up" if all_warmup else "interleaved 1F1B"
    return _from_table(name, pp, vpp, microbatches, size, warmups)


def _from_table(
    name: str, pp: int, vpp: int, microbatches: int, size: int, warmups: Sequence[int], *, merged: bool = False
) -> Schedule:
    """Return the schedule of the table with groups of `size`: each rank's warm-up, then forwards and backwards by
    turns, `merged` in pairs or not, then the last backwards."""
    microbatch_column, chunks = table_columns(microbatches, vpp, size)
    total = len(microbatch_column)
    forward, backward = np.full(total, _F, dtype=np.int8), np.full(total, _B, dtype=np.int8)
    stage_rows, number_rows = (np.empty((pp, 2 * total), dtype=np.int32) for _ in range(2))
    kind_rows = np.empty((pp, 2 * total), dtype=np.int8)
    joins = np.zeros((pp, 2 * total), dtype=bool)
    for rank, warmup in enumerate(warmups):
        _forwards_then_by_turns(stage_rows[rank], warmup, chunks * pp + rank, (vpp - 1 - chunks) * pp + rank)
        _forwards_then_by_turns(kind_rows[rank], warmup, forward, backward)
        _forwards_then_by_turns(number_rows[rank], warmup, microbatch_column, microbatch_column)
        joins[rank, warmup + 1 : 2 * total - warmup : 2] = merged
    return Schedule.from_columns(
        name,
        pp * vpp,
        microbatches,
        stages=stage_rows.ravel(),
        kinds=kind_rows.ravel(),
        microbatches=number_rows.ravel(),
        offsets=np.arange(pp + 1) * 2 * total,
        merged=joins.ravel(),
    )


def _forwards_then_by_turns(row: np.ndarray, warmup: int, forwards: np.ndarray, backwards: np.ndarray) -> None:
    """Fill `row` (2 K,) with w forwards, then a forward and a backward by turns, then the last w backwards."""
    steady = len(forwards) - warmup
    row[:warmup] = forwards[:warmup]
    row[warmup : warmup + 2 * steady : 2] = forwards[warmup:]
    row[warmup + 1 : warmup + 2 * steady : 2] = backwards[:steady]
    row[warmup + 2 * steady :] = backwards[steady:]


def merged_one_f_one_b(pp: int, microbatches: int) -> Schedule:
    """1F1B whose forwards and backwards run merged in pairs, so that the all-to-alls of one hide behind the other.

    A forward cannot be merged with its own backward, so the last rank needs a warm-up of 1 too. A pair sends both its
    results at its end: with 1F1B's own warm-up, plus 1, every rank would wait for its neighbours in every second pair.
    So a rank is two forwards ahead of the next one, as in interleaved 1F1B.

    Program of rank r, with warm-up w = min(2(p - r - 1) + 1, m): `wF (m-w)(F&B) wB`.
    Bubble: (p - 1)(F + B), as 1F1B's, if no part of a pair is hidden; with a shorter pair the steady part is shorter.
    Peak in flight: min(2(p - r), m) on rank r, twice 1F1B's.
    """
    require_positive(pp=pp, microbatches=microbatches)
    warmups = [min(2 * (pp - rank - 1) + 1, microbatches) for rank in range(pp)]
    return _from_table("merged 1F1B", pp, 1, microbatches, microbatches, warmups, merged=True)


def merged_interleaved(pp: int, vpp: int, microbatches: int, group_size: int | None = None) -> Schedule:
    """Interleaved 1F1B with merged pairs (Megatron's `overlap_moe_expert_parallel_comm`).

    Arguments and errors are those of `interleaved`. With vpp 1 this is `merged_one_f_one_b`.

    Program of rank r, with warm-up w = min(2(p - r - 1) + (v - 1)N + 1, m v): `wF (mv-w)(F&B) wB`.
    Peak in flight on rank r: min(w + 1, m v) of these stages, one more than `interleaved` has.
    """
    if vpp == 1:
        return merged_one_f_one_b(pp, microbatches)
    interleaved(pp, vpp, microbatches, group_size)  # for its errors
    size = legal_group_size(group_size, pp, microbatches)
    given: dict[str, Any] = {"pp_size": pp, "overlap_moe_expert_parallel_comm": True}
    warmups = [get_pp_rank_microbatches(microbatches, vpp, size, pp_rank=rank, **given)[2] for rank in range(pp)]
    return _from_table("merged interleaved 1F1B", pp, vpp, microbatches, size, warmups, merged=True)


def without_backward(schedule: Schedule) -> Schedule:
    """Return the forwards of `schedule` alone, in their order, for evaluation.

    Program of every rank, with v stages on it: `(m v)F`, which is `mF` for GPipe, 1F1B and ZB-H1.
    Bubble, one stage a rank: fraction (p - 1)/(m + p - 1).
    Bubble, interleaved: fraction (p - 1)/(m v + p - 1), of a makespan of (m v + p - 1) F.
    Bubble on a V (v = 2): fraction (p - 1)/(m + p - 1), of a makespan of 2(m + p - 1) F. The V turns round at the last
    rank, and rank 0 waits for the way back.
    Peak in flight: 0, nothing is kept for a backward.
    """
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


def build_schedule(config: ScheduleConfig, *, pp: int, vpp: int = 1, microbatches: int) -> Schedule:
    """Return the schedule that a config names (a row of `labkit.config.choices`), or that in the file at `config.path`.

    `auto` is 1f1b for one model chunk per rank and interleaved for more. A file, and a row that says so, fix the number
    of stages of a rank, so `vpp` may stay at 1.

    Raises:
        ValueError: an unknown name, a vpp that the named schedule does not have, sizes that its builder rejects, a
            file that cannot be read, and a file for another number of ranks or microbatches.
    """
    if config.path is not None:
        return _from_file(Path(config.path), pp, microbatches, merged=config.overlap_moe_expert_parallel_comm)
    name, known = config.name, ("auto", *SCHEDULES)
    if name not in known:
        raise ValueError(f"schedule.name is {name!r}; choose one of {', '.join(known)}, or give schedule.path")
    row = named_schedule(name, vpp)
    if config.overlap_moe_expert_parallel_comm:
        row = _merged(name, row, config)
    builder, read = resolve_name(row.builder), {field: getattr(config, field) for field in row.reads}
    if row.chunks is None:
        if vpp == 1 and pp > 1:
            raise ValueError(f"schedule.name is {name!r} and vpp is 1: give parallel.vpp at least 2, or choose 1f1b")
        return _built(row.builder, builder(pp, vpp, microbatches, config.microbatch_group_size, **read))
    if config.all_warmup:
        raise ValueError(f"schedule.all_warmup is a rule of interleaving, and schedule.name is {name!r}; leave it out")
    if vpp not in (1, row.chunks):
        raise ValueError(
            f"schedule.name is {name!r}, which has {counted(row.chunks, 'stage')} per rank, but vpp is {vpp}: leave "
            "parallel.vpp at 1, or choose interleaved"
        )
    return _built(row.builder, builder(pp, microbatches, **read))


def _merged(name: str, row: NamedSchedule, config: ScheduleConfig) -> NamedSchedule:
    """Return the row of the schedule's merged form."""
    if row.merged is None or config.all_warmup:
        known = ", ".join(named for named, other in SCHEDULES.items() if other.merged is not None)
        what = "schedule.all_warmup" if row.merged is not None else f"schedule.name {name!r}"
        raise ValueError(
            f"schedule.overlap_moe_expert_parallel_comm merges forwards with backwards, and {what} has no such pairs: "
            f"choose one of {known}"
        )
    return row._replace(builder=row.merged, reads=())


def _built(builder: str, made: Any) -> Schedule:
    """Return what a builder made, if it is a Schedule; a new builder may have forgotten its `return`."""
    if not isinstance(made, Schedule):
        raise ValueError(f"{builder} returned {type(made).__name__}; a builder returns a labkit.schedules.Schedule")
    return made


def _from_file(path: Path, pp: int, microbatches: int, *, merged: bool) -> Schedule:
    try:
        schedule = read_schedule(path)
    except ScheduleError:
        raise
    except ValueError as rule:
        raise ValueError(f"{path}: {rule}") from None
    batch = f"train.global_batch_size to {schedule.num_microbatches:,} x train.micro_batch_size x dp"
    for given, wanted, what, advice in (
        (schedule.pp, pp, "rank", f"parallel.pp to {schedule.pp}"),
        (schedule.num_microbatches, microbatches, "microbatch", batch),
    ):
        if given != wanted:
            raise ValueError(f"{path} is a schedule for {counted(given, what)}, the run has {wanted:,}; set {advice}")
    if schedule.has_pairs != merged:
        has, advice = ("has merged pairs", "set") if schedule.has_pairs else ("has no merged pairs", "leave out")
        raise ValueError(f"{path} {has}; {advice} schedule.overlap_moe_expert_parallel_comm")
    return schedule
