"""Chapter 02, exercise `02.groups`: groups_of(order, sizes, token) -> the list of groups."""

from itertools import product


def _strides(order: list[str], sizes: dict[str, int]) -> dict[str, int]:
    strides, stride = {}, 1
    for axis in order:
        strides[axis] = stride
        stride *= sizes[axis]
    return strides


def _offsets(axes: list[str], sizes: dict[str, int], strides: dict[str, int]) -> list[int]:
    """Ranks relative to the first one, for all digits of `axes`, the first axis fastest."""
    digits = product(*(range(sizes[axis]) for axis in reversed(axes)))
    return [sum(d * strides[axis] for d, axis in zip(row, reversed(axes))) for row in digits]


def solution(order: str, sizes: dict[str, int], token: str) -> list[list[int]]:
    """Digits of the token vary inside a group, all others number the groups; both count the fastest digit first."""
    axes = order.split("-")
    strides = _strides(axes, sizes)
    inside = [axis for axis in axes if axis in token.split("-")]
    outside = [axis for axis in axes if axis not in inside]
    members = _offsets(inside, sizes, strides)
    return [[first + member for member in members] for first in _offsets(outside, sizes, strides)]


def wrong_1(order: str, sizes: dict[str, int], token: str) -> list[list[int]]:
    """Reads the order string from the slowest to the fastest axis."""
    return solution("-".join(reversed(order.split("-"))), sizes, token)


def wrong_2(order: str, sizes: dict[str, int], token: str) -> list[list[int]]:
    """Takes every group for a block of consecutive ranks, as if each axis had stride 1."""
    group_size = world = 1
    for axis, size in sizes.items():
        world *= size
        group_size *= size if axis in token.split("-") else 1
    return [list(range(first, first + group_size)) for first in range(0, world, group_size)]


def wrong_3(order: str, sizes: dict[str, int], token: str) -> list[list[int]]:
    """Numbers the members of a group by the token and the slowest axis first, not by the order string."""
    axes = order.split("-")
    strides = _strides(axes, sizes)
    inside = list(reversed([axis for axis in axes if axis in token.split("-")]))
    outside = [axis for axis in axes if axis not in inside]
    members = _offsets(inside, sizes, strides)
    return [[first + member for member in members] for first in _offsets(outside, sizes, strides)]
