"""Chapter 11, exercise `11.early`: too_early(order, vpp) -> position of the first early entry, or None."""

from collections import Counter


def _first(order, needed):
    count = Counter()
    for position, signed in enumerate(order):
        count[signed] += 1
        if needed(signed) and count[signed] > count[needed(signed)]:
            return position
    return None


def wrong_1(order, vpp):
    """Holds a backward against its own forward alone, and forgets the path through the other chunks."""
    return _first(order, lambda signed: 0 if signed > 0 else -signed)


def wrong_2(order, vpp):
    """Believes that gradients reach the first chunk first, as activations do."""
    return _first(order, lambda signed: signed - 1 if signed > 0 else signed + 1 or 1)


def wrong_3(order, vpp):
    """Trusts counts: if each chunk runs equally often forward and backward, the order must run."""
    return len(order) if sum(order) else None
