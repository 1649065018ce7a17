"""Solutions of chapter 01, Collectives."""

from labkit.check.solution_source import solves


@solves("01.ring")
def rule(rank, step, ranks):  # each minus of to_next becomes a plus
    return (rank + step + 1) % ranks, (rank + step + 2) % ranks


@solves("01.seconds")
def seconds(ranks, size, latency, bandwidth):
    doubling_steps = (ranks - 1).bit_length()  # log2 of a power of two
    ring = 2 * (ranks - 1) * (latency + size / ranks / bandwidth)
    return ring, doubling_steps * (latency + size / bandwidth)


@solves("01.order")
def order(rank, ranks):  # neighbours differ
    return ["send", "recv"] if rank % 2 == 0 else ["recv", "send"]
