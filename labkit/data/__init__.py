"""Text in, token batches out: the same global batch of every step in every layout."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.data.gpt_data import GPTDataset as GPTDataset
    from labkit.data.gpt_data import build_gpt_datasets as build_gpt_datasets
    from labkit.data.gpt_data import data_iterator as data_iterator
    from labkit.data.gpt_data import unigram_entropy as unigram_entropy
    from labkit.data.text import bundled_text as bundled_text
    from labkit.data.text import load_tokenizer as load_tokenizer

_MODULES = {
    "bundled_text": "text",
    "load_tokenizer": "text",
    "GPTDataset": "gpt_data",
    "build_gpt_datasets": "gpt_data",
    "data_iterator": "gpt_data",
    "unigram_entropy": "gpt_data",
}

__all__ = list(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
