"""The numbers of scalars.jsonl as event files of TensorBoard, by torch's SummaryWriter.

A run may resume at an earlier step than it had reached, or begin again, in a folder with event files. TensorBoard then
hides what these have from the first new step on (`purge_step`), so no curve runs back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.config import RunConfig, TrainConfig
from labkit.output_files import unwritable

FLUSH_SECONDS = 10
"""Longest time from a number to its file."""


class TensorBoard:
    """A `Logger` that writes into `train.tensorboard_dir`, or into a folder of the run."""

    run_id = None

    def __init__(self, config: RunConfig, first_step: int, run_id: str | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = str(_folder(config.train))
        self._writer = SummaryWriter(folder, purge_step=first_step, flush_secs=FLUSH_SECONDS)

    @staticmethod
    def problem(train: TrainConfig) -> str:
        return unwritable(_folder(train))

    def write(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        for number in numbers:
            self._writer.add_scalar(number["tag"], number["value"], number["step"])

    def close(self, *, failed: bool) -> None:
        self._writer.close()


def _folder(train: TrainConfig) -> Path:
    return Path(train.tensorboard_dir or Path(train.output_dir or "") / "tensorboard")
