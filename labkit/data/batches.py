"""Batches of every family: one rule gives every layout the same global batch.

With `m` = micro_batch_size, `g` = global_batch_size and `M` = g / (m dp) microbatches on a rank:

    step k consumes samples k g ... (k + 1) g - 1 of the dataset's order;
    sample k g + (j dp + d) m + b is row b of microbatch j on data-parallel rank d.

So the i-th run of m samples of a global batch is always one microbatch: in a single process it is microbatch i, and on
dp ranks it is microbatch i // dp of rank i % dp. Ranks that differ in tp, cp or pp read the same microbatches, but
under context parallelism each rank keeps only its own positions of them.

Shapes: B micro batch, S sequence (this rank's part of it under context parallelism).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.config.choices import FAMILIES

if TYPE_CHECKING:
    import torch

    from labkit.comm.groups import ParallelGroups
    from labkit.config import RunConfig


def microbatch_positions(config: RunConfig, *, dp: int, dp_rank: int, step: int) -> np.ndarray:
    """Return the positions in the dataset's order that one data-parallel rank reads in `step`: (microbatches, B).

    Raises:
        ValueError: global_batch_size is not a multiple of micro_batch_size x dp.
    """
    micro, batch = config.train.micro_batch_size, config.train.global_batch_size
    if batch % (micro * dp):
        raise ValueError(
            f"train.global_batch_size {batch} is not a multiple of train.micro_batch_size {micro} x dp {dp}"
        )
    grid = step * batch + np.arange(batch).reshape(batch // (micro * dp), dp, micro)
    return grid[:, dp_rank]


def data_iterator(
    dataset: Any, config: RunConfig, groups: ParallelGroups, *, consumed_samples: int = 0
) -> Iterator[dict[str, torch.Tensor]]:
    """Return an endless iterator over this rank's microbatches, from the first one after `consumed_samples`.

    The rule at the top of this file says which samples they have.

    `dataset.ordered(n)` is sample n of the run: the ids of a GPT's window (`window_batch`), or the tensors of a sample
    by name (`stacked_batch`).

    Raises:
        ValueError: the dataset has no sample, or `microbatch_positions` rejects the batch sizes.
    """
    if len(dataset) == 0:
        raise ValueError(f"data: the {dataset.name} split is empty; give it a share in data.split")
    microbatch_positions(config, dp=groups.dp.size, dp_rank=groups.dp.rank, step=0)  # refuse now, not at the first next
    return _microbatches(dataset, config, groups, consumed_samples)


def _microbatches(
    dataset: Any, config: RunConfig, groups: ParallelGroups, consumed: int
) -> Iterator[dict[str, torch.Tensor]]:
    batch_of = window_batch if FAMILIES[config.model.family].reads_windows else stacked_batch
    for step in count():
        own = microbatch_positions(config, dp=groups.dp.size, dp_rank=groups.dp.rank, step=step)
        for positions in consumed + own:
            yield batch_of([dataset.ordered(int(position)) for position in positions], groups)


def window_batch(windows: Sequence[np.ndarray], groups: ParallelGroups) -> dict[str, torch.Tensor]:
    """Make a microbatch of windows of S + 1 ids: `tokens_BS`, `labels_BS` (int64), `loss_mask_BS` (float32, ones).

    Under context parallelism a rank gets S / cp positions: chunks cp_rank and 2 cp - 1 - cp_rank of every sample
    (`zigzag_split`).
    """
    import torch

    from labkit.parallel.context.zigzag import get_batch_on_this_cp_rank

    samples = _on_device(np.stack(windows), groups.device)
    batch = {
        "tokens_BS": samples[:, :-1].contiguous(),
        "labels_BS": samples[:, 1:].contiguous(),
        "loss_mask_BS": torch.ones(samples[:, 1:].shape, device=groups.device),
    }
    return get_batch_on_this_cp_rank(batch, groups.cp) if groups.cp.size > 1 else batch


def stacked_batch(samples: Sequence[dict[str, np.ndarray]], groups: ParallelGroups) -> dict[str, torch.Tensor]:
    """Make a microbatch of samples that hold their tensors by name; each tensor gets a first dimension B."""
    return {name: _on_device(np.stack([sample[name] for sample in samples]), groups.device) for name in samples[0]}


def _on_device(rows: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return the rows as a tensor. For a GPU they are pinned first, or the host would wait for the end of the copy."""
    import torch

    tensor = torch.from_numpy(rows)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
