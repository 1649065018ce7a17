"""The exercise of chapter 00 on the idle share of a pipeline's step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from labkit.check.scoring import Diagnosis, Outcome, exercise
from labkit.schedules.builders import one_f_one_b
from labkit.schedules.simulator import Costs, simulate

# ---- Chapter 00: the idle share ----

_STEPS: tuple[tuple[int, int, tuple[float, ...]], ...] = (
    (2, 4, (1.0, 1.0)),
    (3, 2, (1.0, 1.0, 1.0)),
    (2, 4, (1.0, 3.0)),
    (4, 8, (2.0, 1.0, 1.0, 1.0)),
    (1, 3, (1.0,)),
)
"""(stages, microbatches, seconds of a forward of each stage; a backward takes twice as long)."""
_DELAY = 5.0
"""Seconds at which the steps of the exercise begin."""

Spans = list[list[tuple[float, float]]]
"""By stage: (start, end) of its actions."""


def _spans(stages: int, count: int, forward: tuple[float, ...]) -> Spans:
    timeline = simulate(one_f_one_b(stages, count), Costs(forward=forward, backward=[2 * each for each in forward]))
    rows: Spans = [[] for _ in range(stages)]
    for event in timeline.events:
        rows[event.rank].append((event.start + _DELAY, event.end + _DELAY))
    return rows


@exercise("00.idle", "Write idle_share(rows) -> the share of the step in which stages are idle, from 0 to 1.")
def idle(answer: Any) -> Iterator[Outcome]:
    """Five steps of 1F1B: equal stages, unequal ones, one stage; no step begins at 0."""
    diagnosis = Diagnosis(lambda value, other: math.isclose(value, other, rel_tol=1e-6, abs_tol=1e-9))
    failed = False
    for stages, count, forward in _STEPS:
        rows = _spans(stages, count, forward)
        first, last = min(row[0][0] for row in rows), max(row[-1][1] for row in rows)
        step = last - first
        own_spans = [row[-1][1] - row[0][0] for row in rows]
        works = [sum(end - start for start, end in row) for row in rows]
        busy, own = sum(works), sum(own_spans)
        mean = sum(1 - work / span for work, span in zip(works, own_spans)) / stages
        misreadings = {
            "this is the share in which stages work; the idle share is the rest": busy / (stages * step),
            "all stages can work all the time: divide by their number, too": 1 - busy / step,
            "a stage is idle also before its first action and after its last": 1 - busy / own,
            "this averages each stage's share of its own time; the step is as long for all": mean,
            "divide by the number of stages, and by a step that begins with its first action": 1 - busy / last,
            "the step begins with its first action, not at time 0": 1 - busy / (stages * last),
            "this formula holds for equal stages; take the times of the rows": (stages - 1) / (count + stages - 1),
            "these are seconds; divide by stages times the length of the step": stages * step - busy,
        }
        outcome = diagnosis.outcome(
            f"{stages} stages, {count} microbatches, forwards of {list(forward)} s, "
            f"and a step from {first:g} to {last:g} s",
            round((stages * step - busy) / (stages * step), 6),
            lambda r=rows: round(float(answer([list(row) for row in r])), 6),
            {words: round(value, 6) for words, value in misreadings.items()},
        )
        yield replace(outcome, told=outcome.told and not failed)
        failed |= not outcome.passed
