"""The folder of a run's checkpoints: their names and their order. Needs no torch.

    DIR/latest                          name of the newest checkpoint: `step_00000003`
    DIR/step_00000003/                  a checkpoint (`manifest.py`)
    DIR/.lock                           locked by the run that saves here (`run_folder/lock.py`)
    DIR/.latest.partial                 the next content of `latest`
    DIR/.step_00000006.partial          a checkpoint that is being written, or was cut off; no reader looks at it
    DIR/.step_00000001.old              a checkpoint that is being removed

A checkpoint appears by one rename, after all its files are on the disk. So a step folder is complete, or something
changed it afterwards, and the checksums show what.

`latest` decides, not the highest number, because a run that went on from an earlier step leaves later checkpoints that
belong to another course of training. The rename and the change of `latest` are two operations, and a kill may come
between them. So `.latest.partial` names the checkpoint before it appears, and counts once the checkpoint is there.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from labkit.output_files import unwritable
from labkit.train.checkpoint.manifest import STEP_NAME, CheckpointError, read_manifest
from labkit.train.run_folder.lock import LOCK

LATEST = "latest"
_DRAFT = f".{LATEST}.partial"
_REMAINS = re.compile(r"\.step_\d{8,15}\.(partial|old)")


# ---- names and order ----


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` steps."""
    return folder / f"step_{step:08d}"


def partial_folder(folder: Path, step: int) -> Path:
    """Return the folder in which that checkpoint is written."""
    return folder / f".step_{step:08d}.partial"


def step_of(name: str) -> int | None:
    """Return the step in the name of a checkpoint; None for another name."""
    match = STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def steps_in(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in `folder`, complete or damaged, ascending. Raises CheckpointError."""
    return sorted(step for name in _names_in(folder) if (step := step_of(name)) is not None)


def remains_in(folder: Path) -> list[Path]:
    """Return folders of checkpoints whose writing or removal was cut off or is under way. Raises CheckpointError."""
    return sorted(folder / name for name in _names_in(folder) if _REMAINS.fullmatch(name))


def in_the_way(folder: Path) -> str:
    """Return why a run cannot save here, or an empty string. The reason is that nothing can be written, or that a
    folder has the name of a file that the run writes, or the reverse."""
    for path in remains_in(folder):
        if path.suffix == ".partial" and not _is_folder(path):
            return f"{path.name} in it is not a folder, and a run writes one there; move it, or name another folder"
    return unwritable(folder, (LATEST, LOCK, _DRAFT))


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _names_in(folder: Path) -> list[str]:
    """Return the names in a folder, or none without a folder. Raises CheckpointError if it cannot be read."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}") from None


def latest_step(folder: Path) -> int | None:
    """Return the step of the newest checkpoint, None without one.

    This is the step that `latest` names. If that checkpoint is gone, the highest step below counts. Without a step in
    `latest` the highest of all counts.
    """
    steps = steps_in(folder)
    if (begun := _named_in(folder / _DRAFT)) in steps:
        return begun
    named = _named_in(folder / LATEST)
    below = [step for step in steps if named is None or step <= named]
    return (below or steps or [None])[-1]


def _named_in(file: Path) -> int | None:
    """Return the step that the file names."""
    try:
        return step_of(file.read_text().strip()) if file.is_file() else None
    except (OSError, UnicodeDecodeError):
        return None


def newest_first(folder: Path) -> list[Path]:
    """Return a run's checkpoints in the order in which a resuming run tries them: `latest`, then those before it."""
    last = latest_step(folder)
    return [step_folder(folder, step) for step in reversed(steps_in(folder)) if last is not None and step <= last]


def passed_over(folder: Path) -> list[int]:
    """Return the steps above the one that `latest` names, from which no run begins by itself."""
    last = latest_step(folder)
    return [step for step in steps_in(folder) if last is not None and step > last]


# ---- changes; only by a run that holds the lock ----


def appear(folder: Path, step: int) -> None:
    """Let the partial folder of `step`, whose files are on the disk, appear as the checkpoint that `latest` names.

    A checkpoint of this step that is there already is set aside. Raises OSError.
    """
    final = step_folder(folder, step)
    sync_folder(partial_folder(folder, step))
    if os.path.lexists(final):
        set_aside(folder, step)
    with (folder / _DRAFT).open("w") as file:
        file.write(f"{final.name}\n")
        file.flush()
        os.fsync(file.fileno())
    os.rename(partial_folder(folder, step), final)
    sync_folder(folder)
    os.replace(folder / _DRAFT, folder / LATEST)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_aside(folder: Path, step: int) -> None:
    """Take a checkpoint out of the names that readers look at; `remove_remains` removes it. Raises OSError."""
    aside = folder / f".{step_folder(folder, step).name}.old"
    with contextlib.suppress(OSError):
        _remove(aside)
    os.rename(step_folder(folder, step), aside)


def settle(folder: Path) -> list[str]:
    """End what a save began that was cut off, and remove what is left of others. Return what cannot be removed.

    Raises OSError and CheckpointError for a folder that cannot be changed or read.
    """
    if _named_in(folder / _DRAFT) in steps_in(folder):
        os.replace(folder / _DRAFT, folder / LATEST)
        sync_folder(folder)
    (folder / _DRAFT).unlink(missing_ok=True)
    return remove_remains(folder)


def remove_superseded(folder: Path, step: int, keep: int) -> list[str]:
    """Remove the checkpoints before the last `keep` up to `step`, and what is left of others. No save is under way.

    Return a sentence for each that cannot be removed. Nothing depends on its removal, so there is no error.
    """
    found = []
    try:
        for old in _superseded(folder, step, keep):
            try:
                set_aside(folder, old)
            except OSError as error:
                found.append(_stays(step_folder(folder, old), error))
        return found + remove_remains(folder)
    except CheckpointError as error:
        return [*found, str(error)]


def _superseded(folder: Path, step: int, keep: int) -> list[int]:
    """Return the steps to remove. A checkpoint without a sound manifest does not count as one of `keep`."""
    steps, sound = [one for one in steps_in(folder) if one <= step], 0
    for place, one in reversed([*enumerate(steps)]):
        with contextlib.suppress(CheckpointError):
            read_manifest(step_folder(folder, one))
            sound += 1
        if sound == keep:
            return steps[:place]
    return []


def remove_remains(folder: Path) -> list[str]:
    """Remove folders whose writing or removal was cut off. Return a sentence for each that cannot be removed."""
    found = []
    for path in remains_in(folder):
        try:
            _remove(path)
        except OSError as error:
            found.append(_stays(path, error))
    return found


def _remove(path: Path) -> None:
    """Remove a folder, or a link or file in place of one; what a link leads to stays. Raises OSError."""
    if _is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink()


def _stays(path: Path, error: OSError) -> str:
    return f"{path} cannot be removed ({error.strerror or error}), and no run needs it; remove it by hand"
