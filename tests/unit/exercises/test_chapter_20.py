"""Wrong answers to the exercises of chapter 20, with what each believes and words of its score."""

import math
from itertools import accumulate

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

# ---- 20.perplexity ----


def sums(blocks):
    return sum(loss for loss, _ in blocks), sum(count for _, count in blocks)


PERPLEXITIES = {
    "mean loss": (lambda blocks, words: sums(blocks)[0] / words, "this is the mean loss"),
    # Divides by the tokens, whose number is the tokenizer's; models with two tokenizers cannot be compared then.
    "tokens": (lambda blocks, words: math.exp(sums(blocks)[0] / sums(blocks)[1]), "a finer tokenizer looks better"),
    # Averages perplexities, in which a hard window weighs exponentially more than an easy one.
    "averaged": (lambda b, words: sum(math.exp(x / n) for x, n in b) / len(b), "perplexities are averaged"),
    "means": (lambda b, words: math.exp(sum(x / n for x, n in b) / len(b)), "score unequally many tokens"),
    "multiplied": (lambda b, words: math.prod(math.exp(x / n) for x, n in b), "perplexities are multiplied"),
    # Takes losses for bits: the logarithms of cross-entropy are natural.
    "bits": (lambda blocks, words: 2 ** (sums(blocks)[0] / words), "the base is e"),
    "windows": (lambda b, words: math.exp(sums(b)[0] / len(b)), "the number of windows"),
    "adjusted": (lambda b, words: math.exp(sums(b)[0] / (words - 1)), "Megatron's adjusted form"),
}

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


def of_labkit(blocks, words):
    return perplexity_of(blocks, tokens=100, original_words=words).perplexity


TABLES = {"20.windows": WINDOWS, "20.perplexity": PERPLEXITIES, "20.top_p": TOP_P}
RIGHT = {"20.windows": right_windows, "20.perplexity": of_labkit, "20.top_p": right_top_p}


def test_the_tokens_that_top_p_keeps_are_those_of_the_sampler():
    import torch

    from labkit.check.chapter_20 import _CHOICES
    from labkit.evaluate.sampling import within_top_p

    def kept(probabilities, p):
        logits = torch.tensor([probabilities], dtype=torch.float64).log()
        return within_top_p(logits, p)[0].isfinite().nonzero()[:, 0]

    assert len(_CHOICES) == 6 and score("20.top_p", kept).ok
