"""The files that an earlier run left in `train.output_dir`: they stay, are cut at a checkpoint, or go. Needs no torch.

A folder with a run, finished or not, is refused without `train.overwrite`, with two exceptions. A run that resumes from
a checkpoint of the earlier run goes on in its files. And a run that was killed before its first checkpoint may begin
again by the same command, since no checkpoint can have been lost.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from labkit.config import ConfigError, RunConfig

CONFIG, METRICS = "config.yaml", "metrics.jsonl"
WRITTEN = (METRICS, "scalars.jsonl", "events.jsonl")
"""Files that grow during the run."""
EVALUATIONS = ("validation_loss", "test_loss")
_OF_THIS_LAUNCH = {
    "train.overwrite": False,
    "train.allow_oversubscription": False,
    "train.record_events": True,
    "parallel.distributed_timeout_minutes": 10.0,
}
"""Fields that a command may set anew for each launch of the same run, with any value that stands for all."""


def why_they_stay(config: RunConfig, state: Mapping[str, Any], *, continues: bool) -> str:
    """Return why the run of `config` must not replace the files in its folder, or an empty string.

    state: the contents of run.json, empty without one. No other process writes there now.
    continues: the run resumes the run whose files are there.
    """
    folder = _folder(config)
    if not state and (folder / CONFIG).exists():
        return f"its {CONFIG} was not written by a run, and this run would replace it; move it, or name another folder"
    if config.train.overwrite or continues or not (state or any((folder / name).exists() for name in WRITTEN)):
        return ""
    replace = "name another folder, or let --overwrite (train.overwrite) replace its files"
    if state.get("state") == "finished":
        return f"holds a finished run; {replace}"
    if begins_again(config, state):
        return ""
    return f"holds a run that did not finish, and no checkpoint of it is resumed (checkpoint.dir); {replace}"


def begins_again(config: RunConfig, state: Mapping[str, Any]) -> bool:
    """True if the folder has the unfinished run of this configuration, which cannot have come to a checkpoint.

    By its metrics it has made no more steps than the first checkpoint takes. A run that has made more had checkpoints.
    If these are gone, as with a disk that is not mounted, its metrics must stay.
    """
    folder, given = _folder(config), config.checkpoint
    if given.dir is None or state.get("state") != "unfinished":
        return False
    steps = [step for _, step in _whole_lines(folder / METRICS)]
    if not steps and not (folder / CONFIG).exists():
        return True  # killed before it had written anything
    longest = given.interval * (2 if given.asynchronous else 1)  # the next save waits for the one under way
    return _same_run(config, folder / CONFIG) and (not steps or steps[-1] - steps[0] < longest)


def _folder(config: RunConfig) -> Path:
    assert config.train.output_dir is not None, "without a folder nothing is written"
    return Path(config.train.output_dir)


def _same_run(config: RunConfig, stored: Path) -> bool:
    try:
        before = RunConfig.from_yaml(stored)
    except (ConfigError, OSError):
        return False
    return before.replaced(_OF_THIS_LAUNCH) == config.replaced(_OF_THIS_LAUNCH)


def evaluations_at(path: Path, step: int) -> set[str]:
    """Return the evaluations, `validation_loss` and `test_loss`, that a metrics.jsonl has of this step."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines()) if path.exists() else ()
    return {name for line in lines if line.get("step") == step for name in EVALUATIONS if name in line}


def cut_after(path: Path, step: int) -> None:
    """Remove the lines of later steps from a file of JSON lines, and a line that was cut off in the middle."""
    kept = 0
    for size, written in _whole_lines(path):
        if written > step:
            break
        kept += size
    if path.exists():
        os.truncate(path, kept)


def _whole_lines(path: Path) -> Iterator[tuple[int, int]]:
    """Yield (bytes, step) of the lines of a file up to the first that is no record; step 0 for a line without one."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                step = json.loads(line).get("step")
            except (ValueError, AttributeError):
                return
            if not line.endswith(b"\n"):
                return
            yield len(line), step if isinstance(step, int) else 0
