"""Row F4: kill -9 while a run takes its folder leaves one that the same command takes again."""

import io
import os
import shutil
import signal
from pathlib import Path

import pytest
from survival_runs import STEPS, TINY, complete_steps, differing_files

from labkit.config import RunConfig
from labkit.launch import RankError, run
from labkit.train import pretrain
from labkit.train.checkpoint.step_folders import step_folder
from labkit.train.reporting.step_lines import steps_of
from labkit.train.run_folder.claim import RunFolder
from labkit.train.run_folder.contents import CONFIG, METRICS, STATE, saves_into
from labkit.train.run_folder.lock import LOCK

CALLS = [
    *((os, name) for name in ("mkdir", "open", "ftruncate", "pwrite", "rename", "replace", "unlink", "truncate")),
    (io, "open"),
]
"""Functions by which a run changes its folder before its first step."""
FORMS = {
    "a new folder": ({}, 0),
    "a folder with a run": ({}, 2),
    "two folders of an earlier version": ({"checkpoint.dir": "SAVED"}, 2),
    "one folder of an earlier version": ({"checkpoint.dir": "RUN"}, 2),
}
"""Name -> (fields, steps that an earlier launch of the run has made)."""


def killed_start(config: RunConfig, at: int | None) -> tuple[list[float], list[str]]:
    """`pretrain` that ends by SIGKILL before call number `at` of its claim and its begin; None only lists the calls."""
    calls, armed = [], [False]

    def watched(name, original):
        def call(*args, **named):
            if armed[0] and (name != "open" or _writes(args)):
                if len(calls) == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                calls.append(f"{name} {Path(str(args[0])).name}")
            return original(*args, **named)

        return call

    def arming(original):
        def method(self, *args):
            armed[0] = True
            try:
                return original(self, *args)
            finally:
                armed[0] = False

        return method

    for module, name in CALLS:
        setattr(module, name, watched(name, getattr(module, name)))
    RunFolder.claim, RunFolder.begin = arming(RunFolder.claim), arming(RunFolder.begin)
    return pretrain(config).losses, calls


def _writes(args) -> bool:
    mode = args[1] if len(args) > 1 else "r"
    return bool(mode & (os.O_RDWR | os.O_CREAT)) if isinstance(mode, int) else any(sign in mode for sign in "wax+")


def as_an_earlier_version_left_it(config: RunConfig) -> None:
    """Without a lock in `train.output_dir`, whose run.json had the process and was locked itself."""
    output = Path(config.train.output_dir or "")
    if saves_into(config) != output:
        (output / LOCK).unlink()
    (output / STATE).write_text('{"state": "unfinished", "world_size": 1, "pid": 1, "host": "gone"}\n')


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("form", FORMS)
def test_a_run_killed_while_it_takes_its_folder_is_started_again(tally, tmp_path, form, every):
    changes, steps = FORMS[form]
    places = {"RUN": str(tmp_path / "run"), "SAVED": str(tmp_path / "saved")}
    folders = {name: places[value] for name, value in changes.items()} | {"output_dir": places["RUN"]}
    config = TINY.override({**folders, "interval": 1, "keep": 1})
    alone = config.override({"output_dir": str(tmp_path / "alone"), "checkpoint.dir": None})
    losses, end = run(pretrain, 1, alone)[0].losses, step_folder(saves_into(alone), STEPS)

    def prepare() -> None:
        for place in places.values():
            shutil.rmtree(place, ignore_errors=True)
        if steps:
            run(pretrain, 1, config.override({"steps": steps}))
            if "earlier" in form:
                as_an_earlier_version_left_it(config)

    prepare()
    [(_, calls)] = run(killed_start, 1, config, None)
    assert any(CONFIG in call for call in calls) and any(LOCK in call for call in calls), calls
    counts, saved = tally("F4", f"every call of a start in {form}"), saves_into(config)
    for at in range(0, len(calls), every):
        with counts.attempt(f"killed before call {at}, {calls[at]}"):
            prepare()
            with pytest.raises(RankError, match="rank 0 was ended by SIGKILL"):
                run(killed_start, 1, config, at)
            result = run(pretrain, 1, config)[0]
            assert result.resumed_after == steps and result.losses == losses[steps:]
            assert steps_of(tmp_path / "run" / METRICS) == list(range(1, STEPS + 1))
            assert complete_steps(saved) == [STEPS]
            assert differing_files(end, step_folder(saved, STEPS)) == []
            assert '"finished"' in (tmp_path / "run" / STATE).read_text()
            assert not [path.name for path in (tmp_path / "run").iterdir() if path.name.endswith(".partial")]
