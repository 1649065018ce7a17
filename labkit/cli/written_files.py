"""What is wrong with the name of a file that a command will write, said before the work is done."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile

from labkit.cli.rank_options import first_rank
from labkit.config.errors import no_file, shown
from labkit.config.field_spec import LONGEST_NAME

ROOM = 30
"""Bytes that must be free at the end of a file name for what labkit appends while the file is not finished."""
PICTURES = (".png", ".svg", ".pdf")
"""Endings of --plot."""


def output_problems(name: str, path: str | None, made: Sequence[str | None] = ()) -> list[str]:
    """Return the problems of a file that a command will write.

    name: name of the argument. made: folders that the command will make, with those above them.
    """
    if path is None or not first_rank():
        return []
    folder, given = os.path.dirname(path) or ".", f"{name} {shown(path, 200)}"
    if os.path.isdir(path):
        return [f"{given}: {no_file(path)}"]
    if os.path.exists(path) and not os.path.isfile(path):
        return [f"{given}: is not a regular file; choose another name"]
    above = {parent for each in made if each for parent in (Path(each).absolute(), *Path(each).absolute().parents)}
    if not os.path.isdir(folder) and Path(folder).absolute() in above:
        return []
    if not os.path.isdir(folder):
        return [f"{given}: there is no folder {shown(folder, 200)}; make it first"]
    if (size := len(os.fsencode(os.path.basename(path)))) > LONGEST_NAME - ROOM:
        return [f"{given}: its name has {size} bytes, but at most {LONGEST_NAME - ROOM} are allowed; shorten it"]
    try:
        if os.path.exists(path):
            open(path, "ab").close()
        TemporaryFile(dir=folder).close()  # because a draft of the file is written there
        return []
    except OSError as error:
        return [f"{given}: {error.strerror or error}; give a path that can be written"]


def plot_problems(path: str | None) -> list[str]:
    """Return the problem of a --plot whose ending names no kind of picture."""
    if not path or Path(path).suffix.lower() in PICTURES:
        return []
    return [f"--plot {shown(path)}: its name ends with one of {', '.join(PICTURES)}"]
