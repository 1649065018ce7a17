"""Exercises of chapter 00: the idle share of a pipeline's step, sizes that can train a model, where two runs separate.

Wrong answers are compared with those of known misunderstandings, and the score names the one that fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from labkit.check.scoring import ONLY_FIRST, Diagnosis, Outcome, close, exercise, holds, shown
from labkit.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig
from labkit.schedules.builders import one_f_one_b
from labkit.schedules.simulator import Costs, simulate

# ---- the idle share ----

_STEPS: tuple[tuple[int, int, tuple[float, ...]], ...] = (
    (2, 4, (1.0, 1.0)),
    (3, 2, (1.0, 1.0, 1.0)),
    (2, 4, (1.0, 3.0)),
    (4, 8, (2.0, 1.0, 1.0, 1.0)),
    (1, 3, (1.0,)),
)
"""(stages, microbatches, seconds of a forward of each stage; a backward takes twice as long)."""
_DELAY = 5.0
"""Seconds at which the steps of the exercise begin, so that time 0 is no special case."""

Spans = list[list[tuple[float, float]]]
"""(start, end) of the actions of each stage."""


def _spans(stages: int, count: int, forward: tuple[float, ...]) -> Spans:
    timeline = simulate(one_f_one_b(stages, count), Costs(forward=forward, backward=[2 * each for each in forward]))
    rows: Spans = [[] for _ in range(stages)]
    for event in timeline.events:
        rows[event.rank].append((event.start + _DELAY, event.end + _DELAY))
    return rows


@exercise("00.idle", "Write idle_share(rows) -> the share of the step in which stages are idle, from 0 to 1.")
def idle(answer: Any) -> Iterator[Outcome]:
    """Judge five steps of 1F1B, none of which begins at 0: equal stages, unequal ones, a single stage."""
    diagnosis = Diagnosis(close(rtol=1e-6, atol=1e-9))
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
        yield replace(outcome, reason=ONLY_FIRST)


# ---- sizes that can train a model ----

_MODELS = (
    {"ranks": 4, "layers": 4, "heads": 4, "batch": 4},
    {"ranks": 8, "layers": 8, "heads": 2, "batch": 8},
    {"ranks": 8, "layers": 2, "heads": 8, "batch": 2},
    {"ranks": 6, "layers": 3, "heads": 4, "batch": 6},
    {"ranks": 12, "layers": 4, "heads": 12, "batch": 9},
    {"ranks": 5, "layers": 4, "heads": 4, "batch": 4},
    {"ranks": 1, "layers": 3, "heads": 1, "batch": 1},
)


@exercise("00.tour", "Write layouts(ranks, layers, heads, batch) -> the set of (tp, pp, dp) that can train the model.")
def tour(answer: Any) -> Iterator[Outcome]:
    """Judge seven worlds against the layouts that labkit's own configuration accepts."""
    for case in _MODELS:
        right = _accepted(**case)
        yield holds(
            ", ".join(f"{name} {value}" for name, value in case.items()),
            f"the {len(right)} layouts that can train this model",
            lambda case=case, right=right: _wrong_layout(answer(**case), right, **case),
        )


def _wrong_layout(
    value: Any, right: set[tuple[int, int, int]], *, ranks: int, layers: int, heads: int, batch: int
) -> tuple[str, str]:
    """Return (kind of mistake, sentence about the first wrong layout); both empty for a right answer."""
    given = list(value) if isinstance(value, (set, frozenset, list, tuple)) else None
    if given is None or not all(isinstance(each, tuple) and len(each) == 3 for each in given):
        return "form", f"{shown(value)}, which is not a set of triples (tp, pp, dp)"
    for tp, pp, dp in sorted(given):
        product = tp * pp * dp
        rules = {
            "ranks": (product != ranks, f"tp pp dp = {product} ranks, not {ranks}"),
            "heads": (tp < 1 or heads % tp, f"tp {tp} does not divide {heads} heads"),
            "layers": (pp < 1 or layers % pp, f"pp {pp} does not divide {layers} layers"),
            "batch": (dp < 1 or batch % dp, f"dp {dp} does not divide a batch of {batch} samples"),
        }
        for kind, (broken, words) in rules.items():
            if broken:
                return kind, f"{(tp, pp, dp)}: {words}"
    missing = sorted(right - set(given))
    return ("missing", f"{missing[0]} is missing, which can train it, too") if missing else ("", "")


def _accepted(*, ranks: int, layers: int, heads: int, batch: int) -> set[tuple[int, int, int]]:
    """Return every (tp, pp, dp) that fills the world and breaks no rule of `RunConfig`."""
    found = set()
    for tp in range(1, ranks + 1):
        for pp in range(1, ranks // tp + 1):
            config = RunConfig(
                model=ModelConfig(layers=layers, heads=heads, hidden=8 * heads, ffn_hidden=24 * heads),
                parallel=ParallelConfig(tp=tp, pp=pp),
                train=TrainConfig(micro_batch_size=1, global_batch_size=batch),
            )
            if not config.problems(ranks):
                found.add((tp, pp, ranks // (tp * pp)))
    return found


# ---- the step at which two runs separate ----

_RUNS = (
    ([6.9, 6.5, 6.2001, 6.0], [6.9, 6.5, 6.2, 6.0]),
    ([7.0, 6.0, 5.0], [7.0, 6.0, 5.0]),
    ([7.0, 6.0001, 5.1, 4.0001], [7.0, 6.0, 5.0, 4.0]),
    ([100.0005, 90.0, 80.0], [100.0, 90.0, 80.0]),
    ([6.0, 5.9], [6.0, 6.0]),
    ([6.1, 5.0], [6.0, 5.0]),
)
"""(losses of a layout, losses of one process); the tolerance is 1e-5."""


@exercise("00.same", "Write first_apart(losses, reference, tolerance) -> the first step that differs by more, or None.")
def same(answer: Any) -> Iterator[Outcome]:
    """Judge six pairs of runs: equal ones, one step apart in the middle, at the end, at the start, below and above."""
    diagnosis = Diagnosis(lambda value, other: value == other and type(value) is type(other))
    for losses, reference in _RUNS:
        gaps = [abs(a - b) for a, b in zip(losses, reference)]
        relative = [gap / abs(b) for gap, b in zip(gaps, reference)]

        def first(found: Iterable[bool]) -> int | None:
            return next((step for step, yes in enumerate(found) if yes), None)

        right = first(gap > 1e-5 for gap in relative)
        last = len(gaps) - 1
        misreadings = {
            "the difference itself is compared; divide it by the loss of the reference": first(g > 1e-5 for g in gaps),
            "the last step alone is compared; runs can diverge and come together again": (
                last if gaps[-1] > 1e-5 else None
            ),
            "this is the step with the largest difference; the first one is the cause": (
                max(range(len(gaps)), key=relative.__getitem__) if right is not None else None
            ),
            "a loss that is smaller differs, too; take the absolute value": first(
                (a - b) / b > 1e-5 for a, b in zip(losses, reference)
            ),
            "steps count from 0": None if right is None else right + 1,
        }
        outcome = diagnosis.outcome(
            f"losses {losses}, reference {reference} and tolerance 1e-05",
            right,
            lambda a=losses, b=reference: answer(list(a), list(b), 1e-5),
            misreadings,
        )
        yield replace(outcome, reason=ONLY_FIRST)
