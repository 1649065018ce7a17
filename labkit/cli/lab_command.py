"""`labkit lab`: JupyterLab on copies of the chapters in the user's folder."""

from __future__ import annotations

import os
import sys

from labkit.check.chapter_copies import write_copies
from labkit.cli.arguments import Arguments, Command, Option
from labkit.cli.exercises_command import OF_EXERCISES, OVERWRITE, folder_of
from labkit.cli.output import show

FOLDER = "chapters"


def execute(arguments: Arguments) -> int:
    """Write the copies that are missing, and become JupyterLab."""
    options = arguments.options
    folder = folder_of(arguments, OF_EXERCISES if options["exercises"] else FOLDER)
    show(write_copies(folder, exercises=options["exercises"], overwrite=options["overwrite"]))
    jupyter = [sys.executable, "-m", "jupyterlab", f"--notebook-dir={folder}"]
    jupyter += [f"--{name}={options[name]}" for name in ("ip", "port") if options[name] is not None]
    jupyter += [] if options["browser"] else ["--no-browser"]
    jupyter += ["--allow-root"] if os.geteuid() == 0 else []  # in a container there is often no other user
    sys.stdout.flush()
    os.execv(sys.executable, jupyter)


COMMAND = Command(
    name="lab",
    summary=f"Open JupyterLab on copies of the chapters in FOLDER (default: {FOLDER}). A second call keeps your work.",
    options=(
        Option("exercises", "bool", f"copies without solutions and outputs, in {OF_EXERCISES}", False),
        OVERWRITE,
        Option("browser", "bool", "open a browser; false only prints the address", True),
        Option("ip", "str", "address on which Jupyter listens, such as 0.0.0.0 in a container (default: localhost)"),
        Option("port", "int", "port on which Jupyter listens (default: the first free one from 8888)", ge=1, le=65535),
    ),
    execute=execute,
    example="labkit lab course --exercises",
    words="[FOLDER]",
    paths=True,
)
