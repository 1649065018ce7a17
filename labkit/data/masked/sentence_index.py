"""The index array of BERT's and T5's samples: runs of whole sentences, equal to megatron-core's for the same seed.

A sample is a run of sentences of one document. Its *target* is the number of tokens that it should have. Mostly this is
the most that fits, but in one sample of ten a random number up to that. The walk through a document adds sentences
until the sample has its target. A single last sentence joins the sample before it. So most samples have more tokens
than their target, and the maker of the sample cuts it. Documents with too few sentences, and documents of several
sentences with one of more than 512 tokens, give no sample.

Row k of the array is sample k of the run: first sentence, sentence after the last, target. For example, a document has
sentences of 5, 3, 4, 6 and 2 tokens, and all targets are 7. Before the shuffle the rows are (0, 2, 7) and (2, 5, 7).
The first sample has 8 tokens. The second reaches its target after two sentences, and the last one joins it because it
would be alone.

The walk repeats over all documents until there are enough samples, with new random targets. At the end all samples are
shuffled. Megatron draws targets from C++'s `mt19937` and the shuffle from `mt19937_64`. numpy has the first, and the
second is written out below. Source: `build_mapping_impl` of megatron/core/datasets/helpers.cpp, megatron-core 0.16.1.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np

SHORT = 0.1
"""Share of the samples whose target is random (Megatron-LM's `short_seq_prob`)."""
LONGEST_SENTENCE = 512
"""Most tokens of a sentence in a document of several sentences; one with more is rarely a sentence, so its document is
left out."""


class TooFewSentencesError(ValueError):
    """No document gives a sample."""


def build_sentence_index(
    sequence_lengths: np.ndarray,
    document_indices: np.ndarray,
    documents: range,
    *,
    longest: int,
    least: int,
    num_samples: int,
    seed: int,
) -> np.ndarray:
    """Return the rows of the samples in the order of training, shape (samples, 3), uint32 where that suffices.

    sequence_lengths: tokens of each sentence. document_indices: first sentence of each document, and the number of
    sentences at the end. documents: those of one split. longest: largest target, at least 2. least: fewest sentences of
    a sample. num_samples: pass over the documents until there are that many samples; the last pass is finished.

    Raises:
        TooFewSentencesError: no document gives a sample.
    """
    borders = document_indices[documents.start : documents.stop + 1]
    borders = _sound(sequence_lengths, borders[:-1], borders[1:], least)
    if len(borders) == 0:
        raise TooFewSentencesError(f"no document has {least} sentences of {LONGEST_SENTENCE} tokens or fewer")
    begin, end = int(borders[0, 0]), int(borders[-1, 1])
    ends = np.zeros(end - begin + 1, dtype=np.int64)
    np.cumsum(sequence_lengths[begin:end], out=ends[1:])
    targets, rows = target_lengths(longest, seed), array("q")
    while len(rows) < 3 * num_samples or not rows:
        for first, last in borders.tolist():
            _add_document(rows, ends[first - begin : last - begin + 1].tolist(), first, targets, least)
    kind = np.uint32 if len(sequence_lengths) <= np.iinfo(np.uint32).max else np.uint64
    index = np.frombuffer(rows, dtype=np.int64).reshape(-1, 3).astype(kind)
    return index[shuffled(len(index), seed + 1)]


def _sound(lengths: np.ndarray, first: np.ndarray, last: np.ndarray, least: int) -> np.ndarray:
    """Return the first sentence, and the one after the last, of each document that gives samples: (documents, 2)."""
    long_before = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths > LONGEST_SENTENCE, out=long_before[1:])
    sentences, has_long = last - first, long_before[last] > long_before[first]
    good = (sentences >= least) & ~(has_long & (sentences > 1))
    return np.stack([first, last], axis=1)[good]


def _add_document(rows: array[int], ends: list[int], first: int, targets: Iterator[int], least: int) -> None:
    """Append the rows of a document. ends: tokens before each of its sentences, and before the end of the last."""
    count, begin, target = len(ends) - 1, 0, next(targets)
    while begin < count:
        last = max(bisect_left(ends, ends[begin] + target, begin + 1) - 1, begin + least - 1)
        if last > count - 3:  # else no sentence would be left, or only one
            last = count - 1
        rows.extend((first + begin, first + last + 1, target))
        begin, target = last + 1, next(targets)


def target_lengths(longest: int, seed: int) -> Iterator[int]:
    """Yield the targets of one sample after another, without end: `longest`, or in `SHORT` of them 2 to `longest`.

    One random number decides both, as in Megatron, so if 10 divides `longest - 1`, short targets differ by multiples
    of 10.
    """
    random, ratio = np.random.RandomState(seed), round(1 / SHORT)
    while True:
        drawn = random.randint(0, 2**32, 4096, dtype=np.uint32).astype(np.int64)
        yield from np.where(drawn % ratio == 0, 2 + drawn % (longest - 1), longest).tolist()


# ---- the shuffle ----


def shuffled(count: int, seed: int) -> np.ndarray:
    """Return the permutation of `count` items that Megatron's swaps produce, int64."""
    order = list(range(count))
    choices = mersenne_twister_64(seed, max(0, count - 1)) % np.arange(count, 1, -1, dtype=np.uint64)
    for place, other in zip(range(count - 1, 0, -1), choices.tolist()):
        order[place], order[other] = order[other], order[place]
    return np.array(order, dtype=np.int64)


_WORDS, _HALF = 312, 156
_UPPER, _LOWER, _TWIST = (np.uint64(n) for n in (0xFFFFFFFF80000000, 0x7FFFFFFF, 0xB5026F5AA96619E9))
_TEMPERING = ((-29, 0x5555555555555555), (17, 0x71D67FFFEDA60000), (37, 0xFFF7EEE000000000), (-43, 2**64 - 1))
"""Shifts (to the left if above 0) and masks that turn a word of the state into a random number."""


def mersenne_twister_64(seed: int, count: int) -> np.ndarray:
    """Return the first `count` numbers of C++'s `std::mt19937_64(seed)`, uint64 (doi 10.1145/369534.369540)."""
    words = [seed % 2**64]
    for number in range(1, _WORDS):
        words.append((6364136223846793005 * (words[-1] ^ words[-1] >> 62) + number) % 2**64)
    state, blocks = np.array(words, dtype=np.uint64), [np.empty(0, np.uint64)]
    for _ in range(-(-count // _WORDS)):
        _next_state(state)
        block = state.copy()
        for shift, mask in _TEMPERING:
            moved = block << np.uint64(shift) if shift > 0 else block >> np.uint64(-shift)
            block ^= moved & np.uint64(mask)
        blocks.append(block)
    return np.concatenate(blocks)[:count]


def _next_state(state: np.ndarray) -> None:
    """Replace all words of the state; the second half needs new words of the first, the last word the new first one."""
    for part, after, other in (
        (slice(0, _HALF), slice(1, _HALF + 1), slice(_HALF, _WORDS)),
        (slice(_HALF, _WORDS - 1), slice(_HALF + 1, _WORDS), slice(0, _HALF - 1)),
        (slice(_WORDS - 1, _WORDS), slice(0, 1), slice(_HALF - 1, _HALF)),
    ):
        mixed = (state[part] & _UPPER) | (state[after] & _LOWER)
        state[part] = state[other] ^ (mixed >> np.uint64(1)) ^ np.where(mixed & np.uint64(1), _TWIST, np.uint64(0))
