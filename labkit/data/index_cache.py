"""Index arrays on disk under a hash of all that they depend on, so that later runs and other ranks only map them.

Each entry is a folder `HASH` with one .npy file for each array, and `description.json`, which says in words what the
arrays depend on. A rank that finds no entry builds the arrays and writes them into a folder of its own. It renames that
folder to `HASH` when all files are complete. So several ranks may build at once: each builds the same bytes, one rename
comes first, and the others take its files. A folder that lacks an array, as a full disk leaves one, does not count.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from labkit.config import ConfigError

DESCRIPTION = "description.json"
VERSION = 1
"""To be increased whenever the arrays of an unchanged key change."""

Arrays = dict[str, np.ndarray]


def checksum(array: np.ndarray) -> str:
    """Return a hash of the bytes of an array, as a part of a key."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array).data) if array.size else "empty"


def cached(folder: str | os.PathLike[str] | None, key: Mapping[str, Any], build: Callable[[], Arrays]) -> Arrays:
    """Return the arrays of `build`, mapped from `folder` if they are there, else built and written there.

    folder: None builds the arrays and stores nothing.
    key: all that the arrays depend on, as values that JSON can hold.

    Raises:
        ConfigError: the folder cannot be written.
    """
    if folder is None:
        return build()
    described = {"version": VERSION, **key}
    text = json.dumps(described, sort_keys=True)
    entry = Path(folder) / xxhash.xxh3_128_hexdigest(text.encode())
    described = json.loads(text)
    found = _mapped(entry, described)
    if found is not None:
        return found
    arrays = build()
    try:
        _write(entry, described, arrays)
    except OSError as error:
        why = f"cannot be written ({error.strerror or error})"
        raise ConfigError([f"data.cache = {str(folder)!r}: {why}; make room, or name another folder"]) from None
    return _mapped(entry, described) or arrays


def _mapped(entry: Path, described: Mapping[str, Any]) -> Arrays | None:
    """Return the arrays of a complete entry, read-only; None if there is none."""
    try:
        stored = json.loads((entry / DESCRIPTION).read_text())
        shapes = stored.pop("arrays")
        arrays = {name: np.load(entry / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in shapes}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    whole = stored == described and arrays.keys() == {file.stem for file in entry.glob("*.npy")}
    same = all([array.dtype.str, *array.shape] == shapes[name] for name, array in arrays.items())
    return arrays if whole and same else None


def _write(entry: Path, described: Mapping[str, Any], arrays: Arrays) -> None:
    """Write an entry under a temporary name, then rename it, unless another rank was first."""
    mine = entry.with_name(f"{entry.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    mine.mkdir(parents=True)
    try:
        for name, array in arrays.items():
            np.save(mine / f"{name}.npy", array, allow_pickle=False)
        shapes = {name: [array.dtype.str, *array.shape] for name, array in arrays.items()}
        (mine / DESCRIPTION).write_text(json.dumps({**described, "arrays": shapes}, indent=2) + "\n")
        if entry.exists() and _mapped(entry, described) is None:
            shutil.rmtree(entry, ignore_errors=True)
        try:
            os.rename(mine, entry)
        except OSError:
            if _mapped(entry, described) is None:
                raise
    finally:
        shutil.rmtree(mine, ignore_errors=True)
