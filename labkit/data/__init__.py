"""Text in, token batches out: the same global batch of every step in every layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.lazy import public_names

if TYPE_CHECKING:
    from labkit.data.batches import data_iterator as data_iterator
    from labkit.data.gpt_data import GPTDataset as GPTDataset
    from labkit.data.gpt_data import build_gpt_datasets as build_gpt_datasets
    from labkit.data.gpt_data import unigram_entropy as unigram_entropy
    from labkit.data.indexed import IndexedDataset as IndexedDataset
    from labkit.data.indexed import IndexedDatasetBuilder as IndexedDatasetBuilder
    from labkit.data.indexed_gpt import BlendedDataset as BlendedDataset
    from labkit.data.indexed_gpt import IndexedGPTDataset as IndexedGPTDataset
    from labkit.data.text import bundled_text as bundled_text
    from labkit.data.text import load_tokenizer as load_tokenizer

__all__, __getattr__, __dir__ = public_names(__name__)
