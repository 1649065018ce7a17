"""The three index arrays of a GPT's data, equal to megatron-core's for the same seed, and the indices of a blend.

A GPT reads one long stream: the documents of all epochs in a shuffled order, one after another. Sample k is the
`seq_length + 1` tokens of the stream from token `k x seq_length` on, so neighbouring samples share one token. No token
is copied; three arrays say where each sample is:

    document_index  int32, one entry for each document of each epoch: the stream's order of documents
    sample_index    one row more than samples: the place in `document_index` and the offset in that document, of the
                    first token of each sample
    shuffle_index   the order in which training visits the samples

Three documents have 5, 3 and 4 tokens in this order, and `seq_length` is 4. Their 12 tokens hold (12 - 1) // 4 = 2
samples, and `sample_index` is (0, 0), (0, 4), (2, 0).

Megatron shuffles the documents of all epochs together. If the run needs less than 80% of the last epoch, the last epoch
is shuffled separately and comes last. numpy's RandomState, whose results numpy never changes, draws in Megatron's
order: documents, then samples. Source: megatron/core/datasets/gpt_dataset.py and helpers.cpp, megatron-core 0.16.1.
Megatron's loops in C++ are array operations here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from labkit.config.errors import counted

BLOCK = 16384
"""Documents of which the sample index is computed at once: temporary arrays then stay in the cache, in memory that is
used again. New memory costs more than the arithmetic."""
LAST_EPOCH_SHARE = 0.80
"""If the run needs less than this share of the last epoch's samples, that epoch is shuffled separately."""


class TooFewTokensError(ValueError):
    """One epoch is too short for one sample; the message counts the tokens."""


@dataclass(frozen=True)
class Epochs:
    """Passes of the stream over the documents."""

    count: int
    """Number of epochs, at least 1."""
    samples: int
    """Samples in the stream of all epochs."""
    shuffled_together: int
    """How many of the first samples are shuffled among themselves; those after them are, too."""

    @property
    def separate_last(self) -> bool:
        """True if the last epoch is shuffled separately."""
        return self.shuffled_together < self.samples


def epochs_for(tokens: int, seq_length: int, num_samples: int | None) -> Epochs:
    """Return the fewest epochs of `tokens` tokens that hold `num_samples` samples; None is one epoch.

    Raises:
        TooFewTokensError: one epoch is too short for one sample.
    """
    if tokens <= seq_length:
        raise TooFewTokensError(f"{counted(tokens, 'token')}, but one sample needs seq_length + 1 = {seq_length + 1:,}")
    count = 1 if num_samples is None else max(1, math.ceil((num_samples * seq_length + 1) / tokens))
    samples = (count * tokens - 1) // seq_length
    if num_samples is None or count == 1:
        return Epochs(count, samples, samples)
    before_last = ((count - 1) * tokens - 1) // seq_length
    of_one_epoch = (tokens - 1) // seq_length
    separate = num_samples - before_last < int(LAST_EPOCH_SHARE * of_one_epoch)
    return Epochs(count, samples, before_last if separate else samples)


def build_document_index(documents: range, epochs: Epochs, random: np.random.RandomState) -> np.ndarray:
    """Return the numbers of `documents`, once for each epoch, shuffled; int32."""

    def shuffled(count: int) -> np.ndarray:
        index = np.arange(documents.start, documents.stop, dtype=np.int32)
        index = np.tile(index, count) if count > 1 else index
        random.shuffle(index)
        return index

    if not epochs.separate_last:
        return shuffled(epochs.count)
    return np.concatenate([shuffled(epochs.count - 1), shuffled(1)])


def build_sample_index(
    sequence_lengths: np.ndarray, document_index: np.ndarray, seq_length: int, samples: int
) -> np.ndarray:
    """Return where each of `samples` samples begins, and where one more would: shape (samples + 1, 2), int32 where that
    suffices.

    sequence_lengths: tokens of each document, int32. document_index: the order of documents in the stream, which holds
    more than `samples x seq_length` tokens.
    """
    documents = len(document_index)
    index = np.empty((samples + 1, 2), dtype=np.int32 if documents <= np.iinfo(np.int32).max else np.int64)
    begins, first = np.zeros(BLOCK + 1, dtype=np.int64), 0  # tokens before each document of a block; its first sample
    for start in range(0, documents, BLOCK):
        block = sequence_lengths[document_index[start : start + BLOCK]]
        ends = begins[1 : len(block) + 1]
        np.cumsum(block, out=ends)
        ends += begins[0]
        # Samples of the block that begin before a document ends; a sample's document is the one that ends next.
        before = ends + (seq_length - 1 - first * seq_length)
        before //= seq_length
        count = min(int(before[-1]), samples + 1 - first)
        place = np.bincount(before, minlength=count + 1)[:count].cumsum()
        rows = index[first : first + count]
        np.add(place, start, out=rows[:, 0], casting="same_kind")
        np.subtract(np.arange(first, first + count) * seq_length, begins[place], out=rows[:, 1], casting="same_kind")
        first, begins[0] = first + count, ends[-1]
    index[0] = 0  # Megatron begins at the first document, even if that is empty
    return index


def build_shuffle_index(epochs: Epochs, random: np.random.RandomState) -> np.ndarray:
    """Return the numbers of all samples in the order of training; uint32 where that suffices."""
    kind = np.uint32 if epochs.samples < np.iinfo(np.uint32).max - 1 else np.int64
    index = np.arange(epochs.samples, dtype=kind)
    random.shuffle(index[: epochs.shuffled_together])
    if epochs.separate_last:
        random.shuffle(index[epochs.shuffled_together :])
    return index


def build_indices(
    sequence_lengths: np.ndarray, documents: range, *, seq_length: int, num_samples: int | None, seed: int
) -> dict[str, np.ndarray]:
    """Build `document_index`, `sample_index` and `shuffle_index` of some of the sequences of an indexed dataset.

    sequence_lengths: tokens of each sequence of the whole dataset. documents: the sequences of one split. num_samples:
    samples that training reads; None builds one epoch.

    Raises:
        TooFewTokensError: the documents are too short for one sample.
    """
    tokens = int(sequence_lengths[documents.start : documents.stop].sum(dtype=np.int64))
    epochs, random = epochs_for(tokens, seq_length, num_samples), np.random.RandomState(seed)
    document_index = build_document_index(documents, epochs, random)
    sample_index = build_sample_index(sequence_lengths, document_index, seq_length, epochs.samples)
    return {
        "document_index": document_index,
        "sample_index": sample_index,
        "shuffle_index": build_shuffle_index(epochs, random),
    }


def normalized(weights: Sequence[float]) -> list[float]:
    """Return weights that sum to 1, divided as Megatron's `normalize` divides them."""
    given = np.array(weights, dtype=np.float64)
    return (given / given.sum()).tolist()


def build_blending_indices(weights: Sequence[float], size: int) -> dict[str, np.ndarray]:
    """Return `dataset_index` (int16) and `dataset_sample_index` (int64): the dataset from which sample i of a blend
    comes, and its number within that dataset.

    weights: sum to 1. Each sample comes from the dataset that is furthest behind its share, `weight x samples so far`
    minus its samples; if several are, from the first of them. Megatron-core's `build_blending_indices` is the same
    loop.
    """
    dataset_index = np.empty(size, dtype=np.int16)
    dataset_sample_index = np.empty(size, dtype=np.int64)
    taken = [0] * len(weights)
    for sample in range(size):
        so_far = float(max(sample, 1))
        behind = [weight * so_far - count for weight, count in zip(weights, taken)]
        chosen = behind.index(max(behind))
        dataset_index[sample], dataset_sample_index[sample] = chosen, taken[chosen]
        taken[chosen] += 1
    return {"dataset_index": dataset_index, "dataset_sample_index": dataset_sample_index}
