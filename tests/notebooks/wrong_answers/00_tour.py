"""Exercise `00.tour`: layouts(ranks, layers, heads, batch) -> the set of (tp, pp, dp) that can train the model."""

from itertools import product


def triples(ranks):
    return product(range(1, ranks + 1), repeat=3)


def wrong_1(ranks, layers, heads, batch):
    """Believes that any three factors of the world size will do, whatever they have to divide."""
    return {(tp, pp, dp) for tp, pp, dp in triples(ranks) if tp * pp * dp == ranks}


def wrong_2(ranks, layers, heads, batch):
    """Believes that dp is chosen freely, so that some ranks may be left without work."""
    return {
        (tp, pp, dp)
        for tp, pp, dp in triples(ranks)
        if tp * pp * dp <= ranks and heads % tp == 0 and layers % pp == 0 and batch % dp == 0
    }


def wrong_3(ranks, layers, heads, batch):
    """Swaps the axes: cuts the layers by tp and the heads by pp."""
    return {
        (tp, pp, dp)
        for tp, pp, dp in triples(ranks)
        if tp * pp * dp == ranks and heads % pp == 0 and layers % tp == 0 and batch % dp == 0
    }
