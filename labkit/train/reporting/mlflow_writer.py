"""The numbers of scalars.jsonl in MLflow, with the configuration as the artifact config.yaml.

The library's own environment variables say where: MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME (`labkit` if it is not
set). Its client waits for the server at each line of metrics; `train.log_interval` makes lines rarer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]
from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]

from labkit.config import RunConfig, TrainConfig

LARGEST_BATCH = 1000
"""Most metrics that MLflow takes at once."""


class MLflow:
    """A `Logger` of MLflow."""

    def __init__(self, config: RunConfig, first_step: int, run_id: str | None) -> None:
        self._client = MlflowClient()
        self.run_id = run_id or self._new_run(config)
        self._client.update_run(self.run_id, status="RUNNING")

    @staticmethod
    def problem(train: TrainConfig) -> str:
        try:
            MlflowClient()
        except (MlflowException, ImportError) as error:
            return f"{error}; set MLFLOW_TRACKING_URI to a store that this installation of mlflow can use"
        return ""

    def _new_run(self, config: RunConfig) -> str:
        name, folder = os.environ.get("MLFLOW_EXPERIMENT_NAME", "labkit"), config.train.output_dir
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        run_id = self._client.create_run(number, run_name=Path(folder).name if folder else None).info.run_id
        self._client.log_dict(run_id, config.to_dict(), "config.yaml")
        return run_id

    def write(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        now = int(time.time() * 1000)
        metrics = [Metric(number["tag"], number["value"], now, number["step"]) for number in numbers]
        for start in range(0, len(metrics), LARGEST_BATCH):
            self._client.log_batch(self.run_id, metrics[start : start + LARGEST_BATCH])

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")
