"""The numbers of scalars.jsonl as event files of TensorBoard (`train.tensorboard_dir`), by torch's SummaryWriter.

Rank 0 writes each number at its true step. The package `tensorboard` is an extra of labkit, so without it a run with
this field is rejected before any process starts.

A run may resume at an earlier step than it had reached, or begin again, in a folder with event files. TensorBoard then
hides what these have from the first new step on (`purge_step`), so no curve runs back.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.config import TrainConfig
from labkit.config.errors import shown
from labkit.output_files import unwritable

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FLUSH_SECONDS = 10
"""Longest time from a number to its file."""


def tensorboard_problem(train: TrainConfig) -> str:
    """Return why a run cannot write into `train.tensorboard_dir`, or an empty string. Leaves no file."""
    if train.tensorboard_dir is None:
        return ""
    if importlib.util.find_spec("tensorboard") is None:
        problem = "the package tensorboard is not installed; pip install tensorboard, or leave this field out"
    else:
        problem = unwritable(Path(train.tensorboard_dir))
    return f"train.tensorboard_dir = {shown(train.tensorboard_dir, 200)}: {problem}" if problem else ""


class TensorBoard:
    """Writes to the folder of one run, on rank 0."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def begin(self, step: int) -> None:
        """Open the files. `step`, counted from 1, is the first step of this process; later calls do nothing."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self._folder, purge_step=step, flush_secs=FLUSH_SECONDS)

    def write(self, numbers: Iterable[Mapping[str, Any]]) -> None:
        """Write numbers as `metrics.scalars` yields them."""
        assert self._writer is not None, "begin comes first"
        for number in numbers:
            self._writer.add_scalar(number["tag"], number["value"], number["step"])

    def close(self) -> None:
        """Write the rest and close the files."""
        if self._writer is not None:
            self._writer.close()
