"""The numbers of scalars.jsonl in Weights & Biases, each at its step.

The library's own environment variables say where: WANDB_PROJECT (`labkit` if it is not set), WANDB_ENTITY,
WANDB_API_KEY, and WANDB_MODE=offline for a folder that `wandb sync` sends later. Its files are in `train.output_dir`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb  # pyright: ignore[reportMissingImports]

from labkit.config import RunConfig, TrainConfig


class WandB:
    """A `Logger` of Weights & Biases."""

    def __init__(self, config: RunConfig, first_step: int, run_id: str | None) -> None:
        folder = config.train.output_dir
        self._run = wandb.init(
            id=run_id,
            resume="allow",
            project=os.environ.get("WANDB_PROJECT", "labkit"),
            name=Path(folder).name if folder else None,
            dir=folder,
            config=config.to_dict(),
            settings=wandb.Settings(console="off", quiet=True),  # what ranks print is the launcher's
        )
        self.run_id: str | None = self._run.id

    @staticmethod
    def problem(train: TrainConfig) -> str:
        """Log in; on a terminal the library asks for a key that is missing."""
        if os.environ.get("WANDB_MODE", "online") != "online":
            return ""
        try:
            wandb.login()
        except wandb.Error as error:
            return f"{error} To send the numbers later, set WANDB_MODE=offline"
        return ""

    def write(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        if numbers:
            self._run.log({number["tag"]: number["value"] for number in numbers}, step=numbers[0]["step"])

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
