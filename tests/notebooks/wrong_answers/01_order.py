"""Chapter 01, exercise `01.order`: order(rank, ranks) -> 'send' and 'recv' in an order that cannot hang."""


def wrong_1(rank, ranks):
    """Lets everybody send first: each send waits for a receive that comes after another send."""
    return ["send", "recv"]


def wrong_2(rank, ranks):
    """Lets everybody receive first, as if being ready to receive could not block."""
    return ["recv", "send"]


def wrong_3(rank, ranks):
    """Breaks the circle at rank 0 alone: no hang, but each rank waits for the rank after it."""
    return ["recv", "send"] if rank == 0 else ["send", "recv"]
