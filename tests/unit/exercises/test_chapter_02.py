"""Wrong answers to the exercises of chapter 02, with what each believes and words of its score."""

from itertools import combinations
from math import prod

import numpy as np
import pytest

from labkit.check import chapter_02, score
from labkit.check.solutions.chapter_02 import place


def digits(value):
    """An answer from (rank, stride, size) -> digit."""

    def answer(rank, order, sizes):
        found, stride = {}, 1
        for axis in order.split("-"):
            found[axis] = value(rank, stride, sizes[axis])
            stride *= sizes[axis]
        return found

    return answer


right_digits = digits(lambda rank, stride, size: rank // stride % size)


def right_groups(order, sizes, token):
    found = {}
    for rank in range(prod(sizes.values())):
        own = right_digits(rank, order, sizes)
        found.setdefault(tuple(own[a] for a in own if a not in token.split("-")), []).append(rank)
    return list(found.values())


def backwards(order):
    return "-".join(reversed(order.split("-")))


def blocks(order, sizes, token):
    size = prod(sizes[axis] for axis in token.split("-"))
    return [list(range(first, first + size)) for first in range(0, prod(sizes.values()), size)]


DIGITS = {
    # Reads the order string from the end, as a written number has its slowest digit first.
    "reversed": (lambda r, o, s: right_digits(r, backwards(o), s), "reads it from the end"),
    # Divides by the stride, but keeps the slower digits in the result.
    "no rest": (digits(lambda rank, stride, size: rank // stride), "the remainder of the division"),
    # Takes the remainder by the size, and forgets that slower digits have a stride.
    "no stride": (digits(lambda rank, stride, size: rank % size), "the division by the stride is missing"),
    "powers of two": (
        lambda rank, order, sizes: {a: rank // 2**place % sizes[a] for place, a in enumerate(order.split("-"))},
        "not 2 for each of them",
    ),
    "strides": (digits(lambda rank, stride, size: stride), "these are the strides"),
}
GROUPS = {
    # Takes every group for a block of consecutive ranks, as if each axis had stride 1.
    "blocks": (blocks, "a block of neighbours"),
    "reversed": (lambda o, s, t: right_groups(backwards(o), s, t), "reads it from the end"),
    # Lets the other digits vary and keeps those of the token: eight dp groups of two become two groups of eight.
    "others": (
        lambda o, s, t: right_groups(o, s, "-".join(a for a in o.split("-") if a not in t.split("-")) or o),
        "the groups of the other axes",
    ),
}


def by_order(order):
    return lambda samples: chapter_02.by_order(order)


def in_blocks(*places):
    return lambda samples: chapter_02.in_blocks(places)


def cut_apart(samples):
    """Whole groups in the best sequence, but the cut one has its digits 0 and 2 on one node, 1 and 3 on the other."""
    made = chapter_02.in_blocks([(0, 0), (1, 0), (1, 1), (0, 1)])
    made[5], made[6] = made[6], made[5]
    return made


PLACES = {
    # Believes that stages should be neighbours, because each talks to the next.
    "stages first": (by_order("pp-dp-tp"), "4 of the 4 tp groups are cut"),
    # Believes that the usual order is right for any batch and any nodes.
    "usual": (by_order("tp-dp-pp"), "a link of a dp ring carries nearly as much"),
    # Uses the order of few samples for many of them, too.
    "copies first": (by_order("dp-tp-pp"), "and three whole ones fit into these nodes"),
    "stages before copies": (by_order("tp-pp-dp"), "the cut tp group has GPUs on two nodes, and its copy"),
    "counting order": (in_blocks((0, 0), (1, 0), (0, 1), (1, 1)), "the other stage of the cut group"),
    # Cuts one group only, but in the middle of two pairs of its ring.
    "ring apart": (cut_apart, "leaves a node 4 times"),
    "few samples, tp apart": (by_order("dp-pp-tp"), "the rings of tp leave a node 12 times, and 8 is possible"),
    "one copy twice": (in_blocks(*[(0, 0)] * 4), "none with {'tp': 0, 'dp': 0, 'pp': 1}"),
}
TABLES = {"02.digits": DIGITS, "02.groups": GROUPS, "02.place": PLACES}


def test_failed_groups_name_order_sizes_and_token():
    found = score("02.groups", lambda order, sizes, token: None)
    assert "Given order 'pp-dp-tp', sizes {'tp': 3, 'dp': 2, 'pp': 2} and token 'tp', expected" in repr(found)


def test_no_placement_of_16_ranks_beats_the_last_rung():
    """All 1,681,680 ways to put ranks t + 4 d + 8 p on nodes of 6, 6 and 4."""
    first = np.array([[rank in chosen for rank in range(16)] for chosen in combinations(range(16), 6)])
    second = np.array([[place in chosen for place in range(10)] for chosen in combinations(range(10), 6)])
    counts = set()
    for on_first in first:
        node_of = np.zeros((len(second), 16), dtype=np.int8)
        node_of[:, ~on_first] = 2 - second.astype(np.int8)
        ranks = node_of.reshape(-1, 2, 2, 4)  # [., pp, dp, tp]
        tp = (ranks != np.roll(ranks, -1, 3)).sum((1, 2, 3))
        dp = 2 * (ranks[:, :, 0] != ranks[:, :, 1]).sum((1, 2))
        pp = (ranks[:, 0] != ranks[:, 1]).sum((1, 2))
        counts |= set(np.unique(tp * 10_000 + dp * 100 + pp).tolist())
    activation, gradients = 1024 * 3072 * 2, 12 * 72 * 3072**2 / 8 * 4
    for samples in (512, 8):
        link = samples // 2 * 36 * 4 * 1.5 * activation, gradients, samples // 2 * 2 * activation
        every = (np.dot(link, (each // 10_000, each // 100 % 100, each % 100)) / 1e9 for each in counts)
        least, (string, blocks) = min(every), chapter_02.fewest(samples)
        if samples == 512:
            assert blocks == pytest.approx(least)
        else:
            assert string == pytest.approx(least, rel=0.004), "no order string is worth leaving for so little"


def test_the_solution_meets_every_rung_and_a_wrong_answer_is_drawn():
    assert score("02.place", place).ok
    drawn = chapter_02.draw_place(by_order("pp-dp-tp"))
    assert drawn is not None and "yours for 512 samples: 4,191.0 GB, 4 of 4 tp groups" in drawn.sentence
    assert chapter_02.draw_place(lambda samples: chapter_02.in_blocks([(0, 0)] * 4)) is None
