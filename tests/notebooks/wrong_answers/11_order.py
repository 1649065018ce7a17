"""Chapter 11, exercise `11.order`: order(pp, vpp, groups, rank) -> the signed order of one rank."""


def _row(pp, vpp, groups, rank, each, size):
    """The solution with another warm-up: `each` forwards for every rank behind, and a group of `size`."""
    chunks = _chunks(vpp, groups)
    return _ordered([c + 1 for c in chunks], [c - vpp for c in chunks], each * (pp - rank - 1) + (vpp - 1) * size)


def wrong_1(pp, vpp, groups, rank):
    """Takes 1F1B's warm-up of p - r - 1 without the factor 2: it runs, but no message has any time."""
    return _row(pp, vpp, groups, rank, 1, max(groups))


def wrong_2(pp, vpp, groups, rank):
    """Believes that the first group decides: its microbatches are the first to come back."""
    return _row(pp, vpp, groups, rank, 2, groups[0])


def wrong_3(pp, vpp, groups, rank):
    """Believes that backwards visit the chunks in the order of the forwards: gradients come from the last one first."""
    chunks = _chunks(vpp, groups)
    return _ordered([c + 1 for c in chunks], [-c - 1 for c in chunks], 2 * (pp - rank - 1) + (vpp - 1) * max(groups))
