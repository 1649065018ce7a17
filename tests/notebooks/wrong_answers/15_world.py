"""Chapter 15, exercise `15.world`: the fewest ranks that hold a folded layout."""

from math import lcm


def wrong_1(tp, cp, pp, etp, ep):
    """Does not fold: gives every axis ranks of its own, as if experts knew who holds which part of a sequence."""
    return tp * cp * ep * pp


def wrong_2(tp, cp, pp, etp, ep):
    """Takes the larger of the two products, which is right only where the smaller one divides it."""
    return pp * max(tp * cp, etp * ep)


def wrong_3(tp, cp, pp, etp, ep):
    """Folds the experts over the pipeline too, though a stage has experts of its own layers."""
    return lcm(tp * cp * pp, etp * ep)
