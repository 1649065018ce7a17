"""Chapter 15, exercise `15.safe`: order strings for which attention and experts have the same pipelines."""


def wrong_1(order, world, tp, cp, pp, etp, ep):
    """Asks for equal numbers of copies, dp and edp, which say nothing about the stride of pp."""
    return tp * cp == etp * ep


def wrong_2(order, world, tp, cp, pp, etp, ep):
    """Believes that one order string is one numbering, so that any order is safe."""
    return True


def wrong_3(order, world, tp, cp, pp, etp, ep):
    """Lets pp stand at either end alone: pp in the middle is taken for a mistake, whatever the sizes are."""
    return order.startswith("pp") or order.endswith("pp")
