"""Exercises and bets of chapter 20: windows of a text, its scores, the tokens that top-p keeps, attention with a cache.

Wrong answers are compared with those of known misunderstandings, and the score names the one that fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from labkit.check.bets import ask
from labkit.check.scoring import Misreadings, Outcome, as_list, asked, close, exercise, holds, plain

if TYPE_CHECKING:
    from labkit.viz.figure import Figure

Window = tuple[int, int, int]
"""(first token that the window reads, first label that it scores, label after the last that it scores)."""


# ---- windows ----

_TEXTS = ((9, 4, 4), (5, 4, 2), (9, 4, 2), (10, 4, 2), (3, 8, 2), (20, 6, 1))
"""(tokens of the text, length of a window, stride)."""


def _windows(tokens: int, length: int, stride: int) -> list[Window]:
    further = math.ceil(max(0, tokens - 1 - length) / stride)
    starts = range(0, stride * further + 1, stride)
    return [(s, 1 if s == 0 else s + length - stride + 1, min(s + length + 1, tokens)) for s in starts]


def draw_windows(answer: Any) -> Figure:
    """Draw the windows of the answer for a text of 30 tokens."""
    from labkit.viz.text_scores import scoring_windows  # matplotlib, which a score does without

    windows = [(int(start), int(first), int(end)) for start, first, end in as_list(answer(30, 8, 3))]
    return scoring_windows(windows, 30, 8)


@exercise(
    "20.windows",
    "Write windows(tokens, length, stride) -> (start, first label, label after the last) by window.",
    draw=draw_windows,
)
def windows(answer: Any) -> Iterator[Outcome]:
    """Judge windows side by side, windows that overlap, a last window that ends after the text, and a single window."""
    return asked(
        _TEXTS,
        given="{} tokens, windows of {} and stride {}".format,
        right=_windows,
        tried=lambda *case: as_list(answer(*case)),
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


# ---- scores ----

_TEXTS_READ = (
    ([(12.0, 4)], "It is so late\n"),
    ([(12.0, 4), (6.0, 4)], "She said good night to all of them.\n"),
    ([(40.0, 16), (9.0, 4), (3.0, 1)], "Ann tells of the rat  that ate the malt.\nGood night, Ann.\n"),
    ([(9.0, 6), (6.0, 3)], "Caf\u00e9 na\u00efve, d\u00e9j\u00e0 vu\n"),
)
"""((sum of losses, scored tokens) of each window, the text)."""
_SCORES = ("perplexity of a token", "perplexity of a word", "bits per byte")


@exercise("20.scores", "Write scores(blocks, text) -> (perplexity of a token, perplexity of a word, bits per byte).")
def scores(answer: Any) -> Iterator[Outcome]:
    """Judge each of the three numbers for one window, two, three of unequal sizes, and a text with accents."""
    cases = [(blocks, text, place) for blocks, text in _TEXTS_READ for place in range(len(_SCORES))]
    return asked(
        cases,
        given=lambda blocks, text, place: f"windows {blocks} and {text!r}, {_SCORES[place]}",
        right=lambda blocks, text, place: round(_scores(blocks, text)[place], 4),
        tried=lambda blocks, text, place: round(float(answer(list(blocks), text)[place]), 4),
        misread=lambda blocks, text, place: {
            reason: round(value, 4) for reason, value in _misread_scores(blocks, text)[place].items()
        },
        equal=close(rtol=1e-4),
    )


def _scores(blocks: Sequence[tuple[float, int]], text: str) -> tuple[float, float, float]:
    total, scored = sum(loss for loss, _ in blocks), sum(count for _, count in blocks)
    return math.exp(total / scored), math.exp(total / len(text.split())), total / math.log(2) / len(text.encode())


def _misread_scores(blocks: Sequence[tuple[float, int]], text: str) -> tuple[dict[str, float], ...]:
    total, scored = sum(loss for loss, _ in blocks), sum(count for _, count in blocks)
    words, size = len(text.split()), len(text.encode())
    means = [loss / count for loss, count in blocks]
    of_token = {
        "this is the mean loss, in nats; the perplexity is its exponential": total / scored,
        "the windows' perplexities are averaged; add the losses first, and take one exponential": (
            sum(map(math.exp, means)) / len(means)
        ),
        "the windows' means are averaged, though windows score unequally many tokens": math.exp(
            sum(means) / len(means)
        ),
        "this is a power of 2, and the losses are in nats: the base is e": 2 ** (total / scored),
    }
    of_word = {
        "this divides by the scored tokens, whose number is the tokenizer's; divide by the words": math.exp(
            total / scored
        ),
        "this is a loss per word, in nats; the perplexity is its exponential": total / words,
        "this is a power of 2 of nats: the base is e": 2 ** (total / words),
        "blanks are counted, not words; two in a row are no word, and a line end ends one": math.exp(
            min(300.0, total / max(1, text.count(" ")))
        ),
    }
    per_byte = {
        "these are nats; a bit is log 2 of them, 0.693": total / size,
        "nats are multiplied by 0.693 here; a nat is more than a bit, 1.44 of them": total * math.log(2) / size,
        "these are bits per token; divide by the bytes of the text": total / math.log(2) / scored,
        "these are bits per word; divide by the bytes of the text": total / math.log(2) / words,
        "these are bits per character; an accented letter has more than one byte": total / math.log(2) / len(text),
        "this is the logarithm of a perplexity of windows that were averaged; begin with the sum of the losses": (
            math.log2(sum(map(math.exp, means)) / len(means))
        ),
    }
    return of_token, of_word, per_byte


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
        tried=lambda probabilities, p: sorted(plain(as_list(answer([*probabilities], p)))),
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


# ---- attention with a cache ----

_CALLS = ((5,), (4, 1), (3, 1, 1, 1), (2, 3), (4, 2, 1, 3))
"""New tokens of each call."""
Cache = tuple[Tensor, Tensor]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kept: Cache | None,
    *,
    diagonal: str = "last",
    scale: float = 0.5,
    keep: str = "all",
) -> tuple[Tensor, Cache]:
    """Return attention of the new queries [heads, new, 4], and (keys, values); other arguments astray."""
    new = k, v
    if kept is not None and keep != "nothing":
        k, v = torch.cat([kept[0], k], 1), torch.cat([kept[1], v], 1)
    shape, before = (q.shape[1], k.shape[1]), k.shape[1] - q.shape[1]
    begin = {"last": before, "first": 0, "none": k.shape[1], "strict": max(before - 1, 0)}[diagonal]
    hidden = ~torch.ones(shape, dtype=torch.bool).tril(begin)
    out = (scale * q @ k.mT).masked_fill(hidden, -math.inf).softmax(-1) @ v
    return out, new if keep == "last" else (k, v)


def _over_calls(attend: Callable[..., Any], calls: Sequence[int]) -> Tensor:
    """Run the calls of one text, each with what the one before has kept; return the outputs of all tokens."""
    made = torch.Generator().manual_seed(20)
    q, k, v = torch.randn(3, 2, sum(calls), 4, generator=made, dtype=torch.float64)
    kept, outputs, first = None, list[Tensor](), 0
    for new in calls:
        part = slice(first, first + new)
        out, kept = attend(q[:, part].clone(), k[:, part].clone(), v[:, part].clone(), kept)
        outputs.append(out)
        first += new
    return torch.cat(outputs, 1)


_ASTRAY: dict[str, dict[str, Any]] = {
    "without a mask the tokens of one call see those after them": {"diagonal": "none"},
    "the mask begins at the first key, as is_causal's does: with 4 keys kept, the new token sees one of them": {
        "diagonal": "first"
    },
    "nothing of the earlier calls is used, so each call is a text of its own": {"keep": "nothing"},
    "only the last call's keys and values are kept; return all so far": {"keep": "last"},
    "the products are not divided by the root of the head dimension": {"scale": 1.0},
    "divide by the root of the head dimension, not by the dimension": {"scale": 0.25},
    "a token sees itself, too": {"diagonal": "strict"},
}


@exercise(
    "20.attend", "Write attend(q, k, v, kept) -> (output, (all keys, all values)): causal attention with a cache."
)
def attend(answer: Any) -> Iterator[Outcome]:
    """Judge a prompt alone, a prompt and single tokens, and texts that come in pieces of several tokens."""
    for calls in _CALLS:
        yield holds(
            f"calls with {', '.join(map(str, calls))} new tokens",
            "what attention over the whole text gives",
            lambda calls=calls: _judged_attention(answer, calls),
        )


def _judged_attention(answer: Callable[..., Any], calls: Sequence[int]) -> tuple[str, str]:
    found, right = _over_calls(answer, calls), _over_calls(_attend, [sum(calls)])
    if found.shape != right.shape:
        why = "the output has another shape than q"
        return why, f"{list(found.shape)} where q has {list(right.shape)}: {why}"
    if torch.allclose(found, right, atol=1e-6):
        return "", ""
    wrong = int((found - right).abs().amax((0, 2)).gt(1e-6).nonzero()[0])
    for why, how in _ASTRAY.items():
        variant = _over_calls(lambda *case, how=how: _attend(*case, **how), calls)
        if torch.allclose(found, variant, atol=1e-6, equal_nan=True):
            return why, f"another output from token {wrong} on: {why}"
    return "", f"another output from token {wrong} on"


# ---- bets ----

ask(
    "20.tokenizers",
    "Three models have read the same text, each with its own tokenizer. Which of them gives this text the highest "
    "probability?",
    choices={
        "letters": "Its perplexity is the lowest, but that's a mean over tokens, and it pays for far more of them.",
        "the bundled one": "Its perplexity is in the middle, and so is the number of its tokens.",
        "words": "Each of its tokens is hard, but there are few. The probability of a text is the product over all of "
        "its tokens.",
    },
)
ask(
    "20.cloze",
    "Width 64 names the right person at the end of nearly every story. How many of the 60 names does width 32 get "
    "right? Somebody who always says the same name gets about 10.",
    choices={
        "20 or fewer": "Then it knows little more than the list of names.",
        "21 to 40": "It has learned the grammar of a story. For the name it leans to the right one, often enough by a "
        "hair, and the most likely name counts, however likely it is.",
        "over 40": "Then the small difference in perplexity is a small difference in what is known.",
    },
)
ask(
    "20.rescue",
    "At temperature 1, top-p 0.9 leaves 3 tokens or so of 1,024. Temperature 5 comes first, then top-p 0.9. How many "
    "tokens are left?",
    choices={
        "about 3": "The order of the tokens doesn't change with temperature. Their probabilities do, and top-p adds up "
        "these.",
        "20 to 500": "Then a few dozen tokens would have most of the probability. At temperature 5 the unlikely ones "
        "have it, because there are so many.",
        "over 500": "Logits that are divided by 5 are nearly equal, so a thousand unlikely tokens together have nearly "
        "all of the probability, and top-p has to take most of them.",
    },
)
ask(
    "20.caches",
    "Three caches, each with one fault, continue the same prompt greedily. How many of the three write exactly what "
    "the model writes without a cache?",
    choices={
        "none": "Then reading the text would be a test. A fault changes numbers, though, and a token changes only if "
        "another number becomes the largest.",
        "one": "The largest logit is often far above the others. A fault can change all logits, and not the order of "
        "the first two.",
        "two": "The largest logit is often far above the others. A fault can change all logits, and not the order of "
        "the first two.",
        "all three": "Then no text shows any of these faults; only numbers do.",
    },
)
ask(
    "20.h100",
    "A 175B model writes one text, with a kv cache, on eight H100s, whose tensor cores could do 8 * 989 TFLOP/s. What "
    "share of that does it use?",
    choices={
        "under 1 %": "Each new token reads every weight once, for two operations per weight. The memory delivers the "
        "weights far more slowly than the tensor cores could use them.",
        "1 to 10 %": "That takes several texts at once: they share the reading of the weights.",
        "over 10 %": "That's usual in training, where a weight that was read serves thousands of tokens. Here it "
        "serves one.",
    },
)
