"""Exercises of chapter 13: gradients that fp16 loses, reads of a checkpoint's boxes, the norm of all gradients.

Wrong answers are compared with those of known misunderstandings, and the score names the one that gives the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from labkit.check.scoring import ONLY_FIRST, Diagnosis, Misreadings, Outcome, asked, close, exercise, holds, plain
from labkit.train.checkpoint.boxes import Box, boxes_of_run


def _same_in_any_order(value: Any, other: Any) -> bool:
    return sorted(plain(value)) == sorted(plain(other))


# ---- the gradients that fp16 loses ----

LARGEST, SMALLEST_NORMAL, SMALLEST = 65504.0, 2.0**-14, 2.0**-24
"""fp16's largest number, its smallest number with all 11 bits, and its smallest number above 0."""

_GRADIENTS = (
    ([1e-3, 1e-6, 1e-8, 1e-9], 1.0),
    ([1e-8, 1e-9, 1e-13], 2.0**16),
    ([0.5, 1.5, -3.0, 1e-7], 2.0**16),
    ([2e-5, 4e-8, -1e-5], 1.0),
    ([0.0, 5e-9, 0.0], 1.0),
    ([-1e-12, 7e4, -7e4, 1.0], 1.0),
)
"""(gradients, loss scale)."""


def _lost(
    gradients: Sequence[float], scale: float, *, smallest: float = SMALLEST / 2, largest: float = 65520.0
) -> list[int]:
    """Return the positions whose gradient times the scale rounds to 0 or to infinity; a gradient of 0 is not lost.

    Half of the smallest number still rounds to 0, and 65520 is the first number that rounds to infinity.
    """
    scaled = [abs(gradient * scale) for gradient in gradients]
    return [place for place, size in enumerate(scaled) if 0 < size <= smallest or size >= largest]


@exercise(
    "13.lost", "Write lost(gradients, scale) -> the positions of the gradients that fp16 turns into 0 or infinity."
)
def lost(answer: Any) -> Iterator[Outcome]:
    """Judge six lists of gradients, each at one loss scale."""
    return asked(
        _GRADIENTS,
        given="gradients {} and scale {:g}".format,
        right=_lost,
        tried=lambda gradients, scale: answer(list(gradients), scale),
        misread=_misread_gradients,
    )


def _misread_gradients(gradients: Sequence[float], scale: float) -> Misreadings:
    right = _lost(gradients, scale)
    zeros = [place for place, gradient in enumerate(gradients) if gradient == 0]
    normal = _lost(gradients, scale, smallest=math.nextafter(SMALLEST_NORMAL, 0.0))
    rounded_up = _lost(gradients, scale, smallest=math.nextafter(SMALLEST, 0.0))
    without_sign = [p for p in right if gradients[p] > 0 or abs(gradients[p] * scale) < 1]
    return {
        "this takes 6.1e-05 as the smallest number, but subnormal numbers reach down to 6e-08": normal,
        "this loses all below 6e-08, but a number above half of 6e-08 rounds up to it": rounded_up,
        "this forgets the other end: a scaled gradient beyond 65504 becomes infinite": _lost(
            gradients, scale, largest=math.inf
        ),
        "this leaves the scale out, or multiplies after fp16 has rounded; the backward runs on scaled numbers": _lost(
            gradients, 1.0
        ),
        "this counts gradients that were 0 from the start; nothing of them is lost": sorted([*right, *zeros]),
        "this compares without the sign's absolute value, so a large negative gradient passes": without_sign,
    }


# ---- the boxes that a rank reads ----

Placed = tuple[str, tuple[int, ...], tuple[int, ...]]
"""(key, offset, shape) of a stored box; the key names the file and the box in it."""
Read = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""(key, start inside the stored box, start inside the reader's box, shape)."""
Rule = Callable[[Box, Box, Box], tuple[Any, Any, Any]]
"""(stored box, reader's box, overlap) -> (start inside the stored box, start inside the reader's box, shape)."""


def _minus(a: Iterable[int], b: Iterable[int]) -> tuple[int, ...]:
    return tuple(x - y for x, y in zip(a, b))


def _right_read(stored: Box, mine: Box, common: Box) -> tuple[Any, Any, Any]:
    return _minus(common.offset, stored.offset), _minus(common.offset, mine.offset), common.shape


def _reads(stored: Sequence[Placed], mine: Box, rule: Rule = _right_read, *, touching: bool = False) -> list[Read]:
    """Return the reads in the order of the stored boxes. touching: add empty reads of boxes next to the reader's."""
    found = []
    for key, offset, shape in stored:
        first = tuple(map(max, offset, mine.offset))
        ends = (min(a + n, b + m) for a, n, b, m in zip(offset, shape, mine.offset, mine.shape))
        common = Box(first, _minus(ends, first))
        if all(size > 0 or (touching and size == 0) for size in common.shape):
            found.append((key, *rule(Box(offset, shape), mine, common)))
    return found


def _cut(shape: tuple[int, ...], dim: int, ranks: int) -> list[Placed]:
    """Store the tensor as tensor parallelism does: cut along one dimension."""
    size, found = shape[dim] // ranks, []
    for rank in range(ranks):
        offset, part = [0] * len(shape), list(shape)
        offset[dim], part[dim] = rank * size, size
        found.append((_key(rank, offset), tuple(offset), tuple(part)))
    return found


def _sharded(shape: tuple[int, ...], ranks: int) -> list[Placed]:
    """Store the tensor as a distributed optimizer does: a run of elements for each rank, as boxes."""
    numel, found = math.prod(shape), []
    for rank in range(ranks):
        run = boxes_of_run(shape, rank * numel // ranks, (rank + 1) * numel // ranks)
        found += [(_key(rank, box.offset), box.offset, box.shape) for box, _ in run]
    return found


def _key(rank: int, offset: Iterable[int]) -> str:
    return f"rank {rank} @{','.join(map(str, offset))}"


_RESTORES = (
    ("a vector of 8 cut in two", _cut((8,), 0, 2), Box((2,), (4,))),
    ("rows 0 to 3 and rows 4 to 7 of an [8, 6]", _cut((8, 6), 0, 2), Box((0, 3), (8, 3))),
    ("rows of an [8, 6], two per rank", _cut((8, 6), 0, 4), Box((2, 0), (2, 6))),
    ("runs of 10 elements of a [4, 5]", _sharded((4, 5), 2), Box((1, 1), (2, 3))),
    ("runs of elements of a [5, 7] over 3 ranks", _sharded((5, 7), 3), Box((0, 2), (5, 4))),
    ("two experts of [4, 6] cut along the last dimension", _cut((2, 4, 6), 2, 2), Box((1, 0, 2), (1, 4, 3))),
)
"""(words, stored boxes, the reader's box)."""
_RELAYOUTS = (
    ("4 shards", (6, 5), _sharded((6, 5), 4), _cut((6, 5), 0, 3)),
    ("columns of 4 ranks", (6, 4), _cut((6, 4), 1, 4), _sharded((6, 4), 5)),
)
"""(words, shape, stored boxes, boxes of the readers)."""


@exercise(
    "13.reads",
    "Write reads(stored, offset, shape) -> (key, start inside the stored box, start inside my box, shape) by read.",
)
def reads(answer: Any) -> Iterator[Outcome]:
    """Judge six cases read by read, then all readers of two layouts: each element must come once, from its place."""
    diagnosis = Diagnosis(_same_in_any_order)
    for words, stored, mine in _RESTORES:
        yield diagnosis.outcome(
            f"{words}, my box at {list(mine.offset)} of shape {list(mine.shape)}",
            _reads(stored, mine),
            lambda stored=stored, mine=mine: _as_list(answer([*stored], mine.offset, mine.shape)),
            _misread_boxes(stored, mine),
        )
    for name, shape, old, new in _RELAYOUTS:
        outcome = holds(
            f"a {list(shape)} stored as {name} and read under another layout, as {len(new)} boxes",
            "each element once, from its place",
            lambda shape=shape, old=old, new=new: _filled(answer, shape, old, new),
        )
        yield replace(outcome, reason=ONLY_FIRST)  # after a failed case these would fail for the same reason


def _misread_boxes(stored: Sequence[Placed], mine: Box) -> Misreadings:
    def ends(box: Box, own: Box, common: Box) -> tuple[Any, Any, Any]:
        return (*_right_read(box, own, common)[:2], tuple(map(sum, zip(common.offset, common.shape))))

    misread: dict[str, Rule] = {
        "the start inside the stored box counts from the whole tensor; subtract the stored box's offset": (
            lambda box, own, common: (common.offset, _minus(common.offset, own.offset), common.shape)
        ),
        "the start inside my box counts from the whole tensor; subtract my offset": (
            lambda box, own, common: (_minus(common.offset, box.offset), common.offset, common.shape)
        ),
        "both starts count from the whole tensor; subtract from each the offset of its own box": (
            lambda box, own, common: (common.offset, common.offset, common.shape)
        ),
        "the dimensions are in reverse order": lambda *boxes: tuple(part[::-1] for part in _right_read(*boxes)),
        "the last entry is where the overlap ends; give how many elements it has": ends,
    }  # pyright: ignore[reportAssignmentType]
    answers: dict[str, Any] = {reason: _reads(stored, mine, rule) for reason, rule in misread.items()}
    start = (0,) * len(mine.offset)
    answers["every stored box is read from its start, as if it held all of my box; read the overlaps alone"] = [
        (key, start, start, mine.shape) for key, _, _ in stored
    ]
    answers["boxes that only touch mine are read as well; an overlap has an element in every dimension"] = _reads(
        stored, mine, touching=True
    )
    return answers


def _as_list(given: Any) -> Any:
    """Turn a generator into a list, because it is an answer like any other."""
    return list(given) if isinstance(given, Iterator) else given


def _filled(answer: Any, shape: tuple[int, ...], old: Sequence[Placed], new: Sequence[Placed]) -> bool | str:
    """Let every reader copy what the answer says. Return True, or the first element that is wrong, in words."""
    whole = np.arange(math.prod(shape)).reshape(shape)
    boxes = {key: whole[_slices(at, size)] for key, at, size in old}
    for _, offset, size in new:
        held, times = np.full(size, -1), np.zeros(size, int)
        for key, start, own, part in answer([*old], offset, size):
            held[_slices(own, part)] = boxes[key][_slices(start, part)]
            times[_slices(own, part)] += 1
        for place in np.ndindex(*size):
            element = tuple(a + b for a, b in zip(place, offset))
            if times[place] != 1:
                return f"element {list(element)} read {'never' if times[place] == 0 else f'{times[place]} times'}"
            if held[place] != whole[element]:
                return f"element {list(element)} from another place"
    return True


def _slices(start: Iterable[int], shape: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(start, shape))


# ---- the norm of all gradients ----

_GRADIENTS_OF_MODEL = {
    "embedding.word.weight": (0, True, [3.0, -1.0, 2.0, 5.0]),
    "layers.0.norm.weight": (0, False, [2.0, -2.0]),
    "layers.0.fc1.weight": (0, True, [1.0, 4.0, -2.0, 6.0]),
    "layers.1.norm.weight": (1, False, [4.0, 1.0]),
    "layers.1.fc1.weight": (1, True, [-5.0, 2.0, 1.0, 3.0]),
}
"""Name -> (pipeline stage of two, cut over tp, gradient of the whole parameter)."""
TIED = "output.weight"
"""The last stage's copy of the word embedding; after finalisation its gradient equals the embedding's."""

_LAYOUTS = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 2, 2))
"""(tp, pp, dp)."""


def _ranks(tp: int, pp: int, dp: int) -> list[dict[str, Any]]:
    """Return the finalised gradients of every rank, as the exercise gives them."""
    made = []
    for p in range(pp):
        for d in range(dp):
            for t in range(tp):
                parameters = []
                for name, (stage, cut, whole) in _GRADIENTS_OF_MODEL.items():
                    size = len(whole) // tp
                    part = whole[t * size : (t + 1) * size] if cut else whole
                    if stage * (pp - 1) == p:
                        parameters.append({"name": name, "grad": [*part], "cut": cut, "shared": False})
                    if name == "embedding.word.weight" and pp > 1 and p == pp - 1:
                        parameters.append({"name": TIED, "grad": [*part], "cut": True, "shared": True})
                made.append({"tp": t, "pp": p, "dp": d, "parameters": parameters})
    return made


def _squares(
    ranks: Sequence[Mapping[str, Any]], counts: Callable[[Mapping[str, Any], Mapping[str, Any]], bool]
) -> float:
    """Sum the squares of all gradients for which `counts(rank, parameter)` is true."""
    return sum(
        value * value
        for rank in ranks
        for parameter in rank["parameters"]
        if counts(rank, parameter)
        for value in parameter["grad"]
    )


def _first_copy(rank: Mapping[str, Any], parameter: Mapping[str, Any]) -> bool:
    return parameter["cut"] or rank["tp"] == 0


def _counts(rank: Mapping[str, Any], parameter: Mapping[str, Any]) -> bool:
    return rank["dp"] == 0 and _first_copy(rank, parameter) and not parameter["shared"]


@exercise("13.norm", "Write global_norm(ranks) -> the norm of the whole model's gradient, each element counted once.")
def norm(answer: Any) -> Iterator[Outcome]:
    """Judge six layouts of one model, whose norm is the same in all of them."""
    return asked(
        _LAYOUTS,
        given="tp {}, pp {}, dp {}".format,
        right=lambda *layout: math.sqrt(_squares(_ranks(*layout), _counts)),
        tried=lambda *layout: float(answer(_ranks(*layout))),
        misread=lambda *layout: _misread_norms(_ranks(*layout)),
        equal=close(rtol=1e-6),
    )


def _misread_norms(ranks: Sequence[Mapping[str, Any]]) -> Misreadings:
    def root(counts: Callable[[Mapping[str, Any], Mapping[str, Any]], bool]) -> float:
        return math.sqrt(_squares(ranks, counts))

    own = [math.sqrt(_squares([rank], _counts)) for rank in ranks]
    return {
        "this is the largest norm of a rank, and no rank holds all gradients; add up squares over the ranks": math.sqrt(
            max(_squares([rank], lambda rank, p: True) for rank in ranks)
        ),
        "the norms of the ranks are added; add their squares, and take one root at the end": sum(own),
        "this is the sum of squares; the norm is its root": _squares(ranks, _counts),
        "a parameter that every rank of tp holds whole counts tp times; let tp rank 0 count it": root(
            lambda rank, p: rank["dp"] == 0 and not p["shared"]
        ),
        "the tied weight counts twice; leave out the copy that is marked shared": root(
            lambda rank, p: rank["dp"] == 0 and _first_copy(rank, p)
        ),
        "replicas count as well; after the all-reduce every dp rank has the same gradient": root(
            lambda rank, p: _first_copy(rank, p) and not p["shared"]
        ),
        "only global rank 0 counts parameters that are not cut, so those of later stages are missing": root(
            lambda rank, p: rank["dp"] == 0 and not p["shared"] and (p["cut"] or (rank["tp"], rank["pp"]) == (0, 0))
        ),
        "every rank's gradients count, so copies over tp, dp and the tied weight count several times": root(
            lambda rank, p: True
        ),
    }
