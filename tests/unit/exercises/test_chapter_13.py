"""Wrong answers to the exercises of chapter 13, with what each believes and words of its score."""

import math

import pytest

from labkit.check import score
from labkit.check.chapter_13 import SMALLEST, SMALLEST_NORMAL


def half(value):
    """A number as fp16 rounds it."""
    import torch

    return torch.tensor(value, dtype=torch.float64).half().item()


def places(condition):
    """An answer to 13.lost from a condition on (gradient, scale)."""
    return lambda gradients, scale: [i for i, g in enumerate(gradients) if condition(g, scale)]


def is_lost(gradient, scale):
    return gradient != 0 and half(gradient * scale) in (0, math.inf, -math.inf)


LOST = {
    # Takes fp16's smallest normal number for its smallest number, and forgets the subnormal ones below.
    "smallest number": (
        places(lambda g, s: 0 < abs(g * s) < SMALLEST_NORMAL or abs(g * s) > 65504),
        "subnormal numbers reach down to 6e-08",
    ),
    "half of the smallest": (places(lambda g, s: 0 < abs(g * s) < SMALLEST or abs(g * s) >= 65520), "rounds up to it"),
    # Looks at small gradients only: a scale that is too large makes the others infinite.
    "no overflow": (places(lambda g, s: g != 0 and half(g * s) == 0), "forgets the other end"),
    # Rounds first and multiplies afterwards: that scales numbers which fp16 has lost already.
    "no scale": (places(lambda g, s: is_lost(g, 1.0)), "leaves the scale out"),
    "zeros": (places(lambda g, s: g == 0 or is_lost(g, s)), "that were 0 from the start"),
    "sign": (places(lambda g, s: g != 0 and (half(g * s) == 0 or g * s > 65504)), "without the sign"),
}


def overlaps(stored, offset, shape, least=1):
    for key, at, size in stored:
        first = tuple(map(max, at, offset))
        ends = tuple(min(a + n, b + m) for a, n, b, m in zip(at, size, offset, shape))
        if all(end - start >= least for end, start in zip(ends, first)):
            yield key, at, first, ends


def minus(a, b):
    return tuple(x - y for x, y in zip(a, b))


def reading(make, least=1):
    """An answer to 13.reads from (stored offset, own offset, first element, end of the overlap) -> three tuples."""

    def reads(stored, offset, shape):
        return [(key, *make(at, offset, a, b)) for key, at, a, b in overlaps(stored, offset, shape, least)]

    return reads


right = reading(lambda at, mine, first, ends: (minus(first, at), minus(first, mine), minus(ends, first)))
READS = {
    "whole boxes": (
        lambda stored, offset, shape: [(key, (0,) * len(shape), (0,) * len(shape), shape) for key, _, _ in stored],
        "as if it held all of my box",
    ),
    # Forgets that a file holds a box, not the whole tensor: its first element is not element 0.
    "stored offset": (
        reading(lambda at, mine, first, ends: (first, minus(first, mine), minus(ends, first))),
        "subtract the stored box's offset",
    ),
    "own offset": (
        reading(lambda at, mine, first, ends: (minus(first, at), first, minus(ends, first))),
        "subtract my offset",
    ),
    "both offsets": (reading(lambda at, mine, first, ends: (first, first, minus(ends, first))), "from each the offset"),
    # Gives columns before rows, as a picture's x and y, where a tensor's shape begins with its rows.
    "reversed": (
        lambda *case: [(key, *(part[::-1] for part in parts)) for key, *parts in right(*case)],
        "dimensions are in reverse order",
    ),
    # Reads boxes that only touch its own: an overlap of no element is none.
    "touching": (
        reading(lambda at, mine, first, ends: (minus(first, at), minus(first, mine), minus(ends, first)), least=0),
        "boxes that only touch mine",
    ),
    "ends": (
        reading(lambda at, mine, first, ends: (minus(first, at), minus(first, mine), ends)),
        "where the overlap ends",
    ),
}


def norm_of(counts):
    """An answer to 13.norm that counts the parameters for which `counts(rank, parameter)` is true."""
    return lambda ranks: math.sqrt(
        sum(g * g for rank in ranks for p in rank["parameters"] if counts(rank, p) for g in p["grad"])
    )


def once(rank, p):
    return rank["dp"] == 0 and not p["shared"] and (p["cut"] or rank["tp"] == 0)


NORMS = {
    "largest": (
        lambda ranks: max(norm_of(lambda rank, p: True)([rank]) for rank in ranks),
        "the largest norm of a rank",
    ),
    # Adds the ranks' norms: lengths of pieces that stand at right angles add up as squares.
    "norms added": (lambda ranks: sum(norm_of(once)([rank]) for rank in ranks), "add their squares"),
    "no root": (lambda ranks: norm_of(once)(ranks) ** 2, "the norm is its root"),
    # Lets every rank of tp count the norms' weights, which all of them hold whole and alike.
    "copies over tp": (norm_of(lambda rank, p: rank["dp"] == 0 and not p["shared"]), "let tp rank 0 count it"),
    # Forgets the tied weight: first and last stage have one matrix and one gradient, and both count it.
    "tied": (
        norm_of(lambda rank, p: rank["dp"] == 0 and (p["cut"] or rank["tp"] == 0)),
        "the copy that is marked shared",
    ),
    "replicas": (
        norm_of(lambda rank, p: not p["shared"] and (p["cut"] or rank["tp"] == 0)),
        "every dp rank has the same",
    ),
    "rank 0 alone": (
        norm_of(lambda rank, p: rank["dp"] == 0 and not p["shared"] and (p["cut"] or rank["tp"] == rank["pp"] == 0)),
        "those of later stages are missing",
    ),
    "all": (norm_of(lambda rank, p: True), "count several times"),
}

TABLES = {"13.lost": LOST, "13.reads": READS, "13.norm": NORMS}
RIGHT = {"13.lost": places(is_lost), "13.reads": right, "13.norm": norm_of(once)}


@pytest.mark.parametrize(
    ("gradient", "lost"), [(SMALLEST / 2, True), (SMALLEST / 2 * 1.01, False), (65519.0, False), (65520.0, True)]
)
def test_the_limits_are_those_of_fp16(gradient, lost):
    from labkit.check import chapter_13

    assert chapter_13._lost([gradient, -gradient], 1.0) == ([0, 1] if lost else [])
    assert is_lost(gradient, 1.0) == lost


def test_reads_may_come_in_any_order_from_a_generator():
    assert score("13.reads", lambda *case: reversed(right(*case))).ok


def test_an_answer_that_reads_an_element_twice_is_told_so():
    twice = score("13.reads", lambda *case: [*right(*case), *right(*case)])
    assert twice.passed == 0 and twice.outcomes[-1].got.endswith("read 2 times")
    assert score("13.reads", lambda *case: []).outcomes[-1].got.endswith("read never")
