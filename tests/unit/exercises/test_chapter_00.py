"""Wrong answers to the exercises of chapter 00, with what each believes and words of its score."""

from itertools import product


def first(condition):
    return lambda a, b, t: next((i for i, (x, y) in enumerate(zip(a, b)) if condition(x, y, t)), None)


SAME = {
    # Compares final losses alone, as tables in papers do; runs can diverge and come together again.
    "last": (lambda a, b, t: len(a) - 1 if abs(a[-1] - b[-1]) > t else None, "the last step alone"),
    # Takes the tolerance for a difference in nats instead of a share of the loss.
    "absolute": (lambda a, b, t: None if a == b else first(lambda x, y, t: abs(x - y) > t)(a, b, t), "divide it by"),
    # Looks for the largest difference, which is an effect; the first one is nearer to the cause.
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
    # Counts the idle time between a stage's own first and last action only, so that a late start costs nothing.
    "own span": (
        lambda rows: 1 - spans(rows)[0] / sum(row[-1][1] - row[0][0] for row in rows),
        "before its first action and after its last",
    ),
    "mean of shares": (lambda rows: sum(map(own_share, rows)) / len(rows), "each stage's share of its own time"),
    "one stage from 0": (of_spans(lambda busy, a, b, n: 1 - busy / b), "and by a step that begins"),
    "from 0": (of_spans(lambda busy, a, b, n: 1 - busy / (n * b)), "not at time 0"),
    # Trusts the formula of equal stages, whatever the rows say.
    "formula": (
        lambda rows: (len(rows) - 1) / (len(rows[0]) // 2 + len(rows) - 1),
        "this formula holds for equal stages",
    ),
    "seconds": (of_spans(lambda busy, a, b, n: n * (b - a) - busy), "these are seconds"),
}


def layouts(rule):
    """An answer: the triples (t, p, d) of up to `ranks` each for which `rule` holds."""

    def found(ranks, layers, heads, batch):
        triples = product(range(1, ranks + 1), repeat=3)
        return {(t, p, d) for t, p, d in triples if rule(t, p, d, ranks, layers, heads, batch)}

    return found


def divides(t, p, d, layers, heads, batch):
    return heads % t == 0 and layers % p == 0 and batch % d == 0


TOUR = {
    # Believes that any three factors of the world size will do, whatever they have to divide.
    "any factors": (
        layouts(lambda t, p, d, ranks, *sizes: t * p * d == ranks),
        "(1, 1, 8): dp 8 does not divide a batch of 2 samples",
    ),
    # Believes that dp is chosen freely, so that some ranks may be left without work.
    "idle ranks": (
        layouts(lambda t, p, d, ranks, *sizes: t * p * d <= ranks and divides(t, p, d, *sizes)),
        "tp pp dp = 1 ranks, not 4",
    ),
    # Swaps the axes: cuts the layers by tp and the heads by pp.
    "swapped": (
        layouts(lambda t, p, d, ranks, *sizes: t * p * d == ranks and divides(p, t, d, *sizes)),
        "(1, 4, 2): pp 4 does not divide 2 layers",
    ),
    "no triples": (lambda ranks, layers, heads, batch: [1], "not a set of triples"),
}

TABLES = {"00.same": SAME, "00.idle": IDLE, "00.tour": TOUR}
