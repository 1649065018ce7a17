"""`labkit exercises`: copies of the chapters to work in, without solutions and outputs; `labkit lab` opens the same."""

from __future__ import annotations

import shlex
from pathlib import Path

from labkit.check.chapter_copies import CHAPTERS, chapters_in, write_beside, write_copies
from labkit.cli.arguments import Arguments, Command, Option
from labkit.cli.output import show
from labkit.config.errors import shown
from labkit.output_files import unwritable

FOLDER = "chapters"
DIR = Option("dir", "str", "folder of the copies", FOLDER, path="any")


def execute(arguments: Arguments) -> int:
    """Write the copies that are missing or outdated, or one chapter beside the reader's own."""
    folder = folder_of(arguments)
    number = arguments.options["beside"]
    if number is None:
        prepare(folder, arguments)
        show(f"open them with: {_command('lab', arguments)}")
        return 0
    known = {path.name[:2]: path.name for path in chapters_in(CHAPTERS)}
    if number not in known:
        arguments.refuse([f"--beside {shown(number)}: no such chapter; choose one of {', '.join(known)}"])
    show(f"written: {write_beside(folder, known[number], CHAPTERS)}")
    return 0


def folder_of(arguments: Arguments) -> Path:
    """Return the folder of --dir. Raises ConfigError if copies cannot be kept there."""
    given = arguments.options["dir"]
    folder = Path(given).resolve()
    temporary = [base / "build" for base in (Path.cwd(), CHAPTERS.parent)]
    if folder.is_relative_to(CHAPTERS):
        problem = "holds the original chapters; name another folder"
    elif any(folder.is_relative_to(build) for build in temporary):
        problem = "is inside build, which `make clean` removes, so your work would be lost; name another folder"
    elif folder.exists() and not folder.is_dir():
        problem = "is a file; name a folder"
    else:
        problem = unwritable(folder)
    arguments.refuse([f"--dir {shown(given, 200)}: {problem}"] if problem else [])
    return folder


def prepare(folder: Path, arguments: Arguments) -> None:
    """Write the copies into the folder, and say what became of them, and how to get newer chapters beside them."""
    copies = write_copies(folder, CHAPTERS)
    show(str(copies))
    if numbers := [name[:2] for name in copies.outdated]:
        newer = f"labkit has newer versions of {', '.join(numbers)}, which you have changed"
        show(f"{newer}; to get one next to yours: {_command('exercises', arguments)} --beside {numbers[0]}")


def _command(name: str, arguments: Arguments) -> str:
    """Return a command line for the same folder."""
    folder = arguments.options["dir"]
    return shlex.join(["labkit", name, *(["--dir", folder] if folder != FOLDER else [])])


COMMAND = Command(
    name="exercises",
    summary="Copy the chapters without solutions and outputs, to work in; `labkit lab` opens them. A second call keeps "
    "every copy that you have changed, and renews the others if labkit's chapters are newer.",
    options=(
        DIR,
        Option(
            "beside",
            "str",
            "write only this chapter, such as 08, next to your own copy of it",
            unset="default: those that are missing or outdated",
        ),
    ),
    execute=execute,
    example="labkit exercises --dir course",
)
