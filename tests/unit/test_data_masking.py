"""N-grams of whole words: the bound, whole words, shares of lengths and of what is shown."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from labkit.data import load_tokenizer
from labkit.data.masked.masking import Masked, continuations, mask_ngrams, most_masked, words_of

CLS, SEP, MASK = 1000, 1001, 1002
CONTINUES = np.arange(1000) % 3 == 0
"""Every third id continues a word."""


def masked(tokens: np.ndarray, seed: int) -> Masked:
    words = words_of(tokens.tolist(), CONTINUES, (CLS, SEP))
    random = np.random.RandomState(seed)
    return mask_ngrams(tokens, words, random, target_length=len(tokens) - 3, mask=MASK, vocabulary=1000)


def sample(length: int, seed: int) -> np.ndarray:
    return np.concatenate([[CLS], np.random.default_rng(seed).integers(0, 1000, length), [SEP]])


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 200), st.integers(0, 2**32 - 1))
def test_spans_are_whole_words_below_the_bound(length, seed):
    tokens = sample(length, seed)
    found = masked(tokens, seed)
    words = words_of(tokens.tolist(), CONTINUES, (CLS, SEP))
    assert sorted(position for word in words for position in word) == list(range(1, length + 1))
    begins, ends = {word[0] for word in words}, {word[-1] for word in words}
    for span in found.spans:
        assert span == list(range(span[0], span[-1] + 1)) and span[0] in begins and span[-1] in ends
        assert sum(position in begins for position in span) <= 3
    positions = found.positions
    assert positions == sorted(set(positions)) and len(positions) <= most_masked(len(tokens), len(tokens) - 3)
    others = np.setdiff1d(np.arange(len(tokens)), positions)
    np.testing.assert_array_equal(found.tokens[others], tokens[others])


def test_the_example_of_a_word() -> None:
    pieces = models.WordPiece({"[UNK]": 0, "un": 1, "##believ": 2, "##able": 3, "so": 4}, unk_token="[UNK]")
    marked = continuations(Tokenizer(pieces))
    assert marked.tolist() == [False, False, True, True, False]
    assert words_of([9, 1, 2, 3, 4, 1, 8], marked, (9, 8)) == [[1, 2, 3], [4], [5]]
    assert not continuations(load_tokenizer()).any()


def test_shares_over_a_million_tokens() -> None:
    """80% masked, 10% random, 10% kept, within three sigma; nearly all of the bound is used."""
    shown = {"mask": 0, "same": 0, "random": 0}
    tokens_seen = 0
    for seed in range(2000):
        tokens = sample(510, seed)
        found = masked(tokens, seed)
        for position in found.positions:
            now = found.tokens[position]
            shown["mask" if now == MASK else "same" if now == tokens[position] else "random"] += 1
        tokens_seen += 510
    count = sum(shown.values())
    assert tokens_seen > 10**6 and count / tokens_seen == pytest.approx(0.15, abs=0.002)
    for name, share in (("mask", 0.8), ("same", 0.1 + 1e-4), ("random", 0.1 - 1e-4)):
        assert abs(shown[name] / count - share) < 3 * (share * (1 - share) / count) ** 0.5, name
