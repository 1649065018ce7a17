"""Datasets and batches of the configured model family, chosen by `model.family`.

| family | samples                                         | module           |
|--------|-------------------------------------------------|------------------|
| `gpt`  | windows of the text; the next token is learned  | `gpt_data`       |
| `bert` | windows in two parts; masked tokens are learned | `masked_windows` |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from labkit.data import gpt_data

if TYPE_CHECKING:
    import torch

    from labkit.config import RunConfig
    from labkit.parallel.groups import ParallelGroups


def build_datasets(config: RunConfig) -> tuple[Any, Any, Any]:
    """Train, validation and test split of the configured text.

    Raises:
        FileNotFoundError, ValueError: a text, tokenizer or split that the family cannot train on.
    """
    if config.model.family == "bert":
        from labkit.data.masked_windows import build_bert_datasets  # a GPT does without

        return build_bert_datasets(config)
    return gpt_data.build_gpt_datasets(config)


def data_iterator(
    dataset: Any, config: RunConfig, groups: ParallelGroups, *, consumed_samples: int = 0
) -> Iterator[dict[str, torch.Tensor]]:
    """Microbatches of this rank, without end, from the first behind `consumed_samples` on.

    Raises:
        ValueError: the dataset has no sample, or the batch sizes do not divide.
    """
    batches: Callable[..., Iterator[dict[str, torch.Tensor]]] = gpt_data.data_iterator
    if config.model.family == "bert":
        from labkit.data.masked_windows import bert_data_iterator

        batches = bert_data_iterator
    return batches(dataset, config, groups, consumed_samples=consumed_samples)
