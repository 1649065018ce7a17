"""`labkit lab`: JupyterLab on copies of the chapters in the user's folder, without solutions and outputs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from urllib.parse import quote

from labkit.check.chapter_copies import CHAPTERS, chapters_in, linked_root
from labkit.cli.arguments import Arguments, Command, Option
from labkit.cli.exercises_command import DIR, folder_of, prepare

SETTINGS = Path(__file__).parent / "jupyter"
"""Defaults of JupyterLab: it does not ask at its first start whether to fetch news. What users have set stays."""


def execute(arguments: Arguments) -> int:
    """Write the copies that are missing or outdated, and become JupyterLab with the first chapter open."""
    options, folder = arguments.options, folder_of(arguments)
    prepare(folder, arguments)
    root = linked_root(folder, CHAPTERS.parent)
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
    summary="Open JupyterLab on copies of the chapters without solutions and outputs. A second call keeps every copy "
    "that you have changed, and renews the others if labkit's chapters are newer.",
    options=(
        DIR,
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
    example="labkit lab --dir course",
)
