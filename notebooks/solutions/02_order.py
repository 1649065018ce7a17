"""Chapter 02, exercise `02.order`: order_for(inner, outer) -> an order string for tp 4, dp 2, pp 4 on nodes of 8."""


def solution(inner: str, outer: str) -> str:
    """Fastest first: the inner axis gets stride 1, the outer one the largest stride."""
    middle = next(axis for axis in ("tp", "dp", "pp") if axis not in (inner, outer))
    return f"{inner}-{middle}-{outer}"


def wrong_1(inner: str, outer: str) -> str:
    """Believes that the usual order is right whatever is asked for."""
    return "tp-cp-ep-dp-pp"


def wrong_2(inner: str, outer: str) -> str:
    """Reads the order string from the slowest axis on."""
    return "-".join(reversed(solution(inner, outer).split("-")))


def wrong_3(inner: str, outer: str) -> str:
    """Puts the outer axis second: with a small inner size its groups still fit into a node."""
    middle = next(axis for axis in ("tp", "dp", "pp") if axis not in (inner, outer))
    return f"{inner}-{outer}-{middle}"
