"""Wrong answers to the exercises of chapter 01, with what each believes and words of its score."""

from math import log2

from labkit.check import exercises, score


def right_rule(r, s, g):
    return (r + s + 1) % g, (r + s + 2) % g


RING = {
    # Reverses the messages, but not the order in which chunks are visited.
    "to the next": (lambda r, s, g: ((r - s - 1) % g, (r - s - 2) % g), "the direction is reversed"),
    # Begins with the own chunk, so that rank r ends the first half with the sum of another chunk.
    "shifted": (lambda r, s, g: ((r + s) % g, (r + s + 1) % g), "begin one chunk further"),
    "constant": (lambda r, s, g: ((r + 1) % g, (r + 2) % g), "every step sends the same chunk"),
    "own receive": (lambda r, s, g: ((r + s + 1) % g, (r + s) % g), "one further than its own"),
    # Lets the second half begin anew at step 0, with a chunk that is no complete sum.
    "anew": (lambda r, s, g: right_rule(r, s % max(1, g - 1), g), "the step number runs on"),
    "no circle": (lambda r, s, g: (r + s + 1, r + s + 2), "so count in a circle"),
    "no pair": (lambda r, s, g: r, "which is not (chunk to send, chunk to receive)"),
    "two steps": (lambda r, s, g: ((r + 2 * s + 1) % g, (r + 2 * s + 2) % g), "is twice in that chunk of rank 0"),
}
ORDER = {
    # Lets everybody send first: each send waits for a receive that comes after another send.
    "all send": (lambda r, g: ["send", "recv"], "rank 3 to 0), and nobody receives"),
    # Lets everybody receive first, as if being ready to receive could not block.
    "all receive": (lambda r, g: ["recv", "send"], "4 of 4 ranks wait for a message that nobody has sent"),
    # Breaks the circle at rank 0 alone: no hang, but each rank waits for the rank after it.
    "chain": (lambda r, g: ["recv", "send"] if r == 0 else ["send", "recv"], "no hang, but 4 rounds"),
    "twice": (lambda r, g: ["send", "send"], "each once"),
}


def times(ring=None, doubling=None):
    """Right times but for what is given: a function of (g, size, latency, bandwidth)."""

    def seconds(g, size, latency, bandwidth):
        first = 2 * (g - 1) * (latency + size / g / bandwidth) if ring is None else ring(g, size, latency, bandwidth)
        whole = log2(g) * (latency + size / bandwidth) if doubling is None else doubling(g, size, latency, bandwidth)
        return first, whole

    return seconds


SECONDS = {
    "one message": (times(ring=lambda g, n, a, b: a + n / b), "the ring sends 2 (g - 1) of them"),
    # Forgets the all-gather, the second half of the ring.
    "half": (times(ring=lambda g, n, a, b: (g - 1) * (a + n / g / b)), "this is one half"),
    "g steps": (times(ring=lambda g, n, a, b: 2 * g * (a + n / g / b)), "each half has g - 1 steps"),
    # Sends the whole tensor in each step, as doubling does.
    "whole": (times(ring=lambda g, n, a, b: 2 * (g - 1) * (a + n / b)), "not the whole tensor"),
    "smaller latency": (times(ring=lambda g, n, a, b: 2 * (g - 1) / g * (a + n / b)), "has the same latency"),
    # Counts the latency once for the whole collective, as if messages did not wait for each other.
    "once": (times(ring=lambda g, n, a, b: a + 2 * (g - 1) * n / g / b), "counts in each of the 2 (g - 1) steps"),
    "none": (times(ring=lambda g, n, a, b: 2 * (g - 1) * n / g / b), "the latency is missing"),
    "one exchange": (times(doubling=lambda g, n, a, b: a + n / b), "doubling takes log2 g steps"),
    "ring steps": (times(doubling=lambda g, n, a, b: (g - 1) * (a + n / b)), "so there are log2 g steps"),
    "chunks": (times(doubling=lambda g, n, a, b: log2(g) * (a + n / g / b)), "the whole tensor in each step"),
    "two halves": (times(doubling=lambda g, n, a, b: 2 * log2(g) * (a + n / b)), "no second half follows"),
    "at once": (times(doubling=lambda g, n, a, b: a + log2(g) * n / b), "the latency counts in each step"),
    "no latency": (times(doubling=lambda g, n, a, b: log2(g) * n / b), "the latency is missing"),
}

TABLES = {"01.ring": RING, "01.order": ORDER, "01.seconds": SECONDS}


def test_one_mistake_gets_one_sentence():
    for name, table in TABLES.items():
        for answer, _ in table.values():
            assert len(repr(score(name, answer)).splitlines()) == 2


def test_a_ring_is_drawn_right_or_wrong():
    exercise = exercises("01")["01.ring"]
    for rule in (right_rule, RING["constant"][0]):
        assert "4 ranks, 6 steps, 24 messages" in exercise.draw(rule).sentence
