"""`labkit lab`: JupyterLab on copies of the chapters in the user's folder, or on the chapters of a checkout."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from urllib.parse import quote

from labkit.check.chapter_copies import CHAPTERS, chapters_in, linked_root, write_copies
from labkit.cli.arguments import Arguments, Command, Option
from labkit.cli.exercises_command import OF_EXERCISES, OVERWRITE, folder_of
from labkit.cli.output import show

FOLDER = "chapters"
SETTINGS = Path(__file__).parent / "jupyter"
"""Defaults of JupyterLab: it does not ask at its first start whether to fetch news. What users have set stays."""


def execute(arguments: Arguments) -> int:
    """Write the copies that are missing, and become JupyterLab with the first chapter open."""
    options = arguments.options
    copies = options["exercises"] or options["overwrite"]
    folder = folder_of(arguments, OF_EXERCISES if options["exercises"] else FOLDER, copies=copies)
    if folder != CHAPTERS:
        show(write_copies(folder, exercises=options["exercises"], overwrite=options["overwrite"]))
    root = linked_root(folder)
    first = quote(chapters_in(folder)[0].relative_to(root).as_posix())
    jupyter = [sys.executable, "-m", "jupyterlab", f"--notebook-dir={root}", f"--LabApp.default_url=/lab/tree/{first}"]
    jupyter += [f"--{name}={options[name]}" for name in ("ip", "port") if options[name] is not None]
    jupyter += [] if options["browser"] else ["--no-browser"]
    jupyter += ["--allow-root"] if os.geteuid() == 0 else []  # in a container there is often no other user
    paths = [str(SETTINGS), *filter(None, [os.environ.get("JUPYTER_CONFIG_PATH")])]
    sys.stdout.flush()
    os.execve(sys.executable, jupyter, os.environ | {"JUPYTER_CONFIG_PATH": os.pathsep.join(paths)})


COMMAND = Command(
    name="lab",
    summary=f"Open JupyterLab on copies of the chapters in FOLDER (default: {FOLDER}). A second call keeps your work.",
    options=(
        Option("exercises", "bool", f"copies without solutions and outputs, in {OF_EXERCISES}", False),
        OVERWRITE,
        Option("browser", "bool", "open a browser; false only prints the address", True),
        Option(
            "ip",
            "str",
            "address on which Jupyter listens, such as 0.0.0.0 in a container",
            unset="default: localhost",
        ),
        Option(
            "port",
            "int",
            "port on which Jupyter listens",
            ge=1,
            le=65535,
            unset="default: the first free one from 8888",
        ),
    ),
    execute=execute,
    example="labkit lab course --exercises",
    words="[FOLDER]",
    paths=True,
)
