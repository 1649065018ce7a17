"""Exercises and bets of chapter 17: how many buffers are held, which forward takes which, which plan is unsafe.

Wrong answers are compared with those of known misunderstandings, and the score names the one that gives the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.check.bets import ask
from labkit.check.scoring import Diagnosis, Finding, Misreadings, Outcome, as_list, asked, exercise, holds, plain, shown
from labkit.graphs.buffers import plan_buffers, plan_from
from labkit.graphs.order_table import read_order
from labkit.schedules.builders import gpipe, interleaved, one_f_one_b

if TYPE_CHECKING:
    from labkit.viz.figure import Figure

_ORDERS: dict[str, list[float]] = {
    "the order 1 1 -1 1 -1 -1": [1, 1, -1, 1, -1, -1],
    "the order 1 -1 1 -1 1 -1": [1, -1, 1, -1, 1, -1],
    "GPipe's order 1 1 1 -1 -1 -1": gpipe(2, 3).order(0),
    "the order 1 -1 1 1 -1 -1": [1, -1, 1, 1, -1, -1],
    "the order 1 2 1 -2 -1 2 -2 -1 of two chunks": [1, 2, 1, -2, -1, 2, -2, -1],
    "1F1B, 4 stages, 8 microbatches, rank 1": one_f_one_b(4, 8).order(1),
}
_LONG_ORDERS: dict[str, list[float]] = {
    "interleaved 1F1B, 4 ranks, 2 chunks, 16 microbatches, rank 0": interleaved(4, 2, 16).order(0),
    "interleaved 1F1B, 4 ranks, 3 chunks, 8 microbatches, rank 2": interleaved(4, 3, 8).order(2),
}


# ---- the most forwards in flight ----


@exercise("17.held", "Write most_held(order) -> the largest number of forwards that wait for their backward at once.")
def held(answer: Any) -> Iterator[Outcome]:
    """Judge six short orders and two long ones."""
    return asked(
        {**_ORDERS, **_LONG_ORDERS}.items(),
        given=lambda words, order: words,
        right=lambda words, order: _held(order),
        tried=lambda words, order: answer(list(order)),
        misread=lambda words, order: _misread_held(order),
    )


def _held(order: Sequence[float]) -> int:
    most = now = 0
    for step in order:
        now += 1 if step > 0 else -1
        most = max(most, now)
    return most


def _misread_held(order: Sequence[float]) -> Misreadings:
    first = next(place for place, step in enumerate(order) if step < 0)
    chunks = {abs(step) for step in order}
    return {
        "this takes the fullest chunk; the chunks of a rank wait together": max(
            _held([step for step in order if abs(step) == chunk]) for chunk in chunks
        ),
        "this counts all forwards; a backward gives one back": sum(step > 0 for step in order),
        "this stops at the first backward; later more can be in flight": first,
        "this leaves out the forward that runs right after the warm-up": _held(order) - 1,
    }


ask(
    "17.one_pair",
    "Two microbatches share one pair of graphs. Which order gives a wrong gradient?",
    choices={
        "1 -1 1 -1": "Each backward runs right after its forward, while everything that it reads is still there.",
        "1 1 -1 -1": "The second forward writes to the addresses that the first backward has yet to read.",
        "both": "In 1 -1 1 -1 each backward has run before the next forward writes anything.",
        "neither": "A graph knows addresses, not microbatches. The second forward writes to the same ones.",
    },
)
ask(
    "17.second",
    "Both forwards have replayed one pair of graphs, then the first backward. Is the second backward right?",
    choices={
        "right": "The forward of microbatch 1 was the last one. But a backward has been replayed since.",
        "wrong": "Though the forward of microbatch 1 was the last one. A backward has been replayed since.",
    },
)
ask(
    "17.grows",
    "Rank 0 with two chunks of half the layers, interleaved: how many buffers does the plan make?",
    unit="buffers",
    misread=lambda p, m: {
        "That is 1F1B with one chunk. With two, a rank begins more forwards before its first backward.": p,
        "That is twice the number of 1F1B. The chunks are not in flight equally often: count the first -2.": 2 * p,
        "That is a buffer for each forward. A backward gives one back, and a later forward takes it.": 2 * m,
    },
    because="A rank needs a buffer for each forward in flight. Its warm-up has 2 (p - r - 1) + p forwards, unless the "
    "batch has fewer, and one more runs before the first backward.",
)


# ---- bets on the pool and on a training run ----

ask(
    "17.sent",
    "Rule 3 is broken: the pool gets the chunk's dx back at once. Whose gradients are wrong?",
    choices={
        "this rank's": "This rank's weight gradients were computed before anybody else took that memory.",
        "the previous rank's": "The next backward writes into dx while the message still reads it. This rank is done "
        "with dx, so its own gradients are right; the rank that receives it works on with somebody else's numbers.",
        "both": "This rank's weight gradients were computed before anybody else took that memory.",
        "nobody's": "No graph of this rank reads dx again, but the message does.",
    },
)
ask(
    "17.pool",
    "Nothing is let go after its capture, and the pool is much larger. What fills it?",
    choices={
        "what forwards save": "Autograd drops what a forward has saved while its backward runs, with the rules and "
        "without them. A later capture takes this memory.",
        "gradients of weights": "A layer's weights do not shrink with the microbatch, and without the rules each "
        "backward graph keeps gradients of its own for all of them.",
        "outputs and dx": "They are kept, too. But each is only as large as one input of a layer.",
    },
)
ask(
    "17.loss",
    "Every static input is handed on one step early. How far is the loss from the right one, at most, over all steps?",
    choices={
        "more than 1 %": "The loss is computed by forwards, and every forward of a step is right. A wrong gradient "
        "shows only through the weights that it has moved.",
        "0.01 % to 1 %": "The loss is computed by forwards, which are right. A wrong gradient shows only through the "
        "weights that it has moved, and in a few steps it does not move them far.",
        "less than 0.01 %": "The forwards of a step are right. A wrong gradient shows only through the weights that it "
        "has moved, and a few small steps do not move them far.",
    },
)
ask(
    "17.gradient",
    "And the gradients of the first step that replays: how far is the worst one from the right one, in percent of its "
    "length?",
    unit="%",
    misread=lambda m: {
        "That is one microbatch of m. All but the last ones read the input of a later microbatch.": 100 / m,
        "That would be the distance of two gradients that have nothing to do with each other. The last microbatches "
        "still read their own input.": 141,
    },
    because="The gradient of a norm's weight is a sum of dy times the normalised input. In the first layer most of the "
    "inputs are other tokens.",
)


# ---- the buffer of each forward ----


def draw_buffers(answer: Any) -> Figure | None:
    """Draw the answer's plan above the right one, for the first order in which a held buffer is overwritten.

    If there is none, the first order that it gets wrong is drawn, and two chunks if it gets none wrong.
    An answer that is no list of one whole number for each forward makes no plan.
    """
    from labkit.viz.graphs.buffer_lives import compare_plans  # matplotlib, which a score does without

    plans = {words: plain(list(answer(list(order)))) for words, order in _ORDERS.items()}
    if any(_form(numbers, len(_taken(_ORDERS[words]))) for words, numbers in plans.items()):
        return None
    unsafe = [words for words, numbers in plans.items() if _first_fault(_ORDERS[words], numbers)]
    wrong = [words for words, numbers in plans.items() if numbers != _taken(_ORDERS[words])]
    words = [*unsafe, *wrong, "the order 1 2 1 -2 -1 2 -2 -1 of two chunks"][0]
    order, numbers = _ORDERS[words], plans[words]
    return compare_plans(plan_from(order, numbers), plan_buffers(order, 1), order)


@exercise(
    "17.buffers",
    "Write buffers(order) -> the buffer of each forward, in the order of the forwards: the one that has been free "
    "longest, or a new one, numbered 0, 1, ... as they are first taken.",
    draw=draw_buffers,
)
def buffers(answer: Any) -> Iterator[Outcome]:
    """Judge six short orders and two long ones, and distinguish an unsafe answer from one that is merely different."""
    for given, order in {**_ORDERS, **_LONG_ORDERS}.items():
        yield holds(given, shown(_taken(order)), lambda o=order: _judged(as_list(answer(list(o))), o))


def _taken(order: Sequence[float]) -> list[int]:
    """Return the buffers of the forwards, with one layer per chunk."""
    assignment = plan_buffers(order, 1).assignment
    return [assignment[one.chunk, 0, one.microbatch] for one in read_order(order) if one.kind == "F"]  # type: ignore[index]


def _judged(given: Any, order: Sequence[float]) -> Finding:
    """Return the kind of an answer's fault, and its sentence."""
    right = _taken(order)
    if isinstance(given, str) or not isinstance(given, Iterable):
        return "form", f"{shown(given)}: an answer is a list of whole numbers, one for each forward"
    numbers = plain(list(given))
    if what := _form(numbers, len(right)):
        return "form", f"{shown(numbers)}: {what}"
    if numbers == right:
        return True
    words = next((each for each, other in _misread_buffers(order).items() if numbers == other != right), "")
    fault = _overwritten(order, numbers)
    seen = f"{shown(numbers)}: {words}" if words else shown(numbers)
    return words or ("unsafe" if fault else "different"), f"{seen}; {fault or _apart(numbers, right)}"


def _form(numbers: Sequence[Any], forwards: int) -> str:
    """Say why these are not one whole number for each forward; empty if they are."""
    strange = [n for n in numbers if not isinstance(n, int | np.integer) or isinstance(n, bool)]
    if strange:
        return f"{shown(strange[0])} is not a whole number"
    return "" if len(numbers) == forwards else f"{len(numbers)} for {forwards} forwards"


def _apart(numbers: Sequence[int], right: Sequence[int]) -> str:
    place = next(i for i, (a, b) in enumerate(zip(numbers, right)) if a != b)
    more = len(set(numbers)) - len(set(right))
    cost = f", and takes {more} more buffer{'s' if more > 1 else ''}" if more > 0 else ""
    return f"safe, but forward {place} takes buffer {numbers[place]} instead of {right[place]}{cost}"


def _ends(order: Sequence[float], oldest: Callable[[float], float] = abs) -> list[tuple[int, int]]:
    """Return (position of the forward, of its backward) by forward; a backward ends the oldest of its chunk."""
    waiting: dict[float, deque[int]] = {}
    spans: list[list[int]] = []
    for position, step in enumerate(order):
        queue = waiting.setdefault(oldest(step), deque())
        if step > 0:
            queue.append(len(spans))
            spans.append([position, len(order)])
        elif queue:
            spans[queue.popleft()][1] = position
    return [(first, last) for first, last in spans]


def _overwritten(order: Sequence[float], numbers: Sequence[int]) -> str:
    """Name the first forward that writes to a buffer that another one holds; empty if there is none."""
    fault = _first_fault(order, numbers)
    if fault is None:
        return ""
    forwards = [position for position, step in enumerate(order) if step > 0]
    buffer = numbers[forwards.index(fault[0])]
    return (
        f"buffer {buffer} is overwritten by the forward at position {fault[0]}, and the backward at position "
        f"{fault[1]} still reads it"
    )


def _walked(order: Sequence[float], oldest: Callable[[float], float], *, newest: bool = False) -> list[int]:
    """Take buffers first in, first out, under other rules: whose oldest a backward ends; newest free buffer first."""
    free: deque[int] = deque()
    waiting: dict[float, deque[int]] = {}
    taken: list[int] = []
    for step in order:
        queue = waiting.setdefault(oldest(step), deque())
        if step < 0:
            free.append(queue.popleft())
            continue
        buffer = (free.pop() if newest else free.popleft()) if free else len(set(taken))
        queue.append(buffer)
        taken.append(buffer)
    return taken


def _misread_buffers(order: Sequence[float]) -> dict[str, list[int]]:
    count = sum(step > 0 for step in order)
    first = next(place for place, step in enumerate(order) if step < 0)
    return {
        "this ends the oldest microbatch of all; a backward names its chunk": _walked(order, lambda step: 0),
        "this gives every forward a buffer of its own; what a backward gives back can be taken": list(range(count)),
        "this has one buffer too few: the forward right after the warm-up needs one as well": [
            place % max(1, first - 1) for place in range(count)
        ],
        "this takes the buffer that was freed last; the one that has been free longest goes first": _walked(
            order, abs, newest=True
        ),
    }


# ---- an unsafe plan ----

_PLANS: tuple[tuple[str, list[float], list[int]], ...] = (
    ("first in, first out", [1, 1, -1, 1, -1, -1], [0, 1, 0]),
    ("one buffer for all", [1, 1, -1, 1, -1, -1], [0, 0, 0]),
    ("a buffer for each", [1, 1, -1, 1, -1, -1], [0, 1, 2]),
    ("given back early", [1, 1, -1, 1, -1, -1], [0, 1, 1]),
    ("back at once", [1, -1, 1, -1], [0, 0]),
    ("two chunks", [1, 2, 1, -2, -1, 2, -2, -1], [0, 1, 2, 1]),
    ("two chunks, the wrong one ends", [1, 2, 1, -2, -1, 2, -2, -1], [0, 1, 2, 2]),
    ("two chunks, the other's buffer", [1, 2, 1, -2, 2, -1, -2, -1], [0, 1, 2, 0]),
)
"""(words, order, buffer of each forward)."""


@exercise(
    "17.unsafe",
    "Write unsafe(order, buffers) -> (forward, backward), positions of the first forward that overwrites a held buffer "
    "and of the backward that then reads it, or None.",
)
def unsafe(answer: Any) -> Iterator[Outcome]:
    """Judge eight plans, safe and unsafe."""
    diagnosis = Diagnosis()
    for words, order, numbers in _PLANS:
        given = f"order {' '.join(map(str, order))} and buffers {numbers} ({words})"
        right = _first_fault(order, numbers)
        outcome = diagnosis.outcome(
            given, right, lambda o=order, n=numbers: answer(list(o), list(n)), _misread_plans(order, numbers)
        )
        fault = _overwritten(order, numbers) or "each buffer is free when it is taken again"
        yield outcome if outcome.passed else replace(outcome, got=f"{outcome.got} ({fault})")


def _first_fault(
    order: Sequence[float], numbers: Sequence[int], oldest: Callable[[float], float] = abs
) -> tuple[int, int] | None:
    spans = _ends(order, oldest)
    for later, (begin, _) in enumerate(spans):
        for earlier in range(later):
            if numbers[earlier] == numbers[later] and spans[earlier][1] > begin:
                return begin, spans[earlier][1]
    return None


def _misread_plans(order: Sequence[float], numbers: Sequence[int]) -> Misreadings:
    spans, right = _ends(order), _taken(order)
    other = next((i for i, (a, b) in enumerate(zip(numbers, right)) if a != b), None)
    again = next((i for i, number in enumerate(numbers) if number in numbers[:i]), None)
    fault = _first_fault(order, numbers)
    return {
        "this rejects each second use of a buffer, whenever it comes": None
        if again is None
        else (spans[again][0], len(order) - 1),
        "this calls every plan unsafe that is not first in, first out": None if other is None else spans[other],
        "this rejects each second use of a buffer; after the backward a second use is safe": None
        if again is None
        else (spans[again][0], spans[numbers.index(numbers[again])][1]),
        "this ends the oldest microbatch of all; a backward names its chunk": _first_fault(
            order, numbers, lambda step: 0
        ),
        "this finds nothing, and the plan overwrites an input": None,
        "these are numbers of forwards; give positions in the order": None
        if fault is None
        else tuple(next(i for i, span in enumerate(spans) if place in span) for place in fault),
    }
