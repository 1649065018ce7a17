"""Exercises of chapters 00 to 02: each misunderstanding gets a sentence of its own, and gets it once."""

from math import log2, prod

import pytest

from labkit.check import check


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
        "the chunks stand in the order of ranks",
    ),
    "gathered sum": (but("all_gather", lambda b: [[sum(everything(b))] for _ in b]), "adds nothing"),
    "all to all is all": (but("all_to_all", lambda b: [everything(b) for _ in b]), "every rank gets every chunk"),
    "passed on": (but("all_to_all", lambda b: b[-1:] + b[:-1]), "passes its chunks on to the next"),
    "summed chunk": (but("all_to_all", lambda b: right_after("reduce_scatter", b)), "as in a reduce-scatter"),
    "sums": (but("all_to_all", own_sums), "sums are taken"),
    "own chunk": (but("all_to_all", own), "it also gets chunk r of all others"),
    "reduce": (but("all_reduce", lambda b: [right_after("all_reduce", b)[0], *b[1:]]), "rank 0 alone gets the sums"),
    "mean": (but("all_reduce", lambda b: [[sum(c) / len(b) for c in zip(*b)] for _ in b]), "this is the mean"),
    "rows": (but("all_reduce", lambda b: [[sum(chunks)] for chunks in b]), "each rank adds up its own chunks"),
    "rows for all": (but("all_reduce", own_sums), "the sums go over the chunks of one rank"),
    "half": (but("all_reduce", lambda b: right_after("reduce_scatter", b)), "that is a reduce-scatter"),
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
    "to the next": (lambda r, s, g: ((r - s - 1) % g, (r - s - 2) % g), "the direction is reversed"),
    "shifted": (lambda r, s, g: ((r + s) % g, (r + s + 1) % g), "begin one chunk further"),
    "constant": (lambda r, s, g: ((r + 1) % g, (r + 2) % g), "every step sends the same chunk"),
    "own receive": (lambda r, s, g: ((r + s + 1) % g, (r + s) % g), "one further than the own"),
    "anew": (lambda r, s, g: right_rule(r, s % max(1, g - 1), g), "the step number runs on"),
    "no circle": (lambda r, s, g: (r + s + 1, r + s + 2), "so count in a circle"),
    "no pair": (lambda r, s, g: r, "which is not (chunk to send, chunk to receive)"),
    "two steps": (lambda r, s, g: ((r + 2 * s + 1) % g, (r + 2 * s + 2) % g), "is twice in that chunk of rank 0"),
}
ORDER = {
    "all send": (lambda r, g: ["send", "recv"], "rank 3 to 0), and nobody receives"),
    "all receive": (lambda r, g: ["recv", "send"], "4 of 4 ranks wait for a message that nobody has sent"),
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
    "half": (times(ring=lambda g, n, a, b: (g - 1) * (a + n / g / b)), "this is one half"),
    "g steps": (times(ring=lambda g, n, a, b: 2 * g * (a + n / g / b)), "each half has g - 1 steps"),
    "whole": (times(ring=lambda g, n, a, b: 2 * (g - 1) * (a + n / b)), "not the whole tensor"),
    "smaller latency": (times(ring=lambda g, n, a, b: 2 * (g - 1) / g * (a + n / b)), "has the same latency"),
    "once": (times(ring=lambda g, n, a, b: a + 2 * (g - 1) * n / g / b), "counts in each of the 2 (g - 1) steps"),
    "none": (times(ring=lambda g, n, a, b: 2 * (g - 1) * n / g / b), "the latency is missing"),
    "one exchange": (times(doubling=lambda g, n, a, b: a + n / b), "doubling takes log2 g steps"),
    "ring steps": (times(doubling=lambda g, n, a, b: (g - 1) * (a + n / b)), "so there are log2 g steps"),
    "chunks": (times(doubling=lambda g, n, a, b: log2(g) * (a + n / g / b)), "the whole tensor in each step"),
    "two halves": (times(doubling=lambda g, n, a, b: 2 * log2(g) * (a + n / b)), "no second half follows"),
    "at once": (times(doubling=lambda g, n, a, b: a + log2(g) * n / b), "the latency counts in each step"),
    "no latency": (times(doubling=lambda g, n, a, b: log2(g) * n / b), "the latency is missing"),
}
# ---- chapter 00 ----


def first(condition):
    return lambda a, b, t: next((i for i, (x, y) in enumerate(zip(a, b)) if condition(x, y, t)), None)


SAME = {
    "last": (lambda a, b, t: len(a) - 1 if abs(a[-1] - b[-1]) > t else None, "the last step alone"),
    "absolute": (lambda a, b, t: None if a == b else first(lambda x, y, t: abs(x - y) > t)(a, b, t), "divide it by"),
    "largest": (
        lambda a, b, t: (
            max(range(len(a)), key=lambda i: abs(a[i] - b[i]) / b[i])
            if first(lambda x, y, t: abs(x - y) > t * y)(a, b, t) is not None
            else None
        ),
        "the step with the largest difference",
    ),
    "signed": (first(lambda x, y, t: x - y > t * y), "take the absolute value"),
    "from 1": (
        lambda a, b, t: None if (s := first(lambda x, y, t: abs(x - y) > t * y)(a, b, t)) is None else s + 1,
        "steps count from 0",
    ),
}


def spans(rows):
    """(busy seconds, first start, last end, number of stages)."""
    busy = sum(end - start for row in rows for start, end in row)
    return busy, min(row[0][0] for row in rows), max(row[-1][1] for row in rows), len(rows)


def of_spans(share):
    return lambda rows: share(*spans(rows))


def own_share(row):
    """The share of a stage's own time, from its first action to its last, in which it is idle."""
    return 1 - sum(end - start for start, end in row) / (row[-1][1] - row[0][0])


IDLE = {
    "busy": (of_spans(lambda busy, a, b, n: busy / (n * (b - a))), "the share in which stages work"),
    "one stage": (of_spans(lambda busy, a, b, n: 1 - busy / (b - a)), "divide by their number"),
    "own span": (
        lambda rows: 1 - spans(rows)[0] / sum(row[-1][1] - row[0][0] for row in rows),
        "before its first action and after its last",
    ),
    "mean of shares": (lambda rows: sum(map(own_share, rows)) / len(rows), "each stage's share of its own time"),
    "one stage from 0": (of_spans(lambda busy, a, b, n: 1 - busy / b), "and by a step that begins"),
    "from 0": (of_spans(lambda busy, a, b, n: 1 - busy / (n * b)), "not at time 0"),
    "formula": (
        lambda rows: (len(rows) - 1) / (len(rows[0]) // 2 + len(rows) - 1),
        "this formula holds for equal stages",
    ),
    "seconds": (of_spans(lambda busy, a, b, n: n * (b - a) - busy), "these are seconds"),
}
TOUR = {
    "heads": (
        lambda ranks, layers, heads, batch: {
            (t, p, ranks // t // p)
            for t in range(1, ranks + 1)
            for p in range(1, ranks + 1)
            if ranks % (t * p) == 0 and layers % p == 0 and batch % (ranks // t // p) == 0
        },
        "(4, 1, 2): tp 4 does not divide 2 heads",
    ),
    "idle ranks": (lambda ranks, layers, heads, batch: {(1, 1, 1)}, "tp pp dp = 1 ranks, not 4"),
    "no triples": (lambda ranks, layers, heads, batch: [1], "no set of triples"),
}

# ---- chapter 02 ----


def digits(value):
    """An answer from (rank, stride, size) -> digit."""

    def answer(rank, order, sizes):
        found, stride = {}, 1
        for axis in order.split("-"):
            found[axis] = value(rank, stride, sizes[axis])
            stride *= sizes[axis]
        return found

    return answer


right_digits = digits(lambda rank, stride, size: rank // stride % size)


def right_groups(order, sizes, token):
    found = {}
    for rank in range(prod(sizes.values())):
        own = right_digits(rank, order, sizes)
        found.setdefault(tuple(own[a] for a in own if a not in token.split("-")), []).append(rank)
    return list(found.values())


def backwards(order):
    return "-".join(reversed(order.split("-")))


def blocks(order, sizes, token):
    size = prod(sizes[axis] for axis in token.split("-"))
    return [list(range(first, first + size)) for first in range(0, prod(sizes.values()), size)]


DIGITS = {
    "reversed": (lambda r, o, s: right_digits(r, backwards(o), s), "reads it from the end"),
    "no rest": (digits(lambda rank, stride, size: rank // stride), "the rest of the division"),
    "no stride": (digits(lambda rank, stride, size: rank % size), "the division by the stride is missing"),
    "powers of two": (
        lambda rank, order, sizes: {a: rank // 2**place % sizes[a] for place, a in enumerate(order.split("-"))},
        "not 2 for each of them",
    ),
    "strides": (digits(lambda rank, stride, size: stride), "these are the strides"),
}
GROUPS = {
    "blocks": (blocks, "a block of neighbours"),
    "reversed": (lambda o, s, t: right_groups(backwards(o), s, t), "reads it from the end"),
    "others": (
        lambda o, s, t: right_groups(o, s, "-".join(a for a in o.split("-") if a not in t.split("-")) or o),
        "the groups of the other axes",
    ),
}
ORDERS = {"usual": (lambda inner, outer: "tp-cp-ep-dp-pp", "pp has stride 8 and size 4")}
TABLES = {
    "00.same": SAME,
    "00.idle": IDLE,
    "00.tour": TOUR,
    "02.digits": DIGITS,
    "02.groups": GROUPS,
    "02.order": ORDERS,
}
TABLES |= {"01.after": AFTER, "01.ring": RING, "01.order": ORDER, "01.seconds": SECONDS}


def test_a_misunderstanding_is_named_once(misread):
    score, words = misread
    assert not score.ok and repr(score).count(words) == 1, repr(score)
    assert score.exercise[:2] != "01" or len(repr(score).splitlines()) == 2, "one mistake, one sentence"
    assert "more ..." not in repr(score)


@pytest.mark.parametrize("name", sorted(TABLES))
def test_an_answer_of_another_kind_gets_a_score(name):
    for answer in (None, lambda *case: None, lambda *case: "x"):
        assert check(name, answer).passed == (name == "00.same" and answer is not None and answer() is None) * 2
