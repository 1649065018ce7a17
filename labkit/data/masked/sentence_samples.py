"""Datasets of BERT and T5: runs of whole sentences, from indexed datasets or a text, made into samples one by one.

`sentence_index.py` says which sentences are sample k. A *maker* makes the tensors of the sample: `bert_samples.py` and
`t5_samples.py` have one each. Its random choices depend on `seed + k` alone, as in Megatron. So every layout reads the
same global batch, and a run continues from one number, the samples consumed so far.

An indexed dataset has sentences if it was prepared with `--sentences`. In a text, a document begins at a line without
indentation after an empty line. In most texts that is a paragraph, but in the bundled text an entry. The tokens of a
text are those that a GPT reads; each belongs to the sentence in which it begins.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from labkit.config import RunConfig
from labkit.config.errors import counted
from labkit.data.documents import borders_of
from labkit.data.gpt_data import SPLITS, check_vocabulary, samples_of_splits
from labkit.data.index_cache import cached, checksum
from labkit.data.indexed import IndexedDataset
from labkit.data.indexed_gpt import BlendedDataset, IndexedSource
from labkit.data.masked.sentence_index import TooFewSentencesError, build_sentence_index
from labkit.data.text import located_tokens

Sample = dict[str, np.ndarray]
"""The tensors of a sample by name, without the dimension of the batch."""


class Sentences(Protocol):
    """Documents of sentences: an `IndexedDataset` or `TextSentences`."""

    sequence_lengths: np.ndarray
    """Tokens of each sentence."""
    document_indices: np.ndarray
    """First sentence of each document, and at the end the number of sentences."""
    prefix: str
    """Name of the source, for messages."""

    def __getitem__(self, index: int, /) -> np.ndarray:
        """Return the ids of sentence `index`."""
        ...


class Maker(Protocol):
    """Makes samples of one family."""

    @property
    def longest(self) -> int:
        """Most tokens of a sample's text."""
        ...

    @property
    def least(self) -> int:
        """Fewest sentences of a sample."""
        ...

    def __call__(self, sentences: Sequence[np.ndarray], target: int, random: np.random.RandomState) -> Sample:
        """Return the sample of these sentences, cut to `target` tokens."""
        ...


@dataclass(eq=False)
class TextSentences:
    """A text in memory, cut into documents and sentences."""

    tokens: np.ndarray
    """Ids of the whole text."""
    starts: np.ndarray
    """First token of each sentence, and at the end the number of tokens."""
    document_indices: np.ndarray
    """First sentence of each document, and at the end the number of sentences."""
    prefix: str
    """Name of the text, for messages."""

    @staticmethod
    def of(path: str | None, tokenizer: str | None) -> TextSentences:
        """Return the text at `path` in the ids of a tokenizer; None is the bundled text, and the bundled tokenizer.

        Raises:
            FileNotFoundError, ValueError, ModuleNotFoundError: see `read_text` and `load_tokenizer`.
        """
        text, tokens, places = located_tokens(path, tokenizer)
        sentences, documents = borders_of(text)
        starts = np.searchsorted(places, [0, *sentences, len(text)])
        of_documents = starts[np.searchsorted(sentences, documents, side="right")]
        kept = np.unique(starts)  # blanks alone make no sentence
        indices = np.unique(np.searchsorted(kept, [0, *of_documents.tolist(), len(tokens)]))
        return TextSentences(tokens, kept, indices, "the bundled text" if path is None else path)

    @property
    def sequence_lengths(self) -> np.ndarray:
        """Tokens of each sentence."""
        return np.diff(self.starts)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.document_indices) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        """Return the ids of sentence `index`."""
        return self.tokens[self.starts[index] : self.starts[index + 1]]


class SentenceSamples:
    """Samples of one split: `dataset[i]` is the i-th to train on."""

    def __init__(
        self,
        source: IndexedDataset | TextSentences,
        documents: range,
        maker: Maker,
        *,
        num_samples: int | None,
        seed: int,
        name: str = "train",
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        """documents: those of the split. num_samples: pass over the documents until there are that many samples; None
        passes once. name: name of the split. cache: folder for the index array.

        Raises:
            ValueError: no document of the split gives a sample.
            ConfigError: the cache cannot be written.
        """
        self.source, self.maker, self.seed, self.name, self.prefix = source, maker, seed, name, source.prefix
        lengths, indices = source.sequence_lengths, source.document_indices
        numbers = {"longest": maker.longest, "least": maker.least, "num_samples": num_samples or 1, "seed": seed}
        borders = indices[documents.start : documents.stop + 1]
        key = {
            "sentences": checksum(lengths[borders[0] : borders[-1]]),
            "documents": [documents.start, documents.stop, checksum(borders)],
            **numbers,
        }
        try:
            found = cached(
                cache, key, lambda: {"sentence_index": build_sentence_index(lengths, indices, documents, **numbers)}
            )
        except TooFewSentencesError as error:
            words = f"data: the {name} split of {self.prefix} ({counted(len(documents), 'document')}): {error}"
            advice = "prepare indexed datasets with --sentences true, or give another data.split"
            raise ValueError(f"{words}; {advice}") from None
        self.sentence_index = found["sentence_index"]
        """First sentence, the one after the last, and target length of each sample."""

    def __len__(self) -> int:
        """Return the number of samples in all passes over the documents; it is at least `num_samples`."""
        return len(self.sentence_index)

    def __getitem__(self, index: int) -> Sample:
        """Return sample `index` in the order of training: the tensors of a batch by name, without its first dimension.

        Raises:
            IndexError: there is no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of the {self.name} split of {self.prefix}, which has {len(self)}")
        first, last, target = self.sentence_index[index].tolist()
        sentences = [self.source[number] for number in range(first, last)]
        return self.maker(sentences, target, np.random.RandomState((self.seed + index) % 2**32))

    def ordered(self, position: int) -> Sample:
        """Return sample `position` of a run; after the last sample the order begins again."""
        return self[position % len(self)]


class NoSamples:
    """A split that the run does not read."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __len__(self) -> int:
        return 0


Split = SentenceSamples | BlendedDataset | NoSamples


def sentence_splits(config: RunConfig, maker: Maker) -> tuple[Split, Split, Split]:
    """Return the training, validation and test split of the configured sources, with the samples that the run reads.

    Raises:
        FileNotFoundError, ValueError: a source cannot be read, or a split gives no sample.
        ConfigError: `data.cache` cannot be written.
    """
    shares, counts = config.data.shares, samples_of_splits(config)
    dataset = partial(SentenceSamples, maker=maker, seed=config.train.seed)
    if config.data.sources:
        build = IndexedSource(config, dataset, count=lambda indexed: indexed.num_documents).split
    else:
        check_vocabulary(config.data, config.model.vocab_size)
        text = TextSentences.of(config.data.path, config.data.tokenizer)

        def build(name: str, begin: float, end: float, samples: int) -> Split:
            documents = range(round(begin * text.num_documents), round(end * text.num_documents))
            return dataset(text, documents, num_samples=samples, name=name)

    train, valid, test = (
        build(name, sum(shares[:place]), sum(shares[: place + 1]), count) if count else NoSamples(name)
        for place, (name, count) in enumerate(zip(SPLITS, counts))
    )
    return train, valid, test
