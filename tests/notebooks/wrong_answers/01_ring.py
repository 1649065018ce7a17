"""Chapter 01, exercise `01.ring`: rule(rank, step, ranks) -> (chunk to send, chunk to receive)."""


def wrong_1(rank, step, ranks):
    """Turns the messages round, but not the order in which chunks are visited."""
    return (rank - step - 1) % ranks, (rank - step - 2) % ranks


def wrong_2(rank, step, ranks):
    """Begins with the own chunk, so that rank r ends the first half with the sum of another chunk."""
    return (rank + step) % ranks, (rank + step + 1) % ranks


def wrong_3(rank, step, ranks):
    """Lets the second half begin anew at step 0, with a chunk that is no complete sum."""
    return solution(rank, step % max(1, ranks - 1), ranks)
