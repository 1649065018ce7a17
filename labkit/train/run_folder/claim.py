"""`run_folder`: a run has its folders to itself, from before its first look at a checkpoint to its end.

    claim     lock `train.output_dir` and the folder of the checkpoints; end what a killed save had begun
    begin     once it is known where the run begins: cut or remove earlier lines, write state and configuration
    finish    mark the run as finished, and release the locks
    release   only release the locks: the state of a run that fails stays `unfinished`

A kill at any moment leaves a folder that the same command can take again, because state and configuration appear by a
rename, and `earlier_run.py` judges what is there. The locks end with the process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.config import ConfigError, RunConfig
from labkit.config.errors import shown
from labkit.launch import info
from labkit.output_files import appearing, cannot_be_written, unwritable
from labkit.train.checkpoint.manifest import CheckpointError
from labkit.train.checkpoint.resume import will_continue
from labkit.train.checkpoint.step_folders import in_the_way, settle
from labkit.train.reporting.step_lines import cut_after
from labkit.train.run_folder.contents import CONFIG, FILES, LINES, LOGGED, OUTPUT, SAVED, STATE, folders_of
from labkit.train.run_folder.earlier_run import begins_again, why_they_stay
from labkit.train.run_folder.lock import FolderError, check_free, locked

if TYPE_CHECKING:
    from labkit.comm.groups import ParallelGroups


def folder_problems(config: RunConfig) -> list[str]:
    """Return why the run cannot have its folders, a sentence for each. Leaves no file."""
    found = []
    for field, folder in folders_of(config).items():
        try:
            with _naming(field, folder):
                _check_writable(field, folder)
                check_free(folder)
                if field == OUTPUT:
                    _refuse(why_they_stay(config, folder, continues=will_continue(config)))
        except ConfigError as error:
            found += error.problems
    return found


class RunFolder:
    """The folders of one run, in the process that writes its files. The methods are called in the order above."""

    def __init__(self, config: RunConfig, world_size: int, device: str = "cpu") -> None:
        """world_size, device: stored with the state, because the configuration does not have them. device: `cpu`, or
        the name of the GPU."""
        self._config, self._world_size, self._device = config, world_size, device
        self._folders = folders_of(config)
        self._locks = ExitStack()

    def claim(self) -> list[str]:
        """Make and lock the folders, and end what a killed save had begun. Return what cannot be removed.

        Raises ConfigError if a folder cannot be written, or another run has it.
        """
        mine, said = set[Path](), list[str]()
        with ExitStack() as locks:
            for field, folder in self._folders.items():
                with _naming(field, folder):
                    folder.mkdir(parents=True, exist_ok=True)
                    _check_writable(field, folder)
                    if folder.resolve() not in mine:  # both fields may name one folder
                        locks.enter_context(locked(folder))
                    mine.add(folder.resolve())
                    said += settle(folder) if field == SAVED else []
            self._locks = locks.pop_all()
        return said

    def begin(self, continues_after: int | None = None) -> list[str]:
        """Remove or cut the lines of the run that was there, and store state and configuration.

        continues_after: the run resumes the run whose files are there, after this many of its steps. Its lines stay,
        except those of later steps. Return a sentence if a run begins again that had no checkpoint yet.

        Raises ConfigError if the files of another run are there, or the folder cannot be written.
        """
        folder, continues = self._folders.get(OUTPUT), continues_after is not None
        if folder is None:
            return []
        with _naming(OUTPUT, folder):
            _refuse(why_they_stay(self._config, folder, continues=continues))
            again = not (continues or self._config.train.overwrite) and begins_again(self._config, folder)
            for name in LINES if continues else (*LINES, LOGGED):
                if continues_after is not None:
                    cut_after(folder / name, continues_after)
                else:
                    (folder / name).unlink(missing_ok=True)
            self._write_state("unfinished")
            with appearing(folder / CONFIG) as draft:
                draft.write_text(self._config.replaced({"train.overwrite": False}).to_yaml(), encoding="utf-8")
        return [f"{folder}: the run had ended before its first checkpoint, so it begins again"] if again else []

    def _write_state(self, state: str) -> None:
        words = {
            "state": state,
            "world_size": self._world_size,
            "device": self._device,
            "written": time.strftime("%FT%T%z"),
        }
        with appearing(self._folders[OUTPUT] / STATE) as draft:
            draft.write_text(json.dumps(words) + "\n")

    def finish(self) -> None:
        """Mark the run as finished, and release the locks."""
        if OUTPUT in self._folders:
            self._write_state("finished")
        self.release()

    def release(self) -> None:
        """Release the locks; run.json stays as it is."""
        self._locks.close()


@contextmanager
def run_folder(config: RunConfig, groups: ParallelGroups) -> Iterator[Callable[[int | None], None]]:
    """Let rank 0 have the folders of the run during the block, and mark the run as finished if the block ends without
    an exception. Yields `RunFolder.begin`, which prints its sentences. All ranks call both, and all raise its
    ConfigError."""
    folder = RunFolder(config, groups.world.size, _device_name(groups))
    is_first = groups.world.rank == 0

    def on_rank_0(do: Callable[[], list[str]]) -> None:
        problems = list[str]()
        try:
            for sentence in do() if is_first else ():
                info.announce(sentence)
        except ConfigError as error:
            problems = error.problems
        from labkit.comm.collectives import gather_objects
        from labkit.comm.ledger import comm_scope

        with comm_scope(layer="run_folder", phase="start"):
            problems = gather_objects(problems, groups.world)[0]
        if problems:
            raise ConfigError(problems, source="the run")

    if not folders_of(config):
        yield lambda _: None
        return
    try:
        on_rank_0(folder.claim)
        yield lambda continues_after: on_rank_0(partial(folder.begin, continues_after))
        if is_first:
            folder.finish()
    finally:
        folder.release()


def _device_name(groups: ParallelGroups) -> str:
    """Return `cpu`, or the name of this rank's GPU."""
    if groups.device.type != "cuda":
        return groups.device.type
    import torch

    return torch.cuda.get_device_name(groups.device)


# ---- refusals ----


@contextmanager
def _naming(field: str, folder: Path) -> Iterator[None]:
    """Turn errors of the block into a ConfigError that names the folder and its field."""
    try:
        yield
    except (OSError, FolderError, CheckpointError) as error:
        why = cannot_be_written(error) if isinstance(error, OSError) else error
        raise ConfigError([f"{field} = {shown(str(folder), 200)}: {why}"]) from error


def _refuse(problem: str) -> None:
    if problem:
        raise FolderError(problem)


def _check_writable(field: str, folder: Path) -> None:
    _refuse(unwritable(folder, FILES) if field == OUTPUT else in_the_way(folder))
