"""Chapter 02, exercise `02.groups`: groups_of(order, sizes, token) -> the list of groups."""


def wrong_1(order, sizes, token):
    """Reads the order string from the slowest to the fastest axis."""
    return solution("-".join(reversed(order.split("-"))), sizes, token)


def wrong_2(order, sizes, token):
    """Takes every group for a block of consecutive ranks, as if each axis had stride 1."""
    group_size = world = 1
    for axis, size in sizes.items():
        world *= size
        group_size *= size if axis in token.split("-") else 1
    return [list(range(first, first + group_size)) for first in range(0, world, group_size)]


def wrong_3(order, sizes, token):
    """Lets the other digits vary and keeps those of the token: eight dp groups of two become two groups of eight."""
    others = [axis for axis in order.split("-") if axis not in token.split("-")]
    return solution(order, sizes, "-".join(others))
