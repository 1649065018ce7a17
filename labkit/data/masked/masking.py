"""Masked n-grams of whole words, as megatron-core chooses them for BERT and T5: the same choices from the same state.

15% of a sample's tokens must be predicted. BERT chooses them as n-grams of 1 to 3 words, n with probability
proportional to 1 / n, and T5 as longer ones. A word includes all of its pieces, so no model sees half of a masked word.
An n-gram that would exceed the 15% is tried with one word less; one that meets a chosen token is dropped. Of BERT's
chosen tokens 80% become `[MASK]`, 10% a random token, and 10% stay (arXiv 1810.04805).

Source: `_create_masked_lm_predictions` of megatron/core/datasets/masked_dataset.py and `_get_token_mask` of
bert_dataset.py, megatron-core 0.16.1.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from labkit.data.text import size_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

MASKED, AS_MASK, AS_RANDOM = 0.15, 0.8, 0.5
"""Share of the tokens to predict, of these the share shown as `[MASK]`, and of the rest that shown as a random one."""
LEAST_TARGET = 7
"""Fewest tokens of which 15% is at least one token."""
MAX_NGRAM = 3
"""Words of BERT's longest n-gram."""
_WEIGHTS = 1 / np.arange(1, MAX_NGRAM + 1)
_UP_TO = (_WEIGHTS.cumsum() / _WEIGHTS.sum()).tolist()
"""Probabilities that n is at most 1, 2 and 3."""
GEOMETRIC, MAX_GEOMETRIC = 0.2, 10
"""For T5's n-grams: the probability that one ends after each of its words, and the words of the longest."""


class Masked(NamedTuple):
    """A sample with masked tokens."""

    tokens: np.ndarray
    """Ids that the model sees, int64."""
    spans: list[list[int]]
    """Positions of each masked n-gram, in the order of the text."""

    @property
    def positions(self) -> list[int]:
        """Positions of all tokens that must be predicted, in ascending order."""
        return [position for span in self.spans for position in span]


def continuations(tokenizer: Tokenizer) -> np.ndarray:
    """Return an array that is True at each id whose token continues a word, as a leading `##` marks it in BERT's
    vocabularies. Other tokenizers mark no token in this way."""
    found = np.zeros(size_of(tokenizer), dtype=bool)
    found[[number for token, number in tokenizer.get_vocab().items() if token.startswith("##")]] = True
    return found


def words_of(tokens: Sequence[int] | np.ndarray, continues: np.ndarray, special: Sequence[int]) -> list[list[int]]:
    """Return the positions of each word of a sample, without special tokens.

    continues: by id, see `continuations`; an id beyond its end continues no word.
    """
    words: list[list[int]] = []
    for position, token in enumerate(tokens):
        if token in special:
            continue
        if token < len(continues) and continues[token] and words:
            words[-1].append(position)
        else:
            words.append([position])
    return words


def most_masked(tokens: int, target_length: int) -> float:
    """Return the most masked tokens that a sample of `tokens` tokens may have; `target_length` is `mask_ngrams`'."""
    return min(MASKED * target_length, max(1, round(tokens * MASKED)))


def mask_ngrams(
    tokens: np.ndarray,
    words: Sequence[Sequence[int]],
    random: np.random.RandomState,
    *,
    target_length: int,
    mask: int,
    vocabulary: int | None,
    geometric: bool = False,
) -> Masked:
    """Choose and mask n-grams of `words`.

    words: positions of each word (`words_of`). target_length: most tokens of the sample without special ones. mask: id
    of `[MASK]`. vocabulary: a random token is below this id; None shows every chosen token as `mask`. geometric: n has
    a geometric distribution of mean 5 and is at most 10 (SpanBERT, arXiv 1907.10529), as in Megatron's T5.
    """
    most, order = most_masked(len(tokens), target_length), list(range(len(words)))
    random.shuffle(order)
    shown, chosen, spans = np.array(tokens, dtype=np.int64), set[int](), list[list[int]]()
    for first in order:
        if most - len(chosen) < 1:  # Megatron looks at all other words, and finds none that fits
            break
        if geometric:
            n = min(random.geometric(GEOMETRIC), MAX_GEOMETRIC)
        else:
            n = 1 + bisect_right(_UP_TO, random.random_sample())  # as `random.choice` draws
        span = _fitting(words, first, n, most - len(chosen))
        if not span or not chosen.isdisjoint(span):
            continue
        for position in span:
            if vocabulary is None or random.random_sample() < AS_MASK:
                shown[position] = mask
            elif random.random_sample() >= AS_RANDOM:
                shown[position] = random.randint(0, vocabulary)
        chosen.update(span)
        spans.append(span)
    return Masked(shown, sorted(spans))


def _fitting(words: Sequence[Sequence[int]], first: int, n: int, left: float) -> list[int]:
    """Return the positions of the longest n-gram of at most `n` words that begins with word `first` and has at most
    `left` tokens; empty if there is none."""
    for size in range(n, 0, -1):
        span = [position for word in words[first : first + size] for position in word]
        if len(span) <= left:
            return span
    return []
