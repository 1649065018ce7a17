"""Exercise on the end of a partial graph."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from labkit.check.scoring import Outcome, compare, exercise, holds, plain, shown

Step = tuple[str, tuple[str, ...], tuple[str, ...]]
"""Name, values that the step reads, values that it writes; a second write gives a name a new value."""

LAYER: list[Step] = [
    ("attention", ("x",), ("x",)),
    ("norm", ("x",), ("hidden",)),
    ("shared experts", ("hidden",), ("shared",)),
    ("route", ("hidden",), ("probs", "map")),
    ("preprocess", ("hidden", "probs", "map"), ("hidden", "probs", "counts", "origin")),
    ("dispatch", ("hidden", "probs", "counts"), ("hidden", "probs")),
    ("experts", ("hidden", "probs", "counts"), ("hidden",)),
    ("combine", ("hidden", "origin", "counts"), ("hidden",)),
    ("add shared", ("hidden", "shared"), ("hidden",)),
    ("residual", ("x", "hidden"), ("x",)),
]
_TWO_STEPS: list[Step] = [("double", ("x",), ("y",)), ("add", ("x", "y"), ("z",))]
_AGAIN: list[Step] = [("a", ("x",), ("t",)), ("b", ("t",), ("y",)), ("c", ("x",), ("t",)), ("d", ("t", "y"), ("z",))]
_BOUNDARIES: dict[str, tuple[list[Step], int]] = {
    "y = double(x), z = add(x, y), the first step captured": (_TWO_STEPS, 1),
    "the same, both captured": (_TWO_STEPS, 2),
    "a layer with experts, captured up to attention": (LAYER, 1),
    "the layer, captured up to route": (LAYER, 4),
    "the layer, captured up to preprocess": (LAYER, 5),
    "the layer without its attention, captured up to route": (LAYER[1:], 3),
    "t = a(x), y = b(t), t = c(x), z = d(t, y), the first two captured": (_AGAIN, 2),
}


@exercise(
    "18.boundary",
    "Write boundary(steps, captured) -> (inputs, outputs): what a graph of the first steps takes in and must give out.",
)
def boundary(answer: Any) -> Iterator[Outcome]:
    """Small forwards, a layer cut in three places, and forwards drawn at random."""
    for given, (steps, captured) in _BOUNDARIES.items():
        right = list(_boundary(steps, captured))
        yield compare(given, right, lambda steps=steps, captured=captured: answer(list(steps), captured))
    yield holds("200 forwards drawn at random", "the same as a walk from the end", lambda: _at_random(answer))


def _boundary(steps: Sequence[Step], captured: int) -> tuple[list[str], list[str]]:
    """Live values, found from the end backwards."""
    live = set(steps[-1][2])
    for _, reads, writes in reversed(steps[captured:]):
        live = live - set(writes) | set(reads)
    inputs: list[str] = []
    written: list[str] = []  # in the order of the last time
    for _, reads, writes in steps[:captured]:
        inputs += [name for name in reads if name not in written and name not in inputs]
        written = [name for name in written if name not in writes] + list(writes)
    return inputs, [name for name in written if name in live]


def _at_random(answer: Any) -> bool | str:
    draw = random.Random(16)
    for _ in range(200):
        names = [f"v{i}" for i in range(draw.randint(2, 6))]
        steps: list[Step] = []
        for number in range(draw.randint(1, 8)):
            reads = tuple(draw.sample(names, draw.randint(1, 2)))
            steps.append((f"step {number}", reads, tuple(draw.sample(names, draw.randint(1, 2)))))
        captured = draw.randint(1, len(steps))
        right, got = list(_boundary(steps, captured)), plain(answer(list(steps), captured))
        if got != right:
            return f"{shown(got)} instead of {shown(right)} for the first {captured} of {shown(steps)}"
    return True
