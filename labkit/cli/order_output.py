"""The words of `labkit order`: sizes, bubble, a table of the ranks, and the order of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from labkit.config.errors import counted
from labkit.schedules.bubble import split_timeline
from labkit.schedules.ir import KINDS, Schedule
from labkit.schedules.simulator import Timeline

MOST_SHOWN = 8192
"""Most actions of a schedule that is printed. Of a larger one only a summary is; --rank and --csv give its rows."""
ELSEWHERE = "--rank R prints one rank's order, --csv FILE writes all rows"
_WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def report(timeline: Timeline, warm_ups: list[int] | None, given: Sequence[str] | None) -> list[str]:
    """Return the lines on a schedule. warm_ups: of each rank, where Megatron has such a number; given: --costs."""
    schedule = timeline.schedule
    sizes = ((schedule.pp, "rank"), (schedule.num_stages, "stage"))
    sizes += ((schedule.num_microbatches, "microbatch"), (len(schedule), "action"))
    bubble = f"bubble {timeline.bubble_fraction:.1%} of the makespan, {timeline.bubble_ratio:.1%} of the ideal time"
    kinds = [kind for number, kind in enumerate(KINDS) if (schedule.kinds == number).any()]
    meanings = ", ".join(f"{kind} {_WORDS[kind]}" for kind in kinds)
    costs = "B takes 2, any other action 1" if "B" in kinds else "every action takes 1"
    if given:
        costs = f"{', '.join(given)}, and what is not given takes its default"
    lines = [
        f"{schedule.name}: {', '.join(counted(*size) for size in sizes)}",
        f"{bubble}; makespan {timeline.makespan:,g} where {costs} ({meanings})",
        str(split_timeline(timeline)),
        *_imbalance(timeline),
        "",
        *_table(timeline, warm_ups),
        "in flight: microbatches whose forward has begun and whose backward has not ended, in each stage of the rank",
        "",
    ]
    if len(schedule) > MOST_SHOWN:
        return [*lines, f"more than {MOST_SHOWN:,} actions: {ELSEWHERE}"]
    orders = [schedule.order(rank) for rank in range(schedule.pp)]
    return [
        *lines,
        legend(schedule),
        *_rows([_order_words(order, warm_ups[r] if warm_ups else 0) for r, order in enumerate(orders)]),
        "",
        "actions: stage, direction, microbatch; all counted from 0, as ranks and positions are",
        *_rows([list(schedule.texts(rank)) for rank in range(schedule.pp)]),
    ]


def _imbalance(timeline: Timeline) -> list[str]:
    """Return a line on idle time that no order of the stages can remove, since ranks have unequal work."""
    busy = timeline.busy
    most, least = int(busy.argmax()), int(busy.argmin())
    unequal = float((busy[most] - busy).sum())
    if unequal <= 1e-9 * timeline.makespan:
        return []
    ranks = f"rank {most} works {busy[most]:,g}, rank {least} {busy[least]:,g}"
    return [f"{unequal:,g} of it is imbalance, which no order of these stages removes: {ranks}"]


def _table(timeline: Timeline, warm_ups: list[int] | None) -> list[str]:
    """Return the stages, warm-up, peak and idle time of each rank as a table."""
    schedule, peaks, idle = timeline.schedule, timeline.peak_in_flight, split_timeline(timeline).idle
    by_rank = np.split(schedule.kinds != KINDS.index("F"), schedule.offsets[1:-1])
    before = [int(backward.argmax()) if backward.any() else len(backward) for backward in by_rank]
    rows = [["", "stages", "warm-up", "forwards first", "peak in flight", "idle"]]
    for rank in range(schedule.pp):
        stages = " ".join(map(str, schedule.stages_of(rank)))
        warm_up = "" if warm_ups is None else f"{warm_ups[rank]:,}"
        numbers = [f"{number:,g}" for number in (before[rank], peaks[rank], idle[rank])]
        rows.append([f"  rank {rank}", stages, warm_up, *numbers])
    if warm_ups is None:
        rows = [row[:2] + row[3:] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["   ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def legend(schedule: Schedule) -> str:
    """Return a sentence on the meaning of the numbers of an order."""
    halves = "" if (schedule.kinds != KINDS.index("W")).all() else ", -c-0.5 its weight gradient"
    return f"order: c is a forward of model chunk c (counted from 1), -c its backward{halves}"


def _order_words(order: list[int | float], warm_up: int) -> list[str]:
    """Return the numbers as words, with `|` before and after the steady phase."""
    words = [f"{number:g}" for number in order]
    if warm_up == 0 or warm_up * 2 == len(words):
        return words
    return [*words[:warm_up], "|", *words[warm_up : len(words) - warm_up], "|", *words[len(words) - warm_up :]]


def _rows(rows: list[list[str]]) -> list[str]:
    """Return one line per rank, with aligned cells."""
    width, label = max(len(word) for words in rows for word in words), len(f"rank {len(rows) - 1}")
    return [
        f"  {f'rank {rank}':<{label}} " + "".join(f" {word:>{width}}" for word in words)
        for rank, words in enumerate(rows)
    ]


def listed(order: list[int | float]) -> str:
    """Return the order as a list that Python and JSON can read."""
    return f"[{', '.join(f'{number:g}' for number in order)}]"
