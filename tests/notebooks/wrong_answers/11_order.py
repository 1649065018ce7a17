"""Chapter 11, exercise `11.order`: order(pp, vpp, microbatches, group_size, rank) -> the signed order of one rank."""


def wrong_1(pp, vpp, microbatches, group_size, rank):
    """Takes 1F1B's warm-up of p - r - 1 without the factor 2: it runs, but no message has any time."""
    chunks = _chunks(vpp, microbatches, group_size)
    return _ordered(chunks, [chunk - vpp for chunk in chunks], pp - rank - 1 + (vpp - 1) * group_size)


def wrong_2(pp, vpp, microbatches, group_size, rank):
    """Believes that backwards visit the chunks in the order of the forwards: gradients come from the last one first."""
    chunks = _chunks(vpp, microbatches, group_size)
    return _ordered(chunks, [-chunk - 1 for chunk in chunks], 2 * (pp - rank - 1) + (vpp - 1) * group_size)


def wrong_3(pp, vpp, microbatches, group_size, rank):
    """Takes all microbatches through a chunk before the next one, whatever the group size says."""
    chunks = _chunks(vpp, microbatches, microbatches)
    return _ordered(chunks, [chunk - vpp for chunk in chunks], 2 * (pp - rank - 1) + (vpp - 1) * group_size)
