"""Exercise on the end of a partial graph: the tensors that it takes in and must give out.

A wrong answer is held against the answers of known misunderstandings. The score names the one that gives the same, and
the first name that differs with its consequence.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from labkit.check.scoring import Diagnosis, Misreadings, Outcome, exercise, plain, same

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
_BOUNDARIES: tuple[tuple[list[Step], int], ...] = (
    (_TWO_STEPS, 1),
    (_AGAIN, 2),
    (_TWO_STEPS, 2),
    (LAYER, 1),
    (LAYER, 4),
    (LAYER, 5),
    (LAYER[1:], 3),
)
NUM_DRAWN = 200
"""Forwards drawn at random; the last case shows the shortest one that the answer misses."""


@exercise(
    "18.boundary",
    "Write boundary(steps, captured) -> (inputs, outputs): what a graph of the first steps takes in and must give out.",
)
def boundary(answer: Any) -> Iterator[Outcome]:
    """Small forwards, a layer cut in four places, and a forward drawn at random."""
    diagnosis = Diagnosis()
    for steps, captured in (*_BOUNDARIES, _shortest_missed(answer)):
        right = list(_boundary(steps, captured))
        given: list[Any] = []

        def tried(steps: list[Step] = steps, captured: int = captured, given: list[Any] = given) -> Any:
            given.append(plain(answer(list(steps), captured)))
            return given[0]

        words = f"{_words(steps[:captured])} | {_words(steps[captured:])} (captured up to the bar)"
        outcome = diagnosis.outcome(words, right, tried, _misread(steps, captured))
        consequence = _consequence(given[0], right, steps, captured) if given and not outcome.passed else ""
        yield replace(outcome, got=outcome.got + consequence)


def _words(steps: Sequence[Step]) -> str:
    return "; ".join(f"{', '.join(writes)} = {name}({', '.join(reads)})" for name, reads, writes in steps) or "nothing"


def _inside(steps: Sequence[Step]) -> tuple[list[str], list[str]]:
    """Names that steps read before they write them, and names that they write, in the order of the last time."""
    inputs: list[str] = []
    written: list[str] = []
    for _, reads, writes in steps:
        inputs += [name for name in reads if name not in written and name not in inputs]
        written = [name for name in written if name not in writes] + list(writes)
    return inputs, written


def _wanted(steps: Sequence[Step], result: Sequence[str]) -> set[str]:
    """Values that are read behind the graph, found from the end backwards."""
    live = set(result)
    for _, reads, writes in reversed(steps):
        live = live - set(writes) | set(reads)
    return live


def _boundary(steps: Sequence[Step], captured: int) -> tuple[list[str], list[str]]:
    inputs, written = _inside(steps[:captured])
    live = _wanted(steps[captured:], steps[-1][2])
    return inputs, [name for name in written if name in live]


def _misread(steps: Sequence[Step], captured: int) -> Misreadings:
    inputs, written = _inside(steps[:captured])
    after, result = steps[captured:], set(steps[-1][2])
    following = set(after[0][1]) if after else result
    by_name = {name for _, reads, _ in after for name in reads} | result
    live = _wanted(after, ())
    every = [name for _, reads, _ in steps[:captured] for name in reads]

    def with_outputs(kept: Callable[[str], bool]) -> list[list[str]]:
        return [inputs, [name for name in written if kept(name)]]

    return {
        "names are compared, but a name that is written again behind the graph has another value": with_outputs(
            by_name.__contains__
        ),
        "all that the graph computes comes out; what nobody reads any more could be used again": [inputs, written],
        "every name that a step reads or writes is listed, also twice": [
            every, [name for _, _, writes in steps[:captured] for name in writes]
        ],
        "only the very next step is asked what it reads; others read later": with_outputs(following.__contains__),
        "the result is left out; the last step's writes come out as well": with_outputs(live.__contains__),
    }  # fmt: skip


def _consequence(given: Any, right: list[list[str]], steps: Sequence[Step], captured: int) -> str:
    """The first name that is missing or too much, and what that means; empty for another form."""
    if not (isinstance(given, list) and len(given) == 2 and all(isinstance(each, list) for each in given)):
        return " (two lists are asked: inputs and outputs)"
    for name in right[0]:
        if name not in given[0]:
            return f" (without the input {name} the graph has nothing to read)"
    for name in right[1]:
        if name not in given[1]:
            reader = next((step for step, reads, _ in steps[captured:] if name in reads), None)
            return f" (without {name} `{reader}` has nothing to read)" if reader else f" (the result {name} is lost)"
    for name in given[0]:
        if name not in right[0]:
            made = any(name in writes for _, _, writes in steps[:captured])
            return f" ({name} is too much{': a captured step writes it before it is read' if made else ''})"
    for name in given[1]:
        if name not in right[1]:
            made = any(name in writes for _, _, writes in steps[:captured])
            return f" ({name} is too much{'' if made else ': no captured step writes it, so the caller has it'})"
    return " (the names are right, their order is not)"


def _shortest_missed(answer: Any) -> tuple[list[Step], int]:
    """The shortest forward of those drawn at random that the answer misses; the first one if it misses none."""
    drawn = sorted(_drawn(), key=lambda case: len(case[0]))
    for steps, captured in drawn:
        try:
            missed = not same(answer(list(steps), captured), list(_boundary(steps, captured)))
        except Exception:
            missed = True
        if missed:
            return steps, captured
    return drawn[0]


def _drawn() -> Iterator[tuple[list[Step], int]]:
    draw = random.Random(16)
    for _ in range(NUM_DRAWN):
        names = [f"v{i}" for i in range(draw.randint(2, 6))]
        steps: list[Step] = []
        for number in range(draw.randint(1, 8)):
            reads = tuple(draw.sample(names, draw.randint(1, 2)))
            steps.append((f"s{number}", reads, tuple(draw.sample(names, draw.randint(1, 2)))))
        yield steps, draw.randint(1, len(steps))
