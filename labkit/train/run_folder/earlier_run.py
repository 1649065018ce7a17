"""The files that an earlier run left in `train.output_dir`: whether a new run may replace them. Needs no torch.

A folder with a run, finished or not, is rejected without `train.overwrite`, with two exceptions. A run that resumes
from a checkpoint of the earlier run goes on in its files. And a run that was killed before its first checkpoint may
begin again by the same command, since no checkpoint can have been lost.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from labkit.config import ConfigError, RunConfig
from labkit.train.checkpoint.resume import same_run
from labkit.train.reporting.step_lines import steps_of
from labkit.train.run_folder.contents import CONFIG, INTERVAL, LINES, METRICS, STATE, saves_into


def state_in(folder: Path) -> dict[str, Any]:
    """Return the contents of run.json, empty without one. Raises OSError for a file that cannot be read.

    Earlier versions wrote the file in place, so a kill could leave half of one; such a run counts as unfinished.
    """
    try:
        text = (folder / STATE).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    if not text:
        return {}
    try:
        state = json.loads(text)
    except ValueError:
        state = None
    return state if isinstance(state, dict) and state else {"state": "unfinished"}


def why_they_stay(config: RunConfig, folder: Path, *, continues: bool) -> str:
    """Return why the run of `config` must not replace the files in its folder, or an empty string.

    continues: the run resumes the run whose files are there. Raises OSError for files that cannot be read.
    """
    state = state_in(folder)
    if not state and (folder / CONFIG).exists():
        return f"its {CONFIG} was not written by a run, and this run would replace it; move it, or name another folder"
    if config.train.overwrite or continues or not (state or any((folder / name).exists() for name in LINES)):
        return ""
    replace = "name another folder, or let --overwrite (train.overwrite) replace its files"
    if state.get("state") == "finished":
        return f"holds a finished run; {replace}"
    if begins_again(config, folder):
        return ""
    return f"holds a run that did not finish, and no checkpoint of it is resumed (checkpoint.dir); {replace}"


def begins_again(config: RunConfig, folder: Path) -> bool:
    """Return True if the folder has the unfinished run of this configuration, which cannot have reached a checkpoint.

    By its metrics it has made no more steps than the first checkpoint takes. A run that has made more had checkpoints.
    If these are gone, for example because a disk is not mounted, its metrics must stay.
    """
    if saves_into(config) is None or state_in(folder).get("state") != "unfinished":
        return False
    steps = steps_of(folder / METRICS)
    if not steps and not (folder / CONFIG).exists():
        return True  # it was killed before it had written anything
    try:
        before = RunConfig.from_yaml(folder / CONFIG).replaced({"train.output_dir": config.train.output_dir})
    except (ConfigError, OSError):
        return False
    if saves_into(before) != saves_into(config) or not same_run(before.to_dict(), config):
        return False
    given = before.checkpoint
    longest = (given.interval or INTERVAL) * (2 if given.asynchronous else 1)  # a save waits for the one under way
    return not steps or steps[-1] - steps[0] < longest
