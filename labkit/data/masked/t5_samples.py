"""T5's samples, equal to megatron-core's: spans of words are taken out, and the decoder writes them.

    text      we choose a few words and hide them
    encoder   we <0> words and <1>
    decoder   reads [BOS] <0> choose a few <1> hide them, writes <0> choose a few <1> hide them [EOS]

`<0>`, `<1>`, ... are the *sentinels*, one for each span in the order of the text (arXiv 1910.10683, section 3.1.4). The
spans are n-grams of whole words with 15% of the tokens, most of them several words long (`masking.py`). A sample is a
run of whole sentences, cut at its end to its target. With a target below 7 one token is taken out, in Megatron none.

A sample has these tensors; a batch stacks them. Source: `T5MaskedWordPieceDataset` of
megatron/core/datasets/t5_dataset.py, megatron-core 0.16.1, which has the same names.

| key         | shape, type | meaning                                                        |
|-------------|-------------|----------------------------------------------------------------|
| `text_enc`  | [E] int64   | text with sentinels for its spans, then padding (0)            |
| `text_dec`  | [D] int64   | `[BOS]`, then each span after its sentinel, then padding (0)   |
| `labels`    | [D] int64   | the same without `[BOS]`, then `[EOS]`, then padding (0)       |
| `loss_mask` | [D] float32 | 1 for labels, 0 for padding                                    |
| `enc_mask`  | [E] int64   | 1 for tokens of the encoder, 0 for padding                     |

Shapes: E encoder sequence, D decoder sequence.
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
    from tokenizers import Tokenizer

    from labkit.config import DataConfig, RunConfig

SENTINELS = 100
"""Sentinels of a tokenizer that has none (Megatron-LM's `--vocab-extra-ids`, and T5's own number)."""
BEGINS, ENDS = ("[BOS]", "<s>", "<pad>"), ("[EOS]", "</s>")
"""Tokens that begin and end a decoder's text, the first that a vocabulary has; T5's own begins with its padding."""


class T5Tokens(NamedTuple):
    """Ids of the tokens that T5 adds to a text."""

    begin: int
    """Begins the decoder's input."""
    end: int
    """Ends the decoder's output."""
    sentinels: tuple[int, ...]
    """Take the place of spans, the first that of the first span."""


def t5_tokens(data: DataConfig) -> T5Tokens:
    """Return `[BOS]`, `[EOS]` and `<extra_id_0>`, `<extra_id_1>`, ... of the tokenizer, or ids after its vocabulary."""
    if data.tokenizer is not None and (found := _of(load_tokenizer(data.tokenizer))) is not None:
        return found
    size = vocabulary_size(data.tokenizer)
    return T5Tokens(size, size + 1, tuple(range(size + 2, size + 2 + SENTINELS)))


def _of(tokenizer: Tokenizer) -> T5Tokens | None:
    """Return the tokens of a tokenizer; None if one is missing."""
    begin, end = (
        next((found for name in names if (found := tokenizer.token_to_id(name)) is not None), None)
        for names in (BEGINS, ENDS)
    )
    sentinels: list[int] = []
    while (number := tokenizer.token_to_id(f"<extra_id_{len(sentinels)}>")) is not None:
        sentinels.append(number)
    return None if begin is None or end is None or not sentinels else T5Tokens(begin, end, tuple(sentinels))


def t5_sample(
    tokens: np.ndarray, spans: Sequence[Sequence[int]], special: T5Tokens, *, encoder_length: int, decoder_length: int
) -> Sample:
    """Return the tensors of one sample; the table at the top of this file has them.

    tokens: ids of the text, at most `encoder_length`. spans: positions to take out, in the order of the text. A span
    for which the decoder has no room, or for which there is no sentinel, stays in the text, and so do those after it.
    """
    encoder, written, behind = list[int](), list[int](), 0
    for sentinel, span in zip(special.sentinels, spans):
        if len(written) + 1 + len(span) + 1 > decoder_length:
            break
        encoder += [*tokens[behind : span[0]].tolist(), sentinel]
        written += [sentinel, *tokens[list(span)].tolist()]
        behind = span[-1] + 1
    encoder += tokens[behind:].tolist()
    reads, labels = [special.begin, *written], [*written, special.end]

    def padded(ids: Sequence[int], length: int) -> np.ndarray:
        return np.pad(np.array(ids, dtype=np.int64), (0, length - len(ids)))

    return {
        "text_enc": padded(encoder, encoder_length),
        "text_dec": padded(reads, decoder_length),
        "labels": padded(labels, decoder_length),
        "loss_mask": padded([1] * len(labels), decoder_length).astype(np.float32),
        "enc_mask": padded([1] * len(encoder), encoder_length),
    }


@dataclass(frozen=True, eq=False)
class T5Maker:
    """Makes samples from sentences."""

    encoder_length: int
    """Positions of the encoder, with padding."""
    decoder_length: int
    """Positions of the decoder, with padding."""
    special: T5Tokens
    """Ids of the added tokens."""
    continues: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))
    """True at each id whose token continues a word; an id beyond the end continues none."""
    least: int = 1
    """Fewest sentences of a sample."""

    @property
    def longest(self) -> int:
        """Most tokens of a sample's text; Megatron leaves two places free."""
        return self.encoder_length - 2

    def __call__(self, sentences: Sequence[np.ndarray], target: int, random: np.random.RandomState) -> Sample:
        """Return the sample of these sentences, cut to `target` tokens: the tensors of a batch by name, without B."""
        tokens = np.concatenate(sentences)[:target].astype(np.int64)
        masked = mask_ngrams(
            tokens,
            words_of(tokens.tolist(), self.continues, ()),
            random,
            target_length=max(target, LEAST_TARGET),
            mask=0,
            vocabulary=None,
            geometric=True,
        )
        lengths = {"encoder_length": self.encoder_length, "decoder_length": self.decoder_length}
        return t5_sample(tokens, masked.spans, self.special, **lengths)


def build_t5_datasets(config: RunConfig, decoder_length: int | None = None) -> tuple[Split, Split, Split]:
    """Return the training, validation and test split of the configured sources, with the samples that the run reads.

    The encoder has `model.seq_length` positions. decoder_length: positions of the decoder; None is
    `model.decoder_seq_length`, or as many as the encoder has.

    Raises:
        FileNotFoundError, ValueError, OSError: see `sentence_splits`; also ValueError for sequences that are too short,
            for a vocabulary without room for the special tokens, and for indexed datasets without a tokenizer.
    """
    length, vocab = config.model.seq_length, config.model.vocab_size
    decoder_length = decoder_length or config.model.decoder_seq_length or length
    if length < 4 or decoder_length < 3:
        raise ValueError(
            f"model.seq_length = {length}, {decoder_length} for the decoder: T5's encoder needs 4 positions, and its "
            "decoder 3, for a sentinel, a token and [EOS]; give more"
        )
    if config.data.sources and config.data.tokenizer is None:
        raise ValueError(
            "data.tokenizer = None: indexed datasets hold only ids, and T5 needs the tokenizer that made them, for "
            "its [BOS], [EOS] and <extra_id_0>; name its file"
        )
    text_tokens, special = vocabulary_size(config.data.tokenizer), t5_tokens(config.data)
    if (
        need := max(text_tokens, special.begin + 1, special.end + 1, *(token + 1 for token in special.sentinels))
    ) > vocab:
        raise ValueError(
            f"model.vocab_size = {vocab}: the tokenizer has {text_tokens} tokens, and T5's [BOS], [EOS] and "
            f"{len(special.sentinels)} sentinels go up to id {need - 1}; set it to {need} or more"
        )
    none = np.zeros(0, dtype=bool)  # the bundled tokenizer marks no continuation, and its file need not be read
    marked = none if config.data.tokenizer is None else continuations(load_tokenizer(config.data.tokenizer))
    return sentence_splits(config, T5Maker(length, decoder_length, special, marked))
