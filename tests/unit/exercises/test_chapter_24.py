"""Wrong answers to the exercises of chapter 24, with what each believes and words of its score."""

import math

import numpy as np

# ---- 24.cross ----


def softmax(scores, axis=-1):
    powers = np.exp(scores - scores.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


def attend(queries, keys, values, *, hides=True, causal=False, scale=True, axis=-1, inverted=False):
    """An answer; `queries`, `keys` and `values` say whether the decoder (0) or the encoder (1) gives them."""

    def answer(x, encoded, wq, wk, wv, padding):
        both = x, encoded
        q, k, v = both[queries] @ wq.T, both[keys] @ wk.T, both[values] @ wv.T
        scores = q @ k.T / (len(wq) ** 0.5 if scale else 1)
        hidden = ~padding if inverted and padding.any() else padding
        if hides and keys == 1:
            scores = np.where(hidden, -1e9, scores)
        if causal:
            scores = np.where(np.triu(np.ones(scores.shape, dtype=bool), 1), -1e9, scores)
        return softmax(scores, axis)[:, : len(v)] @ v

    return answer


CROSS = {
    "self": (attend(0, 0, 0), "attention of x to itself"),
    # Reads "the encoder attends to the decoder".
    "swapped": (attend(1, 0, 0), "it is the decoder that asks"),
    "values of x": (attend(0, 1, 0), "only the keys come from the encoder"),
    "padding": (attend(0, 1, 1, hides=False), "padding is read; a sample"),
    # Takes `padding` as what may be read, as in torch's masks of other functions.
    "inverted": (attend(0, 1, 1, inverted=True), "padding is read and the text is hidden"),
    # Thinks that a decoder is always causal.
    "causal": (attend(0, 1, 1, causal=True), "a causal mask is in it"),
    "not scaled": (attend(0, 1, 1, scale=False), "divided by the root"),
    "other axis": (attend(0, 1, 1, axis=0), "over the queries"),
}

# ---- 24.bucket ----


def right_bucket(ahead, both_ways, buckets, far, grows=math.log, clamp=True):
    first = buckets // 2 if both_ways and ahead > 0 else 0
    buckets = buckets // 2 if both_ways else buckets
    distance = abs(ahead) if both_ways else max(0, -ahead)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    place = exact + int(grows(distance / exact) / grows(far / exact) * (buckets - exact))
    return first + (min(buckets - 1, place) if clamp else place)


def each_distance(ahead, both_ways, buckets, far):
    own = buckets // 2 if both_ways else buckets
    distance = abs(ahead) if both_ways else max(0, -ahead)
    return (own if both_ways and ahead > 0 else 0) + min(distance, own - 1)


BUCKET = {
    # Takes ahead as the query's position less the key's.
    "sign": (lambda a, both, n, far: right_bucket(-a, both, n, far), "the sign is turned round"),
    "each": (each_distance, "each distance has a bucket of its own"),
    "beyond": (lambda *case: right_bucket(*case, clamp=False), "buckets that do not exist"),
    "equally wide": (lambda *case: right_bucket(*case, grows=lambda r: r - 1 or 1e-9), "equally wide"),
    "one way": (lambda a, both, n, far: right_bucket(-abs(a), False, n, far), "both ways share all buckets"),
    "sees ahead": (
        lambda a, both, n, far: right_bucket(a if both else -abs(a), both, n, far),
        "although the decoder never sees it",
    ),
    "second half": (
        lambda a, both, n, far: (right_bucket(a, both, n, far) + (n // 2 if both else 0)) % n,
        "have the second half of the buckets",
    ),
}

# ---- 24.copies ----


def groups(tp, dp, stages):
    return [[(s * dp + d) * tp + t for s in stages] for d in range(dp) for t in range(tp)]


def copies(words, positions=lambda pp, split: [0, split], *, once=True):
    """An answer from (pp, split) -> stages of each table."""

    def answer(tp, pp, dp, split):
        found = [words(pp, split), positions(pp, split)]
        return [groups(tp, dp, sorted(set(stages)) if once else stages) for stages in found]

    return answer


def ends(pp, split):
    return [0, split, pp - 1]


def of_gpt(tp, pp, dp, split):
    return groups(tp, dp, [0, pp - 1]), groups(tp, dp, [0])


COPIES = {
    # Takes over the groups of a GPT, which has one first stage.
    "gpt": (of_gpt, "these are a GPT's"),
    # Thinks that positions belong to words, and adds them up over the same ranks.
    "positions too": (copies(ends, ends), "the last stage scores words"),
    "without last": (copies(lambda pp, split: [0, split]), "the last stage is missing"),
    "all stages": (copies(lambda pp, s: range(pp), lambda pp, s: range(pp)), "every stage is in the group"),
    # Takes the split rank as the last rank of the encoder.
    "split - 1": (copies(lambda pp, s: [0, s - 1, pp - 1], lambda pp, s: [0, s - 1]), "ends the encoder"),
    "together": (
        lambda *sizes: [[sorted(r for g in part for r in g)] for part in copies(ends)(*sizes)],
        "several pipelines are in one group",
    ),
    "positions over tp": (
        lambda tp, pp, dp, split: [
            copies(ends)(tp, pp, dp, split)[0],
            [sorted(r * tp + t for r in g for t in range(tp)) for g in copies(ends)(1, pp, dp, split)[1]],
        ],
        "would count them tp times",
    ),
    "stages": (lambda tp, pp, dp, split: copies(ends)(1, pp, 1, split), "taken for a rank"),
    "twice": (copies(ends, once=False), "listed twice"),
}

TABLES = {"24.cross": CROSS, "24.bucket": BUCKET, "24.copies": COPIES}
RIGHT = {"24.cross": attend(0, 1, 1), "24.bucket": right_bucket, "24.copies": copies(ends)}


def test_buckets_are_those_of_labkit():
    from labkit.models.t5.t5_layers import relative_buckets

    for both, buckets, far in ((True, 8, 16), (False, 8, 16), (True, 32, 128), (False, 32, 128)):
        found = relative_buckets(30, 30, both_ways=both, buckets=buckets, max_distance=far)
        mine = [[right_bucket(key - query, both, buckets, far) for key in range(30)] for query in range(30)]
        assert found.tolist() == mine
