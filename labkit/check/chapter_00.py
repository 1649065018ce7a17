"""Exercises and bets of chapter 00: half of a layer, the order of work in a pipeline, and a layout that fits."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from labkit.check.bets import ask
from labkit.check.scoring import Outcome, exercise, explained, plain, shown
from labkit.schedules.builders import one_f_one_b
from labkit.schedules.ir import Action, Schedule, ScheduleError
from labkit.schedules.simulator import simulate

if TYPE_CHECKING:
    from labkit.viz.figure import Figure

Array = NDArray[Any]

# ---- bets ----

ask(
    "00.same",
    "Four processes train the model, and none of them has all of it. One process trains it alone, on the same data. "
    "How far apart are their losses at the worst step?",
    choices={
        "over 1 %": "Cutting a model into parts is exact: a sum is a sum, wherever its terms were computed. If the "
        "losses are as far apart as this, something is broken.",
        "1 % to 0.001 %": "Rounding does make them differ, and the difference grows from step to step. But a float32 "
        "has seven digits, and a few dozen steps spoil the last two.",
        "under 0.001 %": "The ranks add up the same numbers in another order. Only the rounding of float32 is "
        "different.",
    },
)
ask(
    "00.lost",
    "In every step, one sum between two ranks doesn't happen: in layer 1, each goes on with its own half of what "
    "attention computed. How far is the loss off at the worst step of the training?",
    choices={
        "over 10 %": "It sounds like a catastrophe, but a young model hardly uses its layers: what goes in is added to "
        "what comes out, so most of the signal passes by.",
        "10 % to 1 %": "What attention computed in this layer is far off. But what went into the layer passes by it as "
        "it is, and seven other parts of layers add to it as well.",
        "under 1 %": "What attention computed in this layer is far off. But what went into the layer passes by it as "
        "it is, and seven other parts of layers add to it as well.",
    },
)
ask(
    "00.idle",
    "Equal stages, a backward takes twice as long as a forward, messages take no time. In the best order that there "
    "is, which share of the step is a stage idle, in percent?",
    misread=lambda stages, microbatches: {
        "That is what one microbatch at a time costs. Stages can work on different microbatches.": (
            100 * (stages - 1) / stages
        ),
        "That is idle time as a share of the work. As a share of the step, add the idle time to the work.": (
            100 * (stages - 1) / microbatches
        ),
        "The last stage has nothing to do until the first microbatch gets there.": 0 if stages > 1 else -1,
    },
    unit="percent",
    because="A stage works for m microbatches, and for the time of p - 1 more it waits: for the first one to come and "
    "the last one to go. That is (p - 1)/(m + p - 1).",
)

# ---- half of a layer ----

_SHAPES = ((1, 2, 4), (3, 4, 6), (2, 3, 8))
"""(tokens, width, inner width)."""


def _problem(tokens: int, width: int, inner: int) -> tuple[Array, Array, Array]:
    """Return x [tokens, width], A [width, inner] and B [inner, width] of small integers, which sum exactly."""
    numbers = np.random.default_rng(tokens)
    x, a, b = (numbers.integers(-3, 4, shape) for shape in ((tokens, width), (width, inner), (inner, width)))
    return x, a, b


def _relu(x: Array) -> Array:
    return np.maximum(x, 0)


@exercise("00.half", "Write half(x, A, B, rank) -> what rank 0 or 1 computes; the two results are added up.")
def half(answer: Any) -> Iterator[Outcome]:
    """Judge three layers: the sum of both ranks' results, and that each did half of the work."""
    for shape in _SHAPES:
        x, a, b = _problem(*shape)
        given = f"x {list(x.shape)}, A {list(a.shape)} and B {list(b.shape)}"
        yield explained(given, "two terms whose sum is relu(x A) B", lambda c=(x, a, b): _judged_half(answer, *c))


def _judged_half(answer: Any, x: Array, a: Array, b: Array) -> bool | str:
    """Return True, or what is wrong and the misunderstanding behind it."""
    whole, cut = _relu(x @ a) @ b, a.shape[1] // 2
    terms = [np.asarray(plain(answer(x.copy(), a.copy(), b.copy(), rank)), dtype=float) for rank in (0, 1)]
    for rank, term in enumerate(terms):
        if term.shape != whole.shape:
            return f"rank {rank} returns {list(term.shape)}, not {list(whole.shape)}: each term is as large as the sum"
    right = [_relu(x @ a[:, part]) @ b[part] for part in (slice(cut), slice(cut, None))]
    total = terms[0] + terms[1]
    if np.allclose(total, whole):
        if all(any(np.allclose(term, each) for each in right) for term in terms):
            return True
        return "the sum is right: but the work is not shared; each rank needs half of A's columns and B's rows only"
    inner = x @ a
    sums = {
        "both ranks did all of the work, so their sum is twice the result": 2 * whole,
        "both ranks took the same half": 2 * right[0],
        "both ranks took the second half": 2 * right[1],
        "the relu is missing between A and B": inner @ b,
        "A's columns and B's rows belong together, and these don't match": (
            _relu(inner[:, :cut]) @ b[cut:] + _relu(inner[:, cut:]) @ b[:cut]
        ),
        "the relu comes after the sum's terms; it belongs between A and B": sum(
            _relu(inner[:, part] @ b[part]) for part in (slice(cut), slice(cut, None))
        ),
        "relu of a term of a sum is not a term of relu of the sum, so A can't be cut by its rows": sum(
            _relu(x[:, part] @ a[part]) @ b for part in (slice(x.shape[1] // 2), slice(x.shape[1] // 2, None))
        ),
    }
    why = next((words for words, other in sums.items() if np.allclose(total, other)), "")
    return f"a sum of {shown(total[0])}: {why or 'the two terms do not add up to relu(x A) B'}"


# ---- a layout that fits ----

_MODELS = ((1, 80), (300, 80), (2800, 80), (1300, 40), (640, 80), (70, 24), (16_000, 80))
"""(gigabytes of one copy of the model, gigabytes of a GPU)."""


def _fit(gigabytes: float, room: float) -> tuple[int, int]:
    """Return (tp, pp) with the fewest stages, and then the smallest tp."""
    pp = ceil(gigabytes / (8 * room))
    return next(tp for tp in (1, 2, 4, 8) if tp * pp * room >= gigabytes), pp


@exercise("00.fit", "Write fit(gigabytes, room) -> (tp, pp) of a layout in which each GPU holds at most `room`.")
def fit(answer: Any) -> Iterator[Outcome]:
    """Judge seven models: the parts fit, tp stays inside a machine, and then few stages and a small tp."""
    for gigabytes, room in _MODELS:
        yield explained(
            f"a model of {gigabytes} GB and GPUs with {room}",
            "fewest stages, then the smallest tp",
            lambda case=(gigabytes, room): _judged_fit(answer, *case),
        )


def _judged_fit(answer: Any, gigabytes: float, room: float) -> bool | str:
    """Return True, or what is wrong with tp and pp."""
    found = plain(answer(gigabytes, room))
    if not (isinstance(found, list) and len(found) == 2 and all(type(n) is int and n > 0 for n in found)):
        return f"{shown(found)}: this is not a pair (tp, pp) of whole numbers"
    (tp, pp), right = found, _fit(gigabytes, room)
    said = f"tp {tp}, pp {pp}"
    if tp not in (1, 2, 4, 8):
        return f"{said}: a machine has eight GPUs, so tp is 1, 2, 4 or 8"
    if tp * pp * room < gigabytes:
        return f"{said}: the parts don't fit; round the number of stages up"
    if pp > right[1]:
        return f"{said}: fewer stages would do, and every stage more makes all of them wait longer"
    if tp > right[0]:
        return f"{said}: a smaller tp fits into as many stages, with fewer messages"
    return True


# ---- the order of work in a pipeline ----

_SIZES = ((2, 4), (2, 2), (4, 4), (3, 6), (1, 3), (4, 8))
"""(stages, microbatches)."""


def _table(rows: Any, stages: int, microbatches: int) -> Schedule | str:
    """Return the table of rows such as ["F0", "B0"], or why it is none."""
    found = plain(rows)
    if not isinstance(found, list) or len(found) != stages or not all(isinstance(row, list) for row in found):
        return f"{shown(found)}: this is not one list of actions for each stage"
    try:
        parsed = [[Action.parse(f"{stage}{text}") for text in row] for stage, row in enumerate(found)]
        return Schedule("yours", stages, microbatches, parsed)
    except (ScheduleError, ValueError, TypeError):
        return f"{shown(found)}: an action is an F or a B and a microbatch, as 'F0'"


def draw_order(answer: Any) -> Figure | None:
    """Draw the answer's rows for two stages and four microbatches as far as they run, and where a step can end."""
    from labkit.viz.pipeline.played_table import PlayedTable, draw_played  # matplotlib, which a score does without

    table = _table(answer(2, 4), 2, 4)
    if isinstance(table, str):
        return None
    rows = [table.actions(stage) for stage in range(2)]
    if len({action for row in rows for action in row}) < len(table) or not len(table):
        return None
    return draw_played(PlayedTable(rows), {"shortest": 15, "one at a time": 24})


@exercise(
    "00.order",
    "Write order(stages, microbatches) -> one list of actions for each stage, as texts such as 'F0'.",
    draw=draw_order,
)
def order(answer: Any) -> Iterator[Outcome]:
    """Judge six pipelines: complete, no deadlock, as short as can be, and few microbatches in flight."""
    for stages, count in _SIZES:
        yield explained(
            f"{stages} stages and {count} microbatches",
            f"{3 * (count + stages - 1)} units, at most {min(stages, count)} in flight",
            lambda case=(stages, count): _judged_order(answer, *case),
        )


def _judged_order(answer: Any, stages: int, microbatches: int) -> bool | str:
    """Return True, or what is wrong with the rows."""
    table = _table(answer(stages, microbatches), stages, microbatches)
    if isinstance(table, str):
        return table
    if table.forward_only:
        return "no backward: each forward needs one, or there are no gradients"
    try:
        timeline = simulate(table)
    except ScheduleError as error:
        if "wait for each other" in str(error):
            return "a deadlock: two stages wait for each other; the first stage has to run the most forwards in advance"
        return "a table that cannot run: each stage has to run every F and every B exactly once"
    least, flight = simulate(one_f_one_b(stages, microbatches)).makespan, max(timeline.peak_in_flight)
    if timeline.makespan > least:
        one = 3 * stages * microbatches
        why = "while one stage works the others could work on other microbatches" if timeline.makespan == one else ""
        return f"{timeline.makespan:g} units: {why or 'a stage waits although there is a microbatch that it could run'}"
    if flight > min(stages, microbatches):
        return f"{flight} in flight: run a backward as soon as it can, so that its activations are freed"
    return True
