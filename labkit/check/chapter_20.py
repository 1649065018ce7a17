"""Exercises of chapter 20: the windows of a long text, its perplexity, the tokens that top-p keeps.

Wrong answers are compared with those of known misunderstandings, and the score names the one that fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from labkit.check.scoring import Misreadings, Outcome, asked, close, exercise, plain

Window = tuple[int, int, int]
"""(first token that the window reads, first label that it scores, label after the last that it scores)."""


def _listed(found: Any) -> Any:
    """Turn a generator into a list, because it is an answer like any other."""
    return list(found) if isinstance(found, Iterator) else found


# ---- windows ----

_TEXTS = ((9, 4, 4), (5, 4, 2), (9, 4, 2), (10, 4, 2), (3, 8, 2), (20, 6, 1))
"""(tokens of the text, length of a window, stride)."""


def _windows(tokens: int, length: int, stride: int) -> list[Window]:
    further = math.ceil(max(0, tokens - 1 - length) / stride)
    starts = range(0, stride * further + 1, stride)
    return [(s, 1 if s == 0 else s + length - stride + 1, min(s + length + 1, tokens)) for s in starts]


@exercise(
    "20.windows", "Write windows(tokens, length, stride) -> (start, first label, label after the last) by window."
)
def windows(answer: Any) -> Iterator[Outcome]:
    """Judge windows side by side, windows that overlap, a last window that ends after the text, and a single window."""
    return asked(
        _TEXTS,
        given="{} tokens, windows of {} and stride {}".format,
        right=_windows,
        tried=lambda *case: _listed(answer(*case)),
        misread=_misread_windows,
    )


def _misread_windows(tokens: int, length: int, stride: int) -> Misreadings:
    right = _windows(tokens, length, stride)
    return {
        "every window scores all its labels, so most tokens count many times; later windows score their last stride": [
            (s, s + 1, end) for s, _, end in right
        ],
        "the last tokens are missing; a window that ends after the text scores the labels that are there": [
            window for window in right if window[0] + length < tokens
        ],
        "every window scores all its labels, and there is no window for the last tokens": [
            (s, s + 1, end) for s, _, end in right if s + length < tokens
        ],
        "the first window scores its last stride alone, so its other tokens are never scored": [
            (s, s + length - stride + 1, end) for s, _, end in right
        ],
        "the windows are side by side; each begins one stride after the one before": [
            (s, s + 1, min(s + length + 1, tokens)) for s in range(0, max(1, tokens - 1), length)
        ],
        "these are the tokens that are read; the label of each is the next token": [
            (s, first - 1, end - 1) for s, first, end in right
        ],
        "the last window scores labels after the text; the last label of n tokens is n - 1": [
            (s, first, s + length + 1) for s, first, _ in right
        ],
        "the last label of a window is its last token; it must be the next token": [
            (s, first, end - 1) for s, first, end in right
        ],
    }


# ---- perplexity ----

_BLOCKS = (
    ([(12.0, 4)], 4),
    ([(12.0, 4), (6.0, 4)], 8),
    ([(40.0, 16), (9.0, 4), (3.0, 1)], 12),
    ([(12.0, 4), (6.0, 2)], 4),
)
"""((sum of losses, scored tokens) of each window, words of the text)."""


@exercise("20.perplexity", "Write perplexity(blocks, words) -> the perplexity of a text by its words, as the paper's.")
def perplexity(answer: Any) -> Iterator[Outcome]:
    """Judge one window, two, windows with unequally many tokens, and fewer words than tokens."""
    return asked(
        _BLOCKS,
        given="windows {} and {} words".format,
        right=lambda blocks, words: round(math.exp(sum(loss for loss, _ in blocks) / words), 4),
        tried=lambda blocks, words: round(float(answer(list(blocks), words)), 4),
        misread=lambda *case: {reason: round(value, 4) for reason, value in _misread_perplexity(*case).items()},
        equal=close(rtol=1e-6),
    )


def _misread_perplexity(blocks: Sequence[tuple[float, int]], words: int) -> dict[str, float]:
    total, scored = sum(loss for loss, _ in blocks), sum(count for _, count in blocks)
    means = [loss / count for loss, count in blocks]
    return {
        "this is the mean loss, in nats; the perplexity is its exponential": total / words,
        "this divides by the scored tokens, so a finer tokenizer looks better; divide by the words": math.exp(
            total / scored
        ),
        "the windows' perplexities are averaged; add the losses first, and take one exponential": (
            sum(map(math.exp, means)) / len(means)
        ),
        "the windows' means are averaged, though windows score unequally many tokens": math.exp(
            sum(means) / len(means)
        ),
        "the windows' perplexities are multiplied; add the losses, and divide the sum by the words": math.exp(
            sum(means)
        ),
        "this is a power of 2, and the losses are in nats: the base is e": 2 ** (total / words),
        "this divides by the number of windows": math.exp(min(700.0, total / len(blocks))),
        "this divides by words - 1, which is Megatron's adjusted form; the paper divides by the words": math.exp(
            total / max(1, words - 1)
        ),
    }


# ---- top-p ----

_CHOICES = (
    ([0.375, 0.25, 0.25, 0.125], 0.7),
    ([0.0625, 0.625, 0.25, 0.0625], 0.6),
    ([0.125, 0.25, 0.5, 0.125], 0.7),
    ([0.25, 0.5, 0.25], 0.5),
    ([0.0625, 0.3125, 0.125, 0.25, 0.1875, 0.0625], 0.9),
    ([0.25, 0.75], 1.0),
)
"""(probabilities, p); sums are exact in binary."""


def _until(order: Sequence[int], probabilities: Sequence[float], p: float) -> list[int]:
    """Return the first tokens of `order` whose probabilities add up to at least p, sorted by id."""
    before = [0.0, *accumulate(probabilities[each] for each in order)]
    return sorted(each for each, sum_before in zip(order, before) if sum_before < p)


def _by_probability(probabilities: Sequence[float]) -> list[int]:
    return sorted(range(len(probabilities)), key=lambda each: -probabilities[each])


@exercise("20.top_p", "Write kept(probabilities, p) -> the ids of the fewest most likely tokens that add up to p.")
def top_p(answer: Any) -> Iterator[Outcome]:
    """Judge ids in order and not, a first token that is enough, a sum that is exactly p, and all tokens."""
    return asked(
        _CHOICES,
        given="probabilities {} and p {}".format,
        right=lambda probabilities, p: _until(_by_probability(probabilities), probabilities, p),
        tried=lambda probabilities, p: sorted(plain(_listed(answer([*probabilities], p)))),
        misread=_misread_top_p,
    )


def _misread_top_p(probabilities: Sequence[float], p: float) -> Misreadings:
    order = _by_probability(probabilities)
    sums = [*accumulate(probabilities[each] for each in order)]
    ids = range(len(probabilities))
    keep: Callable[[Callable[[int], bool]], list[int]] = lambda test: [each for each in ids if test(each)]  # noqa: E731
    return {
        "the token that crosses p is missing, so the kept ones add up to less than p": sorted(
            each for each, total in zip(order, sums) if total <= p
        ),
        "one token too many: the tokens before it add up to p already": sorted(
            each for each, total in zip(order, [0.0, *sums]) if total <= p
        ),
        "p is not a bound on a single probability, but on a sum": keep(lambda each: probabilities[each] >= p),
        "a bound of 1 - p for each probability is not a bound on their sum": keep(
            lambda each: probabilities[each] >= 1 - p
        ),
        "tokens are taken in the order of their ids; begin with the most likely": _until(ids, probabilities, p),
        "every token as likely as the last kept one is kept; of equally likely tokens the lower id comes first": keep(
            lambda each: probabilities[each] >= min(probabilities[i] for i in _until(order, probabilities, p))
        ),
        "the least likely tokens are kept; begin with the most likely": _until(order[::-1], probabilities, p),
        "this is a share p of the tokens, as top-k keeps a number of them": sorted(order[: math.ceil(p * len(order))]),
    }
