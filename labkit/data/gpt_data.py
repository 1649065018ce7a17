"""Samples of a token stream for GPT, and what a run reads of each split.

A sample is s + 1 tokens, where s is `seq_length`: its first s are the inputs, its last s the labels. A sample begins
with the last token of the one before it, so every token of the samples but the first is a label once per epoch.
Megatron-LM's GPTDataset does the same with one document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from labkit.config.errors import counted
from labkit.data.text import bundled_text, bundled_tokens, encode, load_tokenizer, read_text, vocabulary_size

if TYPE_CHECKING:
    from labkit.config import DataConfig, RunConfig

SPLITS = ("train", "valid", "test")


class Samples(Protocol):
    """Samples of one split, in the order in which a run reads them."""

    @property
    def name(self) -> str:
        """Name of the split, for messages."""
        ...

    def __len__(self) -> int:
        """Return the number of samples; 0 for a split that the run does not read."""
        ...

    def ordered(self, position: int) -> np.ndarray:
        """Return sample `position` of the run, `seq_length + 1` ids, int64; every position from 0 on has one."""
        ...


@dataclass(eq=False)
class GPTDataset:
    """Windows of `seq_length + 1` tokens: `dataset[i]` is the i-th of the text, `ordered(n)` the n-th to train on."""

    tokens: np.ndarray
    """Token ids of this split, one dimension, any integer type."""
    seq_length: int
    """Input tokens of one sample."""
    seed: int = 0
    """Seed of the shuffle."""
    shuffle: bool = False
    """Whether each epoch visits the samples in a shuffled order of its own."""
    name: str = "train"
    """Name of this split, for messages."""
    _order: tuple[int, np.ndarray] | None = field(default=None, init=False, repr=False)
    """The epoch that was read most recently, and its order."""

    def __len__(self) -> int:
        """Return the number of samples in one epoch."""
        return max(0, len(self.tokens) - 1) // self.seq_length

    def __getitem__(self, index: int) -> np.ndarray:
        """Return window `index` of the text, `seq_length + 1` ids, int64."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of the {self.name} split, which has {len(self)}")
        start = index * self.seq_length
        return self.tokens[start : start + self.seq_length + 1].astype(np.int64)

    def order(self, epoch: int) -> np.ndarray:
        """Return the permutation of sample indices that `epoch` visits; it depends on seed and epoch alone.

        It sorts by the raw output of PCG64, because numpy promises never to change that, unlike
        `Generator.permutation`.
        """
        if not self.shuffle:
            return np.arange(len(self))
        keys = np.random.PCG64([self.seed, epoch]).random_raw(len(self))
        return np.argsort(keys, kind="stable")

    def ordered(self, position: int) -> np.ndarray:
        """Return sample `position` of the endless sequence epoch 0, epoch 1, ..."""
        epoch, place = divmod(position, len(self))
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self.order(epoch))
        return self[int(self._order[1][place])]


def check_vocabulary(data: DataConfig, vocab_size: int) -> None:
    """Raise ValueError if the tokenizer has more tokens than `vocab_size`, or the bundled one fewer than half."""
    size = vocabulary_size(data.tokenizer)
    if data.tokenizer is None and vocab_size > 2 * size:
        raise ValueError(
            f"model.vocab_size = {vocab_size}: data.tokenizer is not given, and the bundled tokenizer has {size} "
            f"tokens, so {vocab_size - size} rows of the embedding would see no token; give data.tokenizer a file with "
            f"about {vocab_size} tokens, such as GPT-2's vocab.json (50257, with merges.txt next to it) or BERT's "
            f"vocab.txt (30522), or set model.vocab_size to {size} (BERT and T5: and their own tokens)"
        )
    if size > vocab_size:
        raise ValueError(
            f"tokenizer mismatch: {data.tokenizer or 'the bundled tokenizer'} has {size} tokens (the largest id plus "
            f"1), model.vocab_size is {vocab_size}; set model.vocab_size to {size} or more, or name another "
            "data.tokenizer"
        )


def load_tokens(data: DataConfig, vocab_size: int) -> np.ndarray:
    """Return the token ids of the configured text, one dimension.

    Raises:
        FileNotFoundError: the text or the tokenizer is missing.
        ValueError: the text is not UTF-8, the tokenizer's file is not one, or `check_vocabulary` rejects its size.
        ModuleNotFoundError: the text or the tokenizer is not the bundled one, and the library `tokenizers` is missing.
    """
    check_vocabulary(data, vocab_size)
    if data.path is None and data.tokenizer is None:
        return bundled_tokens()
    text = bundled_text() if data.path is None else read_text(data.path)
    return encode(load_tokenizer(data.tokenizer), text, data.tokenizer)


def build_gpt_datasets(config: RunConfig) -> tuple[Samples, Samples, Samples]:
    """Return the training, validation and test split, which follow each other in the text. Training is shuffled.

    Indexed datasets (`data.path` with a prefix, `data.blend`) are read in Megatron's order (`labkit.data.indexed_gpt`).

    Raises:
        FileNotFoundError, ValueError: see `load_tokens`, `DataConfig.shares` and `IndexedDataset`; also ValueError
            where a split with a share of its own is too short for one sample.
    """
    shares = config.data.shares
    if config.data.sources:
        return _indexed_splits(config, shares)
    tokens = load_tokens(config.data, config.model.vocab_size)
    bounds = [0, *(round(len(tokens) * sum(shares[: index + 1])) for index in range(len(SPLITS)))]
    need = config.model.seq_length + 1
    datasets = []
    for name, share, start, end in zip(SPLITS, shares, bounds[:-1], bounds[1:]):
        if share > 0 and end - start < need:
            raise ValueError(
                f"data: the {name} split ({share:.0%} of {counted(len(tokens), 'token')}) has "
                f"{counted(end - start, 'token')}, but one sample needs model.seq_length + 1 = {need:,}; "
                "give a longer text, a shorter seq_length or another data.split"
            )
        datasets.append(
            GPTDataset(tokens[start:end], need - 1, seed=config.train.seed, shuffle=name == "train", name=name)
        )
    train, valid, test = datasets
    return train, valid, test


def _indexed_splits(config: RunConfig, shares: Sequence[float]) -> tuple[Samples, Samples, Samples]:
    """Return the splits of indexed datasets, with the samples that the run reads; a split that it does not is empty."""
    from labkit.data.indexed_gpt import IndexedSource, gpt_part  # a run on a plain text does not need it

    source = IndexedSource(config, gpt_part(config))
    train, valid, test = (
        source.split(name, sum(shares[:place]), sum(shares[: place + 1]), count)
        if count
        else GPTDataset(np.empty(0, np.int64), config.model.seq_length, name=name)
        for place, (name, count) in enumerate(zip(SPLITS, samples_of_splits(config)))
    )
    return train, valid, test


def samples_of_splits(config: RunConfig) -> tuple[int, int, int]:
    """Return how many samples a run reads of each split; 0 for a split without a share."""
    evaluated = config.train.eval_steps * config.train.global_batch_size
    train = config.data.num_samples or config.train.steps * config.train.global_batch_size
    train, valid, test = (
        count if share > 0 else 0 for count, share in zip((train, evaluated, evaluated), config.data.shares)
    )
    return train, valid, test


def unigram_entropy(tokens: Any) -> float:
    """Return the entropy of the token frequencies, nats per token: the loss of the best model that ignores all context.

    tokens: any sequence or array of non-negative integers.

    Raises:
        ValueError: there are no tokens.
    """
    tokens = np.asarray(tokens).reshape(-1)
    if tokens.size == 0:
        raise ValueError("unigram_entropy of no tokens")
    counts = np.bincount(tokens)
    shares = counts[counts > 0] / tokens.size
    return float(-(shares * np.log(shares)).sum())
