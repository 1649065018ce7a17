"""Solutions of chapter 01, Collectives."""

from labkit.check.solution_source import solves


@solves("01.ring")
def rule(rank, step, g):
    """The chunks that a rank sends and receives: each minus of to_next becomes a plus."""
    return (rank + step + 1) % g, (rank + step + 2) % g


@solves("01.seconds")
def seconds(g, size, latency, bandwidth):
    """The seconds of the ring, and those of doubling: steps times the time of one."""
    doubling_steps = (g - 1).bit_length()  # log2 of a power of two
    ring = 2 * (g - 1) * (latency + size / g / bandwidth)
    return ring, doubling_steps * (latency + size / bandwidth)


@solves("01.order")
def order(rank, g):
    """The two operations in the order of this rank: neighbours differ."""
    return ["send", "recv"] if rank % 2 == 0 else ["recv", "send"]
