"""Samples for GPT from indexed datasets, one or a blend of several, with Megatron's order of samples.

`sample_index.py` has the arrays and their rules, and `index_cache.py` keeps them on disk, next to the data or in
`data.cache`. No rank holds tokens in memory, because a sample is cut from the mapped files when a microbatch needs it.
The position of a run is one number, the samples consumed so far, so a run can continue under any other layout.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from labkit.config import RunConfig
from labkit.config.errors import counted
from labkit.data.index_cache import cached, checksum
from labkit.data.indexed import IndexedDataset
from labkit.data.sample_index import TooFewTokensError, build_blending_indices, build_indices, normalized

SURPLUS = 0.005
"""Extra samples that each dataset of a blend has, as a share of those that its weight asks for (Megatron's
`mid_level_dataset_surplus`)."""


class IndexedGPTDataset:
    """Samples of `seq_length + 1` tokens from the documents of one split: `dataset[i]` is the i-th to train on."""

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range | None = None,
        *,
        seq_length: int,
        num_samples: int | None = None,
        seed: int = 1234,
        name: str = "train",
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        """documents: sequences of the split, by default all. num_samples: build as many epochs as it takes to have at
        least this many samples; None builds one epoch. name: name of the split. cache: folder for the index arrays.

        Raises:
            ValueError: the ids are not integers, or the documents are too short for one sample.
            ConfigError: the cache cannot be written.
        """
        if indexed.dtype.kind == "f":
            raise ValueError(f"{indexed.idx_path}: holds {indexed.dtype.name}; token ids are integers")
        self.indexed, self.seq_length, self.name, self.prefix = indexed, seq_length, name, indexed.prefix
        documents = range(len(indexed)) if documents is None else documents
        numbers = {"seq_length": seq_length, "num_samples": num_samples, "seed": seed}
        lengths = indexed.sequence_lengths
        key = {
            "sequence_lengths": checksum(lengths[documents.start : documents.stop]),
            "documents": [documents.start, documents.stop],
            **numbers,
        }
        arrays = cached(cache, key, lambda: build_indices(lengths, documents, **numbers))
        self.document_index = arrays["document_index"]
        """Order of documents in the stream of all epochs."""
        self.sample_index = arrays["sample_index"]
        """Place in `document_index` and offset of each sample's first token, and of that of one sample more."""
        self.shuffle_index = arrays["shuffle_index"]
        """Order of the samples."""

    def __len__(self) -> int:
        """Return the number of samples in all epochs; it is at least `num_samples`."""
        return len(self.sample_index) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        """Return sample `index` in the order of training: `seq_length + 1` ids, int64.

        Raises:
            IndexError: there is no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of the {self.name} split of {self.prefix}, which has {len(self)}")
        at = int(self.shuffle_index[index])
        (first, offset), (last, end) = self.sample_index[at : at + 2].tolist()
        documents = self.document_index[first : last + 1].tolist()
        if first == last:
            return self.indexed.get(documents[0], offset, end + 1 - offset).astype(np.int64)
        parts = [self.indexed.get(documents[0], offset), *map(self.indexed.get, documents[1:-1])]
        return np.concatenate([*parts, self.indexed.get(documents[-1], 0, end + 1)], dtype=np.int64)

    def ordered(self, position: int) -> np.ndarray:
        """Return sample `position` of a run; after the last sample the order begins again."""
        return self[position % len(self)]


class BlendedDataset:
    """Samples of several datasets of one kind, mixed by weight."""

    def __init__(
        self,
        datasets: Sequence[Any],
        weights: Sequence[float],
        size: int,
        *,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        """datasets: each has `prefix`, `name`, `len`, and samples by number. weights: shares of the datasets, of which
        only the ratios count. size: samples of the blend.

        Raises:
            ValueError: a dataset has fewer samples than the blend takes from it.
        """
        self.datasets, self.name = list(datasets), datasets[0].name
        weights = normalized(weights)
        arrays = cached(cache, {"blend": weights, "size": size}, lambda: build_blending_indices(weights, size))
        self.dataset_index = arrays["dataset_index"]
        """Dataset of each sample."""
        self.dataset_sample_index = arrays["dataset_sample_index"]
        """Number of the sample within that dataset."""
        for number, taken in enumerate(np.bincount(self.dataset_index, minlength=len(self.datasets))):
            if taken > len(self.datasets[number]):
                prefix, there = self.datasets[number].prefix, len(self.datasets[number])
                wanted = counted(int(taken), "sample")
                raise ValueError(f"the blend takes {wanted} of {prefix}, which has {there:,}; build more of it")

    def __len__(self) -> int:
        """Return the number of samples in the blend."""
        return len(self.dataset_index)

    def __getitem__(self, index: int) -> Any:
        """Return sample `index` in the order of training, in the form in which its dataset gives it."""
        return self.datasets[self.dataset_index[index]][int(self.dataset_sample_index[index])]

    def ordered(self, position: int) -> Any:
        """Return sample `position` of a run; after the last sample the order begins again."""
        return self[position % len(self)]


# ---- from a configuration ----


PartBuilder = Callable[..., Any]
"""(indexed dataset, range of its documents, *, num_samples, name, cache) -> samples of these documents."""


class IndexedSource:
    """The indexed datasets of a configuration, opened once; `split` makes the dataset of each split."""

    def __init__(self, config: RunConfig, build: PartBuilder, count: Callable[[IndexedDataset], int] = len) -> None:
        """build: makes the samples of one split of one dataset. count: number of documents of a dataset, which are
        divided among the splits.

        Raises FileNotFoundError and ValueError as `IndexedDataset` does."""
        self.config, self._build, self._count = config, build, count
        self.weights, prefixes = zip(*config.data.sources)
        """Shares of the datasets in a blend; None without weights."""
        self.indexed = [IndexedDataset(prefix) for prefix in prefixes]

    def split(self, name: str, begin: float, end: float, samples: int) -> Any:
        """Return the samples of the documents from share `begin` to share `end`, at least `samples` of them.

        Without weights each dataset of a blend is read once, so the blend has no more samples than its datasets have.

        Raises:
            ValueError: the documents are too short for one sample.
            ConfigError: `data.cache` cannot be written.
        """
        if len(self.indexed) == 1 and self.weights[0] is None:
            return self._part(self.indexed[0], name, begin, end, samples)
        if self.weights[0] is None:
            parts = [self._part(one, name, begin, end, None) for one in self.indexed]
            weights = list(map(len, parts))
            size = min(samples, sum(weights))
        else:
            weights = normalized(self.weights)
            targets = [math.ceil(samples * weight) for weight in weights]
            built = [math.ceil(target * (1 + SURPLUS)) for target in targets]
            parts = [self._part(one, name, begin, end, most) for one, most in zip(self.indexed, built)]
            size = sum(targets)
        return BlendedDataset(parts, weights, size, cache=self._cache(self.indexed[0]))

    def _part(self, indexed: IndexedDataset, name: str, begin: float, end: float, samples: int | None) -> Any:
        """Return one split of one dataset. Its borders are rounded to whole documents, as in Megatron."""
        documents = self._count(indexed)
        part = range(round(begin * documents), round(end * documents))
        try:
            return self._build(indexed, part, num_samples=samples, name=name, cache=self._cache(indexed))
        except TooFewTokensError as error:
            words = f"the {name} split ({end - begin:.0%} of {counted(documents, 'document')}) of {indexed.prefix}"
            advice = "give more documents, a shorter model.seq_length or another data.split"
            raise ValueError(f"data: {words} has {error}; {advice}") from None

    def _cache(self, indexed: IndexedDataset) -> str | None:
        """Return the folder of the index arrays; None if none is given and none can be made next to the data."""
        if self.config.data.cache is not None:
            return self.config.data.cache
        beside = f"{indexed.prefix}.cache"
        place = beside if os.path.isdir(beside) else os.path.dirname(beside) or "."
        return beside if os.access(place, os.W_OK) else None


def gpt_part(config: RunConfig) -> PartBuilder:
    """Return the function that builds the GPT samples of one split of one dataset."""
    return partial(IndexedGPTDataset, seq_length=config.model.seq_length, seed=config.train.seed)
