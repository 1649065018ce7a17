"""Datasets and batches of the configured model family, chosen by `model.family`.

| family  | samples                                                            | module                |
|---------|--------------------------------------------------------------------|-----------------------|
| `gpt`   | windows of the text; the next token is learned                     | `gpt_data`            |
| `mamba` | the same                                                           | `gpt_data`            |
| `bert`  | two segments of sentences; masked tokens and the order are learned | `masked/bert_samples` |
| `t5`    | sentences without some spans, which are learned                    | `masked/t5_samples`   |
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.config.choices import FAMILIES
from labkit.data import gpt_data

if TYPE_CHECKING:
    import torch

    from labkit.comm.groups import ParallelGroups
    from labkit.config import RunConfig


def build_datasets(config: RunConfig) -> tuple[Any, Any, Any]:
    """Train, validation and test split of the configured text.

    Raises:
        FileNotFoundError, ValueError: a text, tokenizer or split that the family cannot train on.
    """
    return resolve_name(FAMILIES[config.model.family].datasets)(config)


def data_iterator(
    dataset: Any, config: RunConfig, groups: ParallelGroups, *, consumed_samples: int = 0
) -> Iterator[dict[str, torch.Tensor]]:
    """Microbatches of this rank, without end, from the first behind `consumed_samples` on.

    `dataset.ordered(n)` is sample n of the run: the ids of a GPT's window, or the tensors of a sample by name, which a
    batch stacks.

    Raises:
        ValueError: the dataset has no sample, or the batch sizes do not divide.
    """
    if FAMILIES[config.model.family].reads_windows:
        return gpt_data.data_iterator(dataset, config, groups, consumed_samples=consumed_samples)
    if len(dataset) == 0:
        raise ValueError(f"data: the {dataset.name} split is empty; give it a share in data.split")
    gpt_data.microbatch_positions(config, dp=groups.dp.size, dp_rank=groups.dp.rank, step=0)  # refuse now
    return _stacked_samples(dataset, config, groups, consumed_samples)


def _stacked_samples(
    dataset: Any, config: RunConfig, groups: ParallelGroups, consumed: int
) -> Iterator[dict[str, torch.Tensor]]:
    import torch

    for step in count():
        own = gpt_data.microbatch_positions(config, dp=groups.dp.size, dp_rank=groups.dp.rank, step=step)
        for positions in consumed + own:
            samples = [dataset.ordered(int(position)) for position in positions]
            batch = {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in samples[0]}
            if groups.device.type == "cuda":  # a copy from memory that is not pinned makes the host wait for the GPU
                batch = {name: each.pin_memory().to(groups.device, non_blocking=True) for name, each in batch.items()}
            yield batch
