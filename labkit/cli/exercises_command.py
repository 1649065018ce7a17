"""`labkit exercises`: copies of the chapters without solutions and outputs."""

from __future__ import annotations

import shlex
from pathlib import Path

from labkit.check.chapter_copies import CHAPTERS, write_copies
from labkit.check.parameters import can_be_written
from labkit.cli.arguments import Arguments, Command, Option
from labkit.cli.output import show
from labkit.config.errors import shown

OF_EXERCISES = "exercises"
OVERWRITE = Option("overwrite", "bool", "replace existing files, including your work in them", False)


def execute(arguments: Arguments) -> int:
    """Write the copies that are missing, and say where they are."""
    folder = folder_of(arguments, OF_EXERCISES)
    show(write_copies(folder, exercises=True, overwrite=arguments.options["overwrite"]))
    show(f"open them with: {shlex.join(['labkit', 'lab', *arguments.words, '--exercises'])}")
    return 0


def folder_of(arguments: Arguments, usual: str, *, copies: bool = True) -> Path:
    """Return the folder that the command line names, or `usual`. Raises ConfigError if chapters cannot be there.

    copies: they must be copies, so the folder of the chapters themselves is wrong.
    """
    folder = Path(*arguments.words[:1] or [usual]).resolve()
    problems = [f"{shown(word)}: one folder is enough; leave this out" for word in arguments.words[1:]]
    if folder == CHAPTERS:
        problems += [f"{folder}: holds the original chapters; name another folder"] if copies else []
    elif not can_be_written(folder):
        rule = "is a file; name a folder" if folder.is_file() else "cannot be written; name another folder"
        problems.append(f"{folder}: {rule}")
    arguments.refuse(problems)
    return folder


COMMAND = Command(
    name="exercises",
    summary=f"Copy the chapters without solutions and outputs into FOLDER (default: {OF_EXERCISES}), to predict before "
    "you see. A second call keeps your work.",
    options=(OVERWRITE,),
    execute=execute,
    example="labkit exercises course",
    words="[FOLDER]",
    paths=True,
)
