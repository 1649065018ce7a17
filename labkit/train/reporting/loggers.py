"""`train.loggers`: rank 0 sends the numbers of scalars.jsonl to TensorBoard, Weights & Biases or MLflow, too.

Their packages are extras of labkit, so a run that names one without its package is rejected before any process starts.
The file loggers.json of the run's folder has the run's id in each of them, and a run that resumes there goes on under
these ids. Of a step that it takes again TensorBoard shows the new numbers, Weights & Biases keeps the old ones, and
MLflow has both.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol

from labkit.config import RunConfig, TrainConfig
from labkit.config.choices import LOGGERS
from labkit.config.errors import shown
from labkit.output_files import appearing
from labkit.train.run_folder.contents import LOGGED


class Logger(Protocol):
    """One of `labkit.config.choices.LOGGERS`: made before the first numbers, on rank 0."""

    run_id: str | None
    """The run's id there, by which a later process continues it; None if it needs none."""

    def __init__(self, config: RunConfig, first_step: int, run_id: str | None) -> None:
        """first_step: of this process, counted from 1. run_id: of the run to continue; None begins a new one."""
        ...

    @staticmethod
    def problem(train: TrainConfig) -> str:
        """Return why the run cannot use it here, before anything is started; an empty string if it can."""
        ...

    def write(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Send numbers as `metrics.scalars` yields them; all have the same step."""
        ...

    def close(self, *, failed: bool) -> None:
        """Send what is left and end the run there. failed: an error ended it."""
        ...


def logger_names(train: TrainConfig) -> tuple[str, ...]:
    """Return the loggers of a run, each once; `train.tensorboard_dir` is enough for TensorBoard."""
    return tuple(dict.fromkeys([*train.loggers, *(["tensorboard"] if train.tensorboard_dir is not None else [])]))


def logger_problems(train: TrainConfig) -> list[str]:
    """Return why a run cannot have its loggers, a sentence for each."""
    found = []
    for name in logger_names(train):
        if importlib.util.find_spec(name) is None:
            rule = f"the package {name} is not installed; pip install {name}, or leave this out"
        else:
            rule = resolve_name(LOGGERS[name]).problem(train)
        if name == "tensorboard" and train.tensorboard_dir is not None:
            start = f"train.tensorboard_dir = {shown(train.tensorboard_dir, 200)}"
        else:
            start = f"train.loggers = {shown(list(train.loggers))}"
        found += [f"{start}: {rule}"] if rule else []
    return found


class Loggers:
    """The loggers of one run. They are opened by the first numbers, so a run without steps leaves nothing."""

    def __init__(self, config: RunConfig, resumed_after: int, *, continues: bool) -> None:
        """resumed_after: steps that were done before this process. continues: in the files of the run that did them."""
        self._config, self._first_step, self._continues = config, resumed_after + 1, continues
        self._open: list[Logger] | None = None

    def write(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Send numbers as `metrics.scalars` yields them; all have the same step."""
        if self._open is None:
            self._open = self._opened()
        for logger in self._open:
            logger.write(numbers)

    def _opened(self) -> list[Logger]:
        folder, names = self._config.train.output_dir, logger_names(self._config.train)
        file = None if folder is None else Path(folder) / LOGGED
        ids = json.loads(file.read_text()) if file is not None and self._continues and file.exists() else {}
        opened = {name: resolve_name(LOGGERS[name])(self._config, self._first_step, ids.get(name)) for name in names}
        ids |= {name: logger.run_id for name, logger in opened.items() if logger.run_id is not None}
        if file is not None and ids:
            with appearing(file) as draft:
                draft.write_text(json.dumps(ids) + "\n")
        return list(opened.values())

    def close(self, *, failed: bool) -> None:
        """Send what is left and end the run in each of them. failed: an error ended it."""
        for logger in self._open or ():
            logger.close(failed=failed)
