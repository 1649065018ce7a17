"""Wrong answers to the exercises of chapter 08, with what each believes and words of its score."""

from labkit.check.chapter_08 import _BACKWARDS, _leaving


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

LEAVING = {
    "first": (lambda buckets, backwards: _leaving(buckets, backwards[0]), "leave in the first microbatch"),
    # Lets a complete bucket leave at once, so that ranks may send different buckets at the same place.
    "at once": (
        lambda buckets, backwards: sorted(
            ((max(names, key=backwards[-1].index), n) for n, names in enumerate(buckets)),
            key=lambda pair: backwards[-1].index(pair[0]),
        ),
        "before an earlier bucket",
    ),
    # Lets the buckets leave in every microbatch, as if no_sync did not exist.
    "microbatches": (lambda b, backwards: [p for each in backwards for p in _leaving(b, each)], "only the last microb"),
    # Takes the first gradient of a bucket for the signal; the others arrive after the bucket was sent.
    "early": (lambda buckets, backwards: [(names[0], n) for n, names in enumerate(buckets)], "is never added up"),
    "late": (lambda buckets, backwards: [(backwards[-1][-1], n) for n in range(len(buckets))], "so time is lost"),
    "missing": (lambda buckets, backwards: _leaving(buckets, backwards[-1])[:-1], "never leaves"),
    "twice": (lambda b, backwards: (right := _leaving(b, backwards[-1]))[:1] + right[:1], "leaves twice"),
    "form": (lambda buckets, backwards: [n for n, _ in enumerate(buckets)], "give a list of pairs"),
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


TABLES = {"08.tokens": MEANS, "08.leaving": LEAVING, "08.cuts": CUTS}


def test_the_shipped_backwards_reward_a_cut_between_one_and_each():
    """Otherwise one bucket, or a bucket for each gradient, would be an answer to all cases."""
    best = [case.best() for case in _BACKWARDS]
    assert sum(case.exposed([len(case.sizes)]) > least + 1e-9 for case, least in zip(_BACKWARDS, best)) >= 3
    assert sum(case.exposed([1] * len(case.sizes)) > least + 1e-9 for case, least in zip(_BACKWARDS, best)) >= 3
