"""Chapter 01, exercise `01.seconds`: seconds(ranks, size, latency, bandwidth) -> (of a ring, of doubling)."""

from math import log2


def wrong_1(ranks, size, latency, bandwidth):
    """Counts the latency once for the whole collective, as if messages did not wait for each other."""
    ring = latency + 2 * (ranks - 1) * size / ranks / bandwidth
    return ring, latency + log2(ranks) * size / bandwidth


def wrong_2(ranks, size, latency, bandwidth):
    """Forgets the all-gather, the second half of the ring."""
    ring, doubling = solution(ranks, size, latency, bandwidth)
    return ring / 2, doubling


def wrong_3(ranks, size, latency, bandwidth):
    """Sends the whole tensor in each step of the ring, and a chunk in each step of doubling."""
    ring = 2 * (ranks - 1) * (latency + size / bandwidth)
    return ring, log2(ranks) * (latency + size / ranks / bandwidth)
