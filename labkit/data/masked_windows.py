"""BERT's samples from a plain stream of tokens: windows of the text, cut in two, with masked tokens.

A sample is `[CLS] first part [SEP] second part [SEP]`, as the corpus has no marks of sentences. Each window of the text
is cut at a random place, and in half of the samples the parts change places (sentence order, arXiv 1909.11942). 15% of
the tokens are to be predicted: n-grams of whole words (`masking.py`). One sample in ten is shorter, with padding
behind, so that a model also sees padding.

The layout of a batch is `labkit.train.bert_step`'s. Every choice depends on the seed and on the position in the order
of samples alone, so each layout reads the same global batch. `gpt_data` has the rule that shares it over ranks.

Shapes: B micro batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from labkit.data.gpt_data import Samples, build_gpt_datasets, microbatch_positions
from labkit.data.masking import continuations, mask_ngrams, words_of
from labkit.data.text import load_tokenizer, vocabulary_size

if TYPE_CHECKING:
    import torch

    from labkit.config import DataConfig, RunConfig
    from labkit.parallel.groups import ParallelGroups

SHORT = 0.1
"""Share of the samples that are shorter than the sequence (Megatron-LM's `short_seq_prob`)."""
FEWEST = 5
"""Positions of the shortest sample: three special tokens and a token in each part."""


class SpecialTokens(NamedTuple):
    """Ids of the tokens that BERT adds to a text."""

    cls: int
    """Begins a sample; the sentence-order head reads its position."""
    sep: int
    """Ends each of the two parts."""
    mask: int
    """Stands in the place of a predicted token."""


def special_tokens(data: DataConfig) -> SpecialTokens:
    """`[CLS]`, `[SEP]` and `[MASK]` of the tokenizer. A tokenizer without all three gets them behind its vocabulary."""
    if data.tokenizer is not None:
        tokenizer = load_tokenizer(data.tokenizer)
        cls, sep, mask = map(tokenizer.token_to_id, ("[CLS]", "[SEP]", "[MASK]"))
        if cls is not None and sep is not None and mask is not None:
            return SpecialTokens(cls, sep, mask)
    size = vocabulary_size(data.tokenizer)
    return SpecialTokens(size, size + 1, size + 2)


@dataclass(eq=False)
class MaskedWindows:
    """Samples of one split: `ordered(n)` is the n-th to train on."""

    windows: Samples
    """Windows of S - 3 tokens of the text, in the order of training."""
    special: SpecialTokens
    """Ids of the added tokens."""
    text_tokens: int
    """Tokens of the text's vocabulary, of which a masked place may show a random one."""
    seed: int
    """Of every choice, together with the position of the sample."""
    continues: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))
    """By id, True where a token continues a word; other tokens are words of their own."""

    @property
    def name(self) -> str:
        """Name of the split, for messages."""
        return self.windows.name

    def __len__(self) -> int:
        """Samples of one epoch."""
        return len(self.windows)

    def ordered(self, position: int) -> dict[str, np.ndarray]:
        """Sample `position` of the endless sequence epoch 0, epoch 1, ..: the tensors of a batch without B, by name."""
        draw = np.random.default_rng([self.seed, position])
        window = self.windows.ordered(position)
        length = len(window) + 3
        if draw.random() < SHORT:
            window = window[: draw.integers(2, len(window), endpoint=True)]
        cut = int(draw.integers(1, len(window)))
        swapped = bool(draw.random() < 0.5)
        first, second = (window[cut:], window[:cut]) if swapped else (window[:cut], window[cut:])
        cls, sep, mask = self.special
        tokens = np.concatenate([[cls], first, [sep], second, [sep]])
        masked = mask_ngrams(
            tokens,
            words_of(tokens.tolist(), self.continues, (cls, sep)),
            np.random.RandomState(draw.integers(2**32)),
            target_length=max(length - 3, 7),  # 15% of 7 is one token, which the shortest samples predict
            mask=mask,
            vocabulary=self.text_tokens,
        )
        chosen = np.zeros(len(tokens), dtype=bool)
        chosen[masked.positions] = True
        types = np.repeat([0, 1], [len(first) + 2, len(second) + 1])
        rest = (0, length - len(tokens))
        return {
            "tokens_BS": np.pad(masked.tokens, rest),
            "types_BS": np.pad(types, rest),
            "labels_BS": np.pad(np.where(chosen, tokens, 0), rest),
            "loss_mask_BS": np.pad(chosen.astype(np.float32), rest),
            "padding_mask_BS": np.pad(np.ones(len(tokens), dtype=np.int64), rest),
            "is_random_B": np.array(int(swapped)),
        }


def build_bert_datasets(config: RunConfig) -> tuple[MaskedWindows, MaskedWindows, MaskedWindows]:
    """Train, validation and test split of the configured text, in this order of the text. Train is shuffled.

    Raises:
        FileNotFoundError, ValueError: as `gpt_data.build_gpt_datasets`; also ValueError for sequences shorter than the
            shortest sample, for a vocabulary without room for the special tokens, and for indexed datasets without a
            tokenizer.
    """
    length, vocab = config.model.seq_length, config.model.vocab_size
    if length < FEWEST:
        raise ValueError(
            f"model.seq_length = {length}: a sample of BERT is [CLS] first part [SEP] second part [SEP]; give {FEWEST} "
            "or more"
        )
    if config.data.sources and config.data.tokenizer is None:
        raise ValueError(
            "data.tokenizer = None: indexed datasets hold ids alone, and BERT needs the tokenizer that made them, for "
            "its [CLS], [SEP] and [MASK]; name its JSON file"
        )
    text_tokens, special = vocabulary_size(config.data.tokenizer), special_tokens(config.data)
    if (need := max(text_tokens, *(token + 1 for token in special))) > vocab:
        raise ValueError(
            f"model.vocab_size = {vocab}: the tokenizer has {text_tokens} tokens, and BERT's [CLS], [SEP] and [MASK] "
            f"have the ids {special.cls}, {special.sep} and {special.mask}; set it to {need} or more"
        )
    windows = build_gpt_datasets(config.replaced({"model.seq_length": length - 4}))  # these have a token more
    none = np.zeros(0, dtype=bool)  # the bundled tokenizer marks no continuation, and its file need not be read
    marked = none if config.data.tokenizer is None else continuations(load_tokenizer(config.data.tokenizer))
    train, valid, test = (MaskedWindows(each, special, text_tokens, config.train.seed, marked) for each in windows)
    return train, valid, test


def bert_data_iterator(
    dataset: MaskedWindows, config: RunConfig, groups: ParallelGroups, *, consumed_samples: int = 0
) -> Iterator[dict[str, torch.Tensor]]:
    """Microbatches of this rank, without end, from the first behind `consumed_samples` on.

    Yields the tensors that `labkit.train.bert_step` names, on the rank's device.

    Raises:
        ValueError: the dataset has no sample, or the batch sizes do not divide.
    """
    if len(dataset) == 0:
        raise ValueError(f"data: the {dataset.name} split is empty; give it a share in data.split")
    microbatch_positions(config, dp=groups.dp.size, dp_rank=groups.dp.rank, step=0)  # refuse now, not at the first next
    return _microbatches(dataset, config, groups, consumed_samples)


def _microbatches(
    dataset: MaskedWindows, config: RunConfig, groups: ParallelGroups, consumed: int
) -> Iterator[dict[str, torch.Tensor]]:
    import torch

    for step in count():
        own = microbatch_positions(config, dp=groups.dp.size, dp_rank=groups.dp.rank, step=step)
        for positions in consumed + own:
            samples = [dataset.ordered(int(position)) for position in positions]
            batch = {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in samples[0]}
            if groups.device.type == "cuda":  # a copy from memory that is not pinned makes the host wait for the GPU
                batch = {name: each.pin_memory().to(groups.device, non_blocking=True) for name, each in batch.items()}
            yield batch
