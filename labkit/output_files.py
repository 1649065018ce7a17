"""Find out which folders can be written, write files that appear only when complete, and name the file in errors.

If a write fails, for example because a disk is full, the system names no file: `[Errno 28] No space left on device`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path


def unwritable(folder: Path, files: Sequence[str] = ()) -> str:
    """Return why nothing can be written into the folder, or an empty string. files: names of files that are written.

    It tries to write, since permissions do not tell (a read-only mount, root). It removes folders that it made.
    """
    made = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        for path in (folder / name for name in files):
            if path.exists() and not path.is_file():
                return f"{path.name} in it is not a file, and a run writes one there; move it, or name another folder"
    except OSError as error:
        return cannot_be_written(error)
    finally:
        for path in made:
            with suppress(OSError):  # another launch may use it by now
                path.rmdir()
    return ""


def cannot_be_written(error: OSError) -> str:
    """Return the end of a sentence about a folder that cannot be written."""
    return f"cannot be written ({error.strerror or error}); name a folder that can"


@contextmanager
def appearing(path: str | Path) -> Iterator[Path]:
    """Yield the path of a draft, which is renamed to `path` at the end of the block, or removed after an error.

    If `path` exists and is not a regular file, such as /dev/stdout, the block writes to it directly. An OSError of a
    write names `path`.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        with naming(path):
            yield Path(path)
        return
    target = Path(os.path.realpath(path))
    draft = target.with_name(f".{target.name}.partial")
    try:
        with naming(path, draft):
            yield draft
            os.replace(draft, target)
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


@contextmanager
def naming(path: str | Path, draft: str | Path | None = None) -> Iterator[None]:
    """Have an OSError in the block name `path` if it names no file, or only the `draft`."""
    try:
        yield
    except OSError as error:
        if error.filename is not None and str(error.filename) != str(draft):
            raise
        if error.errno is None:
            raise OSError(f"{path}: {error}") from error
        raise OSError(error.errno, error.strerror, str(path)) from error
