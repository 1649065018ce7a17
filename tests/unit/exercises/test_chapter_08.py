"""Wrong answers to the exercises of chapter 08, with what each believes and words of its score."""

from labkit.check.chapter_08 import _BACKWARDS


def weighted(weights, divisor):
    """An answer to 08.tokens: sums over ranks by `weights(tokens)`, over `divisor(tokens)`."""
    return lambda gradients, tokens: [
        sum(w * g for w, g in zip(weights(tokens), column)) / divisor(tokens) for column in zip(*gradients)
    ]


def ones(tokens):
    return [1] * len(tokens)


MEANS = {
    # Takes the mean of the ranks' means, so that a token among few counts more than a token among many.
    "means": (weighted(ones, len), "this is the mean of the ranks' means"),
    "fed": (weighted(ones, lambda tokens: sum(map(bool, tokens))), "the mean over the ranks that have tokens"),
    "sum": (weighted(ones, lambda tokens: 1), "are added and never divided"),
    "token sum": (weighted(list, lambda tokens: 1), "this is the gradient of the sum"),
    # Adds up sums over tokens, but divides by the number of replicas, as if the sums were means.
    "by ranks": (weighted(list, len), "divided by the number of ranks"),
    # Divides by all tokens what was divided by each rank's tokens already.
    "twice": (weighted(ones, sum), "divided by the tokens once more"),
}

START = {
    # Starts whatever is full. Right as long as gradients arrive in one order on all ranks, which is Megatron's premise.
    "when full": (
        lambda missing, started: [n for n, lacks in enumerate(missing) if not lacks and not started[n]],
        "adds bucket 1 of rank 0 to bucket 0 of rank 1",
    ),
    # Waits for everything, as if there were no overlap.
    "at the end": (
        lambda missing, started: [] if any(missing) else list(range(len(missing))),
        "after 2 a bucket could leave",
    ),
    # Takes the first gradient of a bucket for the signal.
    "first gradient": (
        lambda missing, started: [n for n, lacks in enumerate(missing) if lacks < 2 and not started[n]],
        "a gradient that arrives later is lost",
    ),
    "again": (lambda missing, started: list(range(next((n for n, m in enumerate(missing) if m), 0))), "starts again"),
    # Looks at the next bucket alone and forgets that one arrival can let several leave.
    "one at a time": (
        lambda missing, started: [n for n in [sum(started)] if n < len(missing) and not missing[n]],
        "never starts bucket 1",
    ),
    "form": (lambda missing, started: 0, "is not a list of numbers of buckets"),
}


def halves(ready, sizes, *link):
    first = next(n for n in range(1, len(sizes)) if n == len(sizes) - 1 or sum(sizes[:n]) >= sum(sizes) / 2)
    return [first, len(sizes) - first]


CUTS = {
    # Pays the latency once, by one bucket, which leaves when the backward has ended.
    "one": (lambda ready, sizes, *link: [len(sizes)], "so nothing is hidden"),
    # Makes every bucket as small as possible, so that the last one is; the link pays the latency for each.
    "each": (lambda ready, sizes, *link: [1] * len(sizes), "pay the latency 8 times"),
    "late cut": (lambda ready, sizes, *link: [len(sizes) - 1, 1], "the last bucket waits"),
    "early cut": (lambda ready, sizes, *link: [1, len(sizes) - 1], "the last bucket alone takes"),
    # Cuts into halves of equal bytes and does not ask when gradients are complete.
    "halves": (halves, "the last bucket alone takes 0.2"),
    "form": (lambda ready, sizes, *link: [2, 2, 2], "give numbers above 0 that add up to 4"),
}


TABLES = {"08.tokens": MEANS, "08.cuts": CUTS, "08.start": START}


def test_the_shipped_backwards_reward_a_cut_between_one_and_each():
    """Otherwise one bucket, or a bucket for each gradient, would be an answer to all cases."""
    best = [case.best() for case in _BACKWARDS]
    assert sum(case.exposed([len(case.sizes)]) > least + 1e-9 for case, least in zip(_BACKWARDS, best)) >= 3
    assert sum(case.exposed([1] * len(case.sizes)) > least + 1e-9 for case, least in zip(_BACKWARDS, best)) >= 3
