"""Datasets of the configured model family, chosen by `model.family`.

| family  | samples                                                            | module                |
|---------|--------------------------------------------------------------------|-----------------------|
| `gpt`   | windows of the text; the next token is learned                     | `gpt_data`            |
| `mamba` | the same                                                           | `gpt_data`            |
| `bert`  | two segments of sentences; masked tokens and the order are learned | `masked/bert_samples` |
| `t5`    | sentences without some spans, which are learned                    | `masked/t5_samples`   |
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from labkit.config.choices import FAMILIES

if TYPE_CHECKING:
    from labkit.config import RunConfig


def build_datasets(config: RunConfig) -> tuple[Any, Any, Any]:
    """Return the training, validation and test split of the configured text.

    Raises:
        FileNotFoundError, ValueError: the family cannot train on the text, the tokenizer or a split.
    """
    return resolve_name(FAMILIES[config.model.family].datasets)(config)
