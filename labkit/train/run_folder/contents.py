"""What is in the folder of a run. Needs no torch. docs/running.md has the same table with the readers of each file.

    .lock             locked by the process that writes the other files           lock.py
    run.json          state of the run: `unfinished` or `finished`                claim.py
    config.yaml       the resolved configuration                                  claim.py
    metrics.jsonl, scalars.jsonl, events.jsonl    lines that grow with the steps  reporting/report.py
    loggers.json      runs of `train.loggers`, which a resumed run continues      reporting/loggers.py
    profile-rankN.json    traces of `train.profile`                               reporting/profiling.py
    checkpoints/      its own .lock, and what checkpoint/step_folders.py lists    checkpoint/checkpoints.py

Every file but the lines and the traces appears by one rename, so no reader sees half of one. `.config.yaml.partial` and
`.run.json.partial` belong to a write that was cut off, and the next one replaces them.

`checkpoint.dir` may name another folder for the checkpoints, also the folder of the run itself, as in earlier versions.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from labkit.config import ConfigError, RunConfig
from labkit.train.checkpoint.step_folders import steps_in
from labkit.train.run_folder.lock import LOCK

STATE, CONFIG, METRICS = "run.json", "config.yaml", "metrics.jsonl"
LINES = (METRICS, "scalars.jsonl", "events.jsonl")
"""Files that grow during the run."""
LOGGED = "loggers.json"
FILES = (LOCK, STATE, f".{STATE}.partial", CONFIG, f".{CONFIG}.partial", LOGGED, *LINES)
CHECKPOINTS = "checkpoints"
OUTPUT, SAVED = "train.output_dir", "checkpoint.dir"
"""The fields that name folders."""
INTERVAL = 100
"""Steps between checkpoints where `checkpoint.dir` is given without `checkpoint.interval`."""


def saves_into(config: RunConfig) -> Path | None:
    """Return the folder of the run's checkpoints: `checkpoint.dir`, or the one inside `train.output_dir` if
    `checkpoint.interval` asks for checkpoints. None for a run that saves nothing."""
    if config.checkpoint.dir is not None:
        return Path(config.checkpoint.dir)
    if config.train.output_dir is None or config.checkpoint.interval is None:
        return None
    return Path(config.train.output_dir) / CHECKPOINTS


def folders_of(config: RunConfig) -> dict[str, Path]:
    """Return the folders that the run writes, by the field of the configuration that names them."""
    found = {OUTPUT: config.train.output_dir, SAVED: saves_into(config)}
    return {field: Path(folder) for field, folder in found.items() if folder is not None}


def checkpoints_in(folder: Path) -> Path:
    """Return the folder of checkpoints for `folder`: the one in which the run saves if `folder` is a run's, otherwise
    `folder` itself. Raises CheckpointError for a folder that cannot be read."""
    if steps_in(folder):
        return folder
    places = [folder / CHECKPOINTS]
    if (folder / CONFIG).is_file():
        from labkit.config import yaml_text  # training itself does without PyYAML

        with suppress(ConfigError):  # of another version
            given, _ = yaml_text.read(folder / CONFIG)
            places += [Path(given["checkpoint.dir"])] if given.get("checkpoint.dir") else []
    return next((place for place in places if steps_in(place)), folder)
