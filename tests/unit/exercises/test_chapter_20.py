"""Wrong answers to the exercises of chapter 20, with what each believes and words of its score."""

import math
from itertools import accumulate

import torch
import torch.nn.functional as F

from labkit.check import score
from labkit.evaluate.wikitext import perplexity_of, window_starts

# ---- 20.windows ----


def right_windows(tokens, length, stride):
    """The windows that labkit's own evaluation scores."""
    for start in window_starts(tokens, length, stride):
        yield start, 1 if start == 0 else start + length - stride + 1, min(start + length + 1, tokens)


def changed(change):
    return lambda tokens, length, stride: [
        change(window, length, stride) for window in right_windows(tokens, length, stride)
    ]


WINDOWS = {
    # Scores all labels of every window: tokens in the overlap then count many times, mostly with little context.
    "all labels": (changed(lambda w, n, s: (w[0], w[0] + 1, w[2])), "most tokens count many times"),
    "first window": (changed(lambda w, n, s: (w[0], w[0] + n - s + 1, w[2])), "are never scored"),
    "all labels, no last": (
        lambda tokens, n, s: [(w[0], w[0] + 1, w[2]) for w in right_windows(tokens, n, s) if w[0] + n < tokens],
        "there is no window for the last tokens",
    ),
    # Drops the last window where it does not fit, as a training loader does, and leaves its tokens unscored.
    "last window": (
        lambda tokens, n, s: [w for w in right_windows(tokens, n, s) if w[0] + n < tokens],
        "the last tokens are missing",
    ),
    "short text": (
        lambda tokens, n, s: right_windows(tokens, n, s) if tokens > n else [],
        "scores the labels that are there",
    ),
    "side by side": (
        lambda tokens, n, s: [(i, i + 1, min(i + n + 1, tokens)) for i in range(0, max(1, tokens - 1), n)],
        "the windows are side by side",
    ),
    # Takes the tokens that a window reads for the labels that it scores, which come one token later.
    "tokens": (changed(lambda w, n, s: (w[0], w[1] - 1, w[2] - 1)), "these are the tokens that are read"),
    "behind the text": (changed(lambda w, n, s: (w[0], w[1], w[0] + n + 1)), "scores labels after the text"),
    "last label": (changed(lambda w, n, s: (w[0], w[1], w[2] - 1)), "it must be the next token"),
}

# ---- 20.scores ----


def sums(blocks):
    return sum(loss for loss, _ in blocks), sum(count for _, count in blocks)


def right_scores(blocks, text):
    """Through labkit's own evaluation, except for the bytes."""
    found = perplexity_of(blocks, tokens=100, original_words=len(text.split()))
    return found.token_perplexity, found.perplexity, found.loss_sum / math.log(2) / len(text.encode())


def with_part(place, part):
    """The right scores, but for one of them."""

    def scores(blocks, text):
        found = list(right_scores(blocks, text))
        found[place] = part(blocks, text)
        return tuple(found)

    return scores


SCORES = {
    "mean loss": (with_part(0, lambda b, text: sums(b)[0] / sums(b)[1]), "this is the mean loss"),
    # Averages perplexities, in which a hard window weighs exponentially more than an easy one.
    "averaged": (with_part(0, lambda b, text: sum(math.exp(x / n) for x, n in b) / len(b)), "are averaged; add"),
    "means": (with_part(0, lambda b, text: math.exp(sum(x / n for x, n in b) / len(b))), "unequally many tokens"),
    # Takes losses for bits: the logarithms of cross-entropy are natural.
    "power of 2": (with_part(0, lambda b, text: 2 ** (sums(b)[0] / sums(b)[1])), "the base is e"),
    # Divides by the tokens, whose number is the tokenizer's; models with two tokenizers cannot be compared then.
    "tokens": (with_part(1, lambda b, text: math.exp(sums(b)[0] / sums(b)[1])), "divide by the words"),
    "loss of a word": (with_part(1, lambda b, text: sums(b)[0] / len(text.split())), "this is a loss per word"),
    "blanks": (with_part(1, lambda b, text: math.exp(sums(b)[0] / text.count(" "))), "blanks are counted"),
    "nats": (with_part(2, lambda b, text: sums(b)[0] / len(text.encode())), "these are nats"),
    "multiplied": (with_part(2, lambda b, text: sums(b)[0] * math.log(2) / len(text.encode())), "nats are multiplied"),
    "per token": (with_part(2, lambda b, text: sums(b)[0] / math.log(2) / sums(b)[1]), "these are bits per token"),
    "per word": (
        with_part(2, lambda b, text: sums(b)[0] / math.log(2) / len(text.split())), "these are bits per word"
    ),
    "characters": (with_part(2, lambda b, text: sums(b)[0] / math.log(2) / len(text)), "these are bits per character"),
}  # fmt: skip

# ---- 20.top_p ----


def by_probability(probabilities):
    return sorted(range(len(probabilities)), key=lambda each: -probabilities[each])


def while_below(order, test):
    """An answer that keeps the tokens of an order as long as `test(sum before, sum with it, p)` holds."""

    def kept(probabilities, p):
        ids = order(probabilities)
        after = [*accumulate(probabilities[each] for each in ids)]
        return [each for each, before, total in zip(ids, [0, *after], after) if test(before, total, p)]

    return kept


right_top_p = while_below(by_probability, lambda before, _, p: before < p)
TOP_P = {
    # Stops before the token that crosses p; a first token more likely than p would leave nothing at all.
    "crossing": (while_below(by_probability, lambda before, total, p: total <= p), "the token that crosses p"),
    "one more": (while_below(by_probability, lambda before, total, p: before <= p), "one token too many"),
    # Holds p against each single probability, where it bounds their sum.
    "single": (lambda given, p: [i for i, each in enumerate(given) if each >= p], "but on a sum"),
    "rest": (lambda given, p: [i for i, each in enumerate(given) if each >= 1 - p], "a bound of 1 - p"),
    # Adds up in the order of ids, and so keeps whatever the tokenizer happened to number first.
    "ids": (while_below(lambda g: range(len(g)), lambda before, _, p: before < p), "the order of their ids"),
    "least": (while_below(lambda g: by_probability(g)[::-1], lambda b, _, p: b < p), "the least likely tokens"),
    "tie": (
        lambda given, p: [i for i, x in enumerate(given) if x >= min(given[i] for i in right_top_p(given, p))],
        "of equally likely tokens the lower id",
    ),
    "share": (lambda given, p: by_probability(given)[: math.ceil(p * len(given))], "a share p of the tokens"),
}


# ---- 20.attend ----


def attends(is_causal=lambda new, every: None, keep="all", scale=None):
    """An answer made of torch's own attention; by default with the right mask."""

    def attend(q, k, v, kept):
        own = k, v
        if kept is not None and keep != "nothing":
            k, v = torch.cat([kept[0], k], 1), torch.cat([kept[1], v], 1)
        new, every = q.shape[1], k.shape[1]
        causal = is_causal(new, every)
        mask = None if causal is not None else torch.ones(new, every, dtype=torch.bool).tril(every - new)
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=bool(causal), scale=scale)
        return out, own if keep == "last" else (k, v)

    return attend


def sees_no_self(q, k, v, kept):
    if kept is not None:
        k, v = torch.cat([kept[0], k], 1), torch.cat([kept[1], v], 1)
    before = k.shape[1] - q.shape[1]
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(max(0, before - 1))
    return F.scaled_dot_product_attention(q, k, v, mask), (k, v)


ATTEND = {
    "no mask": (attends(lambda new, every: False), "without a mask"),
    # Trusts is_causal, whose diagonal begins at the first key also where there are more keys than queries.
    "is_causal": (attends(lambda new, every: True), "the mask begins at the first key"),
    # Masks a prompt alone, so a second piece of several tokens has no mask.
    "nothing kept": (attends(keep="nothing"), "nothing of the earlier calls is used"),
    "last kept": (attends(keep="last"), "only the last call's keys and values"),
    "no scale": (attends(scale=1.0), "are not divided by the root"),
    "scaled by d": (attends(scale=0.25), "not by the dimension"),
    "not itself": (sees_no_self, "a token sees itself"),
    "shape": (lambda q, k, v, kept: (v[:, :1], (k, v)), "another shape than q"),
}

TABLES = {"20.windows": WINDOWS, "20.scores": SCORES, "20.top_p": TOP_P, "20.attend": ATTEND}
RIGHT = {"20.windows": right_windows, "20.scores": right_scores, "20.top_p": right_top_p, "20.attend": attends()}


def test_one_token_after_a_prompt_needs_no_mask_and_a_piece_of_a_prompt_does():
    found = score("20.attend", attends(lambda new, every: False if new == 1 else True if new == every else None))
    assert found.ok
    lazy = score("20.attend", attends(lambda new, every: new == every))
    assert [outcome.passed for outcome in lazy.outcomes] == [True, True, True, False, False]


def test_the_tokens_that_top_p_keeps_are_those_of_the_sampler():
    from labkit.check.chapter_20 import _CHOICES
    from labkit.evaluate.sampling import within_top_p

    def kept(probabilities, p):
        logits = torch.tensor([probabilities], dtype=torch.float64).log()
        return within_top_p(logits, p)[0].isfinite().nonzero()[:, 0]

    assert len(_CHOICES) == 6 and score("20.top_p", kept).ok
