"""BERT's samples, equal to megatron-core's: two segments of sentences, masked words, the order of the segments.

A sample is `[CLS] first segment [SEP] second segment [SEP]`. The sentences of the sample are cut after a random one
into two segments, and in half of the samples these are swapped (sentence order, arXiv 1909.11942). As long as both
together have more tokens than the target, the longer one loses a token at a random end. 15% of the tokens must be
predicted, as n-grams of whole words (`masking.py`). Padding fills the rest of the sequence.

The layout of a batch is `labkit.train.bert_step`'s. Source: `BERTMaskedWordPieceDataset` of
megatron/core/datasets/bert_dataset.py, megatron-core 0.16.1. There a sample with a target below 7 predicts nothing, so
its loss is 0 / 0; here it predicts one token.

Shapes: B micro batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from labkit.data.masked.masking import LEAST_TARGET, continuations, mask_ngrams, words_of
from labkit.data.masked.sentence_samples import Sample, Split, sentence_splits
from labkit.data.text import load_tokenizer, vocabulary_size

if TYPE_CHECKING:
    from labkit.config import DataConfig, RunConfig

FEWEST = 5
"""Positions of the shortest sample: three special tokens and a token in each segment."""


class SpecialTokens(NamedTuple):
    """Ids of the tokens that BERT adds to a text."""

    cls: int
    """Begins a sample; the sentence-order head reads its position."""
    sep: int
    """Ends each of the two segments."""
    mask: int
    """Shown in place of a token to predict."""


def special_tokens(data: DataConfig) -> SpecialTokens:
    """Return `[CLS]`, `[SEP]` and `[MASK]` of the tokenizer, or, if it lacks one, three ids after its vocabulary."""
    if data.tokenizer is not None:
        tokenizer = load_tokenizer(data.tokenizer)
        cls, sep, mask = map(tokenizer.token_to_id, ("[CLS]", "[SEP]", "[MASK]"))
        if cls is not None and sep is not None and mask is not None:
            return SpecialTokens(cls, sep, mask)
    size = vocabulary_size(data.tokenizer)
    return SpecialTokens(size, size + 1, size + 2)


@dataclass(frozen=True, eq=False)
class BertMaker:
    """Makes samples of `seq_length` positions from sentences."""

    seq_length: int
    """Positions of a sample, with padding."""
    special: SpecialTokens
    """Ids of the added tokens."""
    text_tokens: int
    """Size of the text's vocabulary; a masked position may show a random token of it."""
    continues: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))
    """True at each id whose token continues a word; an id beyond the end continues none."""
    two_segments: bool = True
    """False: all sentences are one segment, for a BERT without the head of the sentence order."""

    @property
    def longest(self) -> int:
        """Most tokens of a sample's text."""
        return self.seq_length - 3

    @property
    def least(self) -> int:
        """Fewest sentences of a sample."""
        return 1 + self.two_segments

    def __call__(self, sentences: Sequence[np.ndarray], target: int, random: np.random.RandomState) -> Sample:
        """Return the sample of these sentences, cut to `target` tokens: the tensors of a batch by name, without B."""
        first, second, swapped = self._segments(sentences, random)
        first, second = cut(first, second, target, random)
        cls, sep, mask = self.special
        behind = [*second, sep] if len(second) else []
        tokens = np.array([cls, *first, sep, *behind], dtype=np.int64)
        masked = mask_ngrams(
            tokens,
            words_of(tokens.tolist(), self.continues, (cls, sep)),
            random,
            target_length=max(target, LEAST_TARGET),
            mask=mask,
            vocabulary=self.text_tokens,
        )
        chosen = np.zeros(len(tokens), dtype=bool)
        chosen[masked.positions] = True
        types = np.repeat([0, 1], [len(first) + 2, len(behind)])
        rest = (0, self.seq_length - len(tokens))
        return {
            "tokens_BS": np.pad(masked.tokens, rest),
            "types_BS": np.pad(types, rest),
            "labels_BS": np.pad(np.where(chosen, tokens, 0), rest),
            "loss_mask_BS": np.pad(chosen.astype(np.float32), rest),
            "padding_mask_BS": np.pad(np.ones(len(tokens), dtype=np.int64), rest),
            "is_random_B": np.array(int(swapped)),
        }

    def _segments(
        self, sentences: Sequence[np.ndarray], random: np.random.RandomState
    ) -> tuple[np.ndarray, np.ndarray, bool]:
        """Return the two segments in their order in the sample, and True if they were swapped."""
        if not self.two_segments:
            return np.concatenate(sentences), np.empty(0, np.int64), False
        pivot = random.randint(1, len(sentences)) if len(sentences) > 2 else 1
        swapped = bool(random.random_sample() < 0.5)
        first, second = np.concatenate(sentences[:pivot]), np.concatenate(sentences[pivot:])
        return (second, first, True) if swapped else (first, second, False)


def cut(
    first: np.ndarray, second: np.ndarray, target: int, random: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    """Return both segments, cut to at most `target` tokens together: the longer one loses one at a time, or the second
    if both are equally long."""
    bounds = [[0, len(first)], [0, len(second)]]
    for draw in random.random_sample(max(0, len(first) + len(second) - target)):
        (begin, end), (other_begin, other_end) = bounds
        longer = bounds[0 if end - begin > other_end - other_begin else 1]
        if draw < 0.5:
            longer[0] += 1
        else:
            longer[1] -= 1
    return first[slice(*bounds[0])], second[slice(*bounds[1])]


def build_bert_datasets(config: RunConfig) -> tuple[Split, Split, Split]:
    """Return the training, validation and test split of the configured sources, with the samples that the run reads.

    Raises:
        FileNotFoundError, ValueError, OSError: see `sentence_splits`; also ValueError for sequences shorter than the
            shortest sample, for a vocabulary without room for the special tokens, and for indexed datasets without a
            tokenizer.
    """
    length, vocab = config.model.seq_length, config.model.vocab_size
    if length < FEWEST:
        raise ValueError(
            f"model.seq_length = {length}: a sample of BERT is [CLS] first segment [SEP] second segment [SEP]; give "
            f"{FEWEST} or more"
        )
    if config.data.sources and config.data.tokenizer is None:
        raise ValueError(
            "data.tokenizer = None: indexed datasets hold only ids, and BERT needs the tokenizer that made them, for "
            "its [CLS], [SEP] and [MASK]; name its file"
        )
    text_tokens, special = vocabulary_size(config.data.tokenizer), special_tokens(config.data)
    if (need := max(text_tokens, *(token + 1 for token in special))) > vocab:
        raise ValueError(
            f"model.vocab_size = {vocab}: the tokenizer has {text_tokens} tokens, and BERT's [CLS], [SEP] and [MASK] "
            f"have the ids {special.cls}, {special.sep} and {special.mask}; set it to {need} or more"
        )
    none = np.zeros(0, dtype=bool)  # the bundled tokenizer marks no continuation, and its file need not be read
    marked = none if config.data.tokenizer is None else continuations(load_tokenizer(config.data.tokenizer))
    maker = BertMaker(length, special, text_tokens, marked, config.model.bert_binary_head)
    return sentence_splits(config, maker)
