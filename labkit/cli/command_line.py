"""`labkit SUBCOMMAND ...`: picks the subcommand, imports only that one, and turns errors into messages and exit codes.

Exit codes: 0 done, 1 failed, 2 the request was wrong, 130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Sequence

from labkit.cli.arguments import Command, read
from labkit.config import ConfigError
from labkit.config.errors import nearest, shown

COMMANDS = {
    "doctor": ("doctor_command", "what this machine offers, and what is missing"),
    "groups": ("groups_command", "rank groups of a layout, of any size"),
    "train": ("train_command", "train a model under a layout"),
    "parity": ("parity_command", "hold layouts against one process, tensor by tensor"),
    "run": ("run_command", "run chapters as notebooks, with parameters"),
}
"""Subcommand -> (module, what it is for)."""

_HELP = """\
labkit: a workbench for Megatron-style parallel training

  labkit COMMAND [options]         labkit COMMAND --help

{commands}

start here
  labkit groups --world-size 16 --tp 4 --pp 2
  labkit train --preset tiny --nproc 4 --parallel.tp 2 --parallel.pp 2
  labkit run 00 --out build --html
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (`sys.argv` where none is given); returns the exit code. A user's mistake never raises."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ValueError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0" and "TORCHELASTIC_RUN_ID" in os.environ:
            time.sleep(2)  # every rank of torchrun finds the same; the first says it, and is not ended before it has
            return 2
        return _say(_message(error, words), 2)
    except _failures() as error:
        return _say(_message(error, words), 1)


def _failures() -> tuple[type[BaseException], ...]:
    """Errors whose message says everything. A launch that was never made has no RankError to raise."""
    launch = sys.modules.get("labkit.launch.report")
    return (OSError, CommandFailedError, *([launch.RankError] if launch is not None else []))


class CommandFailedError(RuntimeError):
    """A command did what was asked and it failed; the message is for the user."""


def _message(error: BaseException, words: list[str]) -> str:
    text = str(error) or type(error).__name__
    if isinstance(error, ConfigError) and error.source.startswith("labkit"):
        return text
    return f"labkit {words[0]}: {text}"


def _say(message: str, code: int) -> int:
    sys.stdout.flush()
    print(message, file=sys.stderr)
    return code


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        width = max(len(name) for name in COMMANDS)
        commands = "\n".join(f"  {name:<{width}}   {summary}" for name, (_, summary) in COMMANDS.items())
        print(_HELP.format(commands=commands), end="")
        return 0
    if words[0] == "--version":
        from importlib.metadata import version

        print(f"labkit {version('labkit')}")
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        hint = nearest(name, COMMANDS)
        kind = "option" if name.startswith("-") else "command"
        raise ConfigError([f"unknown {kind} {shown(name)}; commands: {', '.join(COMMANDS)}{hint}"], source="labkit")
    command: Command = importlib.import_module(f"labkit.cli.{COMMANDS[name][0]}").COMMAND
    if any(word in ("-h", "--help") for word in rest):
        from labkit.cli.help_text import parser_of

        parser_of(command).print_help()
        return 0
    arguments = read(command, rest)
    if arguments.print_config:
        arguments.refuse(arguments.config.problems())
        from labkit.cli.help_text import checked_config

        print(checked_config(command, arguments).to_yaml(), end="")
        return 0
    return command.execute(arguments)
