"""Wrong answers to the exercises of chapter 01, with what each believes and words of its score."""

from math import log2

from labkit.check import score


def everything(before):
    return [chunk for chunks in before for chunk in chunks]


def right_after(operation, before):
    columns = [list(column) for column in zip(*before)]
    sums = [sum(column) for column in columns]
    return {
        "broadcast": [before[0] for _ in before],
        "all_gather": [everything(before) for _ in before],
        "all_to_all": columns,
        "all_reduce": [sums for _ in before],
        "reduce_scatter": [[total] for total in sums],
    }[operation]


def but(operation, wrong):
    """Right for every other operation."""
    return lambda name, before: wrong(before) if name == operation else right_after(name, before)


def own_sums(before):
    return [[sum(chunks) for chunks in before] for _ in before]


def own(before):
    return [[chunks[rank]] for rank, chunks in enumerate(before)]


AFTER = {
    "scatter": (but("broadcast", lambda b: [[chunk] for chunk in b[0]]), "that is a scatter"),
    "gather": (but("all_gather", lambda b: [everything(b), *b[1:]]), "rank 0 alone gets everything"),
    "own first": (
        but("all_gather", lambda b: [everything(b)[r:] + everything(b)[:r] for r in range(len(b))]),
        "the chunks are in the order of ranks",
    ),
    "gathered sum": (but("all_gather", lambda b: [[sum(everything(b))] for _ in b]), "adds nothing"),
    # Takes an all-to-all for an all-gather: everybody then has everything, g times as much as was asked for.
    "all to all is all": (but("all_to_all", lambda b: [everything(b) for _ in b]), "every rank gets every chunk"),
    "passed on": (but("all_to_all", lambda b: b[-1:] + b[:-1]), "passes its chunks on to the next"),
    "summed chunk": (but("all_to_all", lambda b: right_after("reduce_scatter", b)), "as in a reduce-scatter"),
    "sums": (but("all_to_all", own_sums), "sums are taken"),
    "own chunk": (but("all_to_all", own), "it also gets chunk r of all others"),
    "reduce": (but("all_reduce", lambda b: [right_after("all_reduce", b)[0], *b[1:]]), "rank 0 alone gets the sums"),
    # Divides by the number of ranks, as data parallelism does afterwards.
    "mean": (but("all_reduce", lambda b: [[sum(c) / len(b) for c in zip(*b)] for _ in b]), "this is the mean"),
    "rows": (but("all_reduce", lambda b: [[sum(chunks)] for chunks in b]), "each rank adds up its own chunks"),
    "rows for all": (but("all_reduce", own_sums), "the sums go over the chunks of one rank"),
    "half": (but("all_reduce", lambda b: right_after("reduce_scatter", b)), "that is a reduce-scatter"),
    # Scatters without adding: rank r keeps its own chunk r, and the other ranks' shares are lost.
    "no sum": (but("reduce_scatter", own), "the sum over ranks is missing"),
    "whole": (but("reduce_scatter", lambda b: right_after("all_reduce", b)), "that is an all-reduce"),
    "shifted": (
        but("reduce_scatter", lambda b: (s := right_after("reduce_scatter", b))[1:] + s[:1]),
        "on the wrong ranks",
    ),
    "mean of one": (but("reduce_scatter", lambda b: [[sum(c) / len(b)] for c in zip(*b)]), "this is the mean"),
    "nothing": (but("broadcast", lambda b: b), "nothing has moved in the broadcast"),
}


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

TABLES = {"01.after": AFTER, "01.ring": RING, "01.order": ORDER, "01.seconds": SECONDS}


def test_one_mistake_gets_one_sentence():
    for name, table in TABLES.items():
        for answer, _ in table.values():
            assert len(repr(score(name, answer)).splitlines()) == 2
