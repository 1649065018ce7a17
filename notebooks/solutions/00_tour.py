"""Exercise 00.tour: the layouts that can train a model, and three that somebody might write instead."""

from itertools import product


def solution(ranks: int, layers: int, heads: int, batch: int) -> set[tuple[int, int, int]]:
    """tp divides the heads, pp the layers, dp the samples of a batch, and together they use every rank."""
    sizes = range(1, ranks + 1)
    return {
        (tp, pp, dp)
        for tp, pp, dp in product(sizes, repeat=3)
        if tp * pp * dp == ranks and heads % tp == 0 and layers % pp == 0 and batch % dp == 0
    }


def wrong_1(ranks: int, layers: int, heads: int, batch: int) -> set[tuple[int, int, int]]:
    """Believes that any three factors of the world size will do, whatever they have to divide."""
    sizes = range(1, ranks + 1)
    return {(tp, pp, dp) for tp, pp, dp in product(sizes, repeat=3) if tp * pp * dp == ranks}


def wrong_2(ranks: int, layers: int, heads: int, batch: int) -> set[tuple[int, int, int]]:
    """Believes that dp is chosen freely, so that some ranks may be left without work."""
    sizes = range(1, ranks + 1)
    return {
        (tp, pp, dp)
        for tp, pp, dp in product(sizes, repeat=3)
        if tp * pp * dp <= ranks and heads % tp == 0 and layers % pp == 0 and batch % dp == 0
    }


def wrong_3(ranks: int, layers: int, heads: int, batch: int) -> set[tuple[int, int, int]]:
    """Swaps the axes: cuts the layers by tp and the heads by pp."""
    sizes = range(1, ranks + 1)
    return {
        (tp, pp, dp)
        for tp, pp, dp in product(sizes, repeat=3)
        if tp * pp * dp == ranks and heads % pp == 0 and layers % tp == 0 and batch % dp == 0
    }
