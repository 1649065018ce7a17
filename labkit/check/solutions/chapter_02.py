"""Solutions of chapter 02, Rank groups."""

from math import prod

from labkit.check.solution_source import solves


@solves("02.digits")
def digits(rank, order, sizes):
    found, stride = {}, 1
    for axis in order.split("-"):
        found[axis] = rank // stride % sizes[axis]
        stride *= sizes[axis]
    return found


def digits_of(rank, order, sizes):
    axes = order.split("-")
    strides = [prod(sizes[axis] for axis in axes[:place]) for place in range(len(axes))]
    return {axis: rank // stride % sizes[axis] for axis, stride in zip(axes, strides)}


@solves("02.groups")
def groups_of(order, sizes, token):
    groups = {}
    for rank in range(prod(sizes.values())):
        own = digits_of(rank, order, sizes)
        staying = tuple(own[axis] for axis in own if axis not in token.split("-"))
        groups.setdefault(staying, []).append(rank)
    return list(groups.values())


@solves("02.order")
def order_for(inner, outer):
    middle = next(axis for axis in ("tp", "dp", "pp") if axis not in (inner, outer))
    return f"{inner}-{middle}-{outer}"
