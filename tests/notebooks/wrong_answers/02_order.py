"""Chapter 02, exercise `02.order`: order_for(inner, outer) -> an order string for tp 4, dp 2, pp 4 on nodes of 8."""


def wrong_1(inner, outer):
    """Believes that the usual order is right whatever is asked for."""
    return "tp-cp-ep-dp-pp"


def wrong_2(inner, outer):
    """Reads the order string from the slowest axis on."""
    return "-".join(reversed(solution(inner, outer).split("-")))


def wrong_3(inner, outer):
    """Puts the outer axis second: with a small inner size its groups still fit into a node."""
    middle = next(axis for axis in ("tp", "dp", "pp") if axis not in (inner, outer))
    return f"{inner}-{outer}-{middle}"
