"""Chapter 15, exercise `15.world`: the fewest ranks that hold a folded layout."""

from math import lcm


def solution(tp: int, cp: int, pp: int, etp: int, ep: int) -> int:
    """A stage must be a whole number of attention's copies and of the experts' copies; there are pp of them."""
    return pp * lcm(tp * cp, etp * ep)


def wrong_1(tp: int, cp: int, pp: int, etp: int, ep: int) -> int:
    """Does not fold: gives every axis ranks of its own, as if experts knew who holds which part of a sequence."""
    return tp * cp * ep * pp


def wrong_2(tp: int, cp: int, pp: int, etp: int, ep: int) -> int:
    """Takes the larger of the two products, which is right only where the smaller one divides it."""
    return pp * max(tp * cp, etp * ep)


def wrong_3(tp: int, cp: int, pp: int, etp: int, ep: int) -> int:
    """Folds the experts over the pipeline too, though a stage has experts of its own layers."""
    return lcm(tp * cp * pp, etp * ep)
