"""Wrong answers to the exercises of chapter 02, with what each believes and words of its score."""

from math import prod

from labkit.check import score


def digits(value):
    """An answer from (rank, stride, size) -> digit."""

    def answer(rank, order, sizes):
        found, stride = {}, 1
        for axis in order.split("-"):
            found[axis] = value(rank, stride, sizes[axis])
            stride *= sizes[axis]
        return found

    return answer


right_digits = digits(lambda rank, stride, size: rank // stride % size)


def right_groups(order, sizes, token):
    found = {}
    for rank in range(prod(sizes.values())):
        own = right_digits(rank, order, sizes)
        found.setdefault(tuple(own[a] for a in own if a not in token.split("-")), []).append(rank)
    return list(found.values())


def backwards(order):
    return "-".join(reversed(order.split("-")))


def blocks(order, sizes, token):
    size = prod(sizes[axis] for axis in token.split("-"))
    return [list(range(first, first + size)) for first in range(0, prod(sizes.values()), size)]


DIGITS = {
    # Reads the order string from the end, as a written number has its slowest digit first.
    "reversed": (lambda r, o, s: right_digits(r, backwards(o), s), "reads it from the end"),
    # Divides by the stride, but keeps the slower digits in the result.
    "no rest": (digits(lambda rank, stride, size: rank // stride), "the remainder of the division"),
    # Takes the remainder by the size, and forgets that slower digits have a stride.
    "no stride": (digits(lambda rank, stride, size: rank % size), "the division by the stride is missing"),
    "powers of two": (
        lambda rank, order, sizes: {a: rank // 2**place % sizes[a] for place, a in enumerate(order.split("-"))},
        "not 2 for each of them",
    ),
    "strides": (digits(lambda rank, stride, size: stride), "these are the strides"),
}
GROUPS = {
    # Takes every group for a block of consecutive ranks, as if each axis had stride 1.
    "blocks": (blocks, "a block of neighbours"),
    "reversed": (lambda o, s, t: right_groups(backwards(o), s, t), "reads it from the end"),
    # Lets the other digits vary and keeps those of the token: eight dp groups of two become two groups of eight.
    "others": (
        lambda o, s, t: right_groups(o, s, "-".join(a for a in o.split("-") if a not in t.split("-")) or o),
        "the groups of the other axes",
    ),
}


def ordered(place):
    """An answer that lists inner, middle and outer axis by `place`."""

    def order_for(inner, outer):
        middle = next(axis for axis in ("tp", "dp", "pp") if axis not in (inner, outer))
        return "-".join(place(inner, middle, outer))

    return order_for


ORDERS = {
    # Believes that the usual order is right whatever is asked for.
    "usual": (lambda inner, outer: "tp-cp-ep-dp-pp", "pp has stride 8 and size 4"),
    "reversed": (ordered(lambda *axes: axes[::-1]), "tp has stride 8 and size 4 and pp has stride 1"),
    # Puts the outer axis second: with a small inner size, its groups still fit into a node.
    "outer second": (ordered(lambda inner, middle, outer: (inner, outer, middle)), "pp has stride 2 and size 4"),
}
TABLES = {"02.digits": DIGITS, "02.groups": GROUPS, "02.order": ORDERS}


def test_failed_groups_name_order_sizes_and_token():
    found = score("02.groups", lambda order, sizes, token: None)
    assert "Given order 'pp-dp-tp', sizes {'tp': 3, 'dp': 2, 'pp': 2} and token 'tp', expected" in repr(found)
