"""Solutions of chapter 02, Rank groups."""

from math import prod

from labkit.check.solution_source import solves


@solves("02.digits")
def digits(rank, order, sizes):
    """The digit of each axis: the rank over the sizes of all faster axes, modulo its own size."""
    found, stride = {}, 1
    for axis in order.split("-"):
        found[axis] = rank // stride % sizes[axis]
        stride *= sizes[axis]
    return found


def digits_of(rank, order, sizes):
    """The digits of a rank by axis, from the stride of each axis."""
    axes = order.split("-")
    strides = [prod(sizes[axis] for axis in axes[:place]) for place in range(len(axes))]
    return {axis: rank // stride % sizes[axis] for axis, stride in zip(axes, strides)}


@solves("02.groups")
def groups_of(order, sizes, token):
    """The groups in the order of their first ranks: ranks whose digits outside the token agree."""
    groups = {}
    for rank in range(prod(sizes.values())):
        own = digits_of(rank, order, sizes)
        staying = tuple(own[axis] for axis in own if axis not in token.split("-"))
        groups.setdefault(staying, []).append(rank)
    return list(groups.values())


@solves("02.place")
def place(samples):
    """The digits of each GPU's rank, node after node, with the fewest bytes between nodes."""
    if samples < 16:  # few microbatches: gradients first, so dp is the fastest axis
        return [digits(gpu, "dp-tp-pp", {"tp": 4, "dp": 2, "pp": 2}) for gpu in range(16)]
    # (dp, pp) of whole tp groups. One digit changes at a time, as in a Gray code, so the second
    # group, which is cut, has its copy on its first node and its other stage on its second.
    groups = [(0, 0), (1, 0), (1, 1), (0, 1)]
    return [{"tp": t, "dp": d, "pp": p} for d, p in groups for t in range(4)]
