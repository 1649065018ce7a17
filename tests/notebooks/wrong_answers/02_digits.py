"""Chapter 02, exercise `02.digits`: digits(rank, order, sizes) -> the digit of each axis."""


def wrong_1(rank, order, sizes):
    """Reads the order string from the end, as a written number has its slowest digit first."""
    return solution(rank, "-".join(reversed(order.split("-"))), sizes)


def wrong_2(rank, order, sizes):
    """Takes the rest of a division by the size, and forgets that slower digits have a stride."""
    return {axis: rank % sizes[axis] for axis in order.split("-")}


def wrong_3(rank, order, sizes):
    """Divides by the stride, but keeps the slower digits in the result."""
    found, stride = {}, 1
    for axis in order.split("-"):
        found[axis] = rank // stride
        stride *= sizes[axis]
    return found
