"""Wrong answers to the exercises of chapter 19, with what each believes and words of its score."""


# ---- 19.words ----


def special(token):
    return token in ("[CLS]", "[SEP]")


def joined(tokens, skips=special):
    found = []
    for place, token in enumerate(tokens):
        if skips(token):
            continue
        if token.startswith("##") and found:
            found[-1].append(place)
        else:
            found.append([place])
    return found


WORDS = {
    # Takes each piece as a word, as the first BERT did; a masked piece is then guessed from its neighbour.
    "pieces": (lambda t: [[p] for p, x in enumerate(t) if not special(x)], "each piece is taken as a word"),
    # Forgets that [CLS] and [SEP] are in the sample, too, and takes them for words.
    "special": (lambda t: joined(t, lambda token: False), "count as words"),
    # Drops the special tokens first, so that all positions after them are too small.
    "shifted": (lambda t: joined([x for x in t if not special(x)]), "counted without [CLS]"),
    "first piece": (lambda t: [w[:1] for w in joined(t)], "cut to its first piece"),
    "numbers": (lambda t: [w[0] for w in joined(t)], "a word has one number here"),
    "lost": (lambda t: [w for w in joined(t) if not t[w[0]].startswith("##")], "is lost"),
    "texts": (lambda t: [[t[p] for p in w] for w in joined(t)], "the pieces themselves"),
}

# ---- 19.norms ----


def stack(pre, post):
    """An answer from (x, halves, norms) -> output for each layout."""
    return lambda x, halves, norms, placement: (pre if placement == "pre" else post)(x, halves, norms)


def right_pre(x, halves, norms):
    for half, norm in zip(halves, norms):
        x = x + half(norm(x))
    return norms[-1](x)


def right_post(x, halves, norms):
    x = norms[0](x)
    for half, norm in zip(halves, norms[1:]):
        x = norm(x + half(x))
    return x


def loop(step, *, first=False, last=False, shift=0):
    """x = step(x, half, norm) for each half, between an outer norm or none."""

    def answer(x, halves, norms):
        x = norms[0](x) if first else x
        for half, norm in zip(halves, norms[shift:]):
            x = step(x, half, norm)
        return norms[-1](x) if last else x

    return answer


def on_branch(x, half, norm):
    return x + half(norm(x))


def on_stream(x, half, norm):
    return norm(x + half(x))


def through(x, half, norm):
    x = norm(x)
    return x + half(x)


NORMS = {
    "post for both": (stack(right_post, right_post), "this is post"),
    "pre for both": (stack(right_pre, right_pre), "this is pre"),
    # Knows where a layer has its norms, and forgets the one outside of all layers.
    "no final norm": (stack(loop(on_branch), right_post), "the final norm is missing"),
    "no first norm": (stack(right_pre, loop(on_stream, shift=1)), "the embeddings are not normalised"),
    # Normalises the stream before each half in pre, so that the half adds to normalised numbers: that is post.
    "stream": (stack(loop(through, last=True), right_post), "this is post"),
    # Takes post as `normalise what the half makes`, and leaves the sum as it is; pre is right.
    "branch": (stack(right_pre, loop(lambda x, f, n: x + n(f(x)), first=True, shift=1)), "only the branch is"),
    "early": (stack(right_pre, loop(on_stream)), "the norms are one too early"),
    "late": (
        stack(lambda x, halves, norms: right_pre(x, halves, [*norms[1:], norms[0]]), right_post),
        "the norms are one too late",
    ),
    "no residual": (stack(loop(lambda x, f, n: f(n(x)), last=True), right_post), "no residual stream"),
}

# ---- 19.copies ----


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

TABLES = {"19.words": WORDS, "19.norms": NORMS, "19.copies": COPIES}
RIGHT = {"19.words": joined, "19.norms": stack(right_pre, right_post), "19.copies": copies(ends)}
