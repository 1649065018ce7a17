"""`labkit SUBCOMMAND ...`: import the one subcommand, run it, and turn errors into messages and exit codes.

Exit codes: 0 done, 1 failed, 2 the request was wrong, 75 stopped by SIGTERM (run the same again), 130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence

from labkit.cli.arguments import Command, read
from labkit.cli.output import readers_may_leave, room, show
from labkit.config import ConfigError
from labkit.config.errors import nearest, shown

COMMANDS = {
    "doctor": ("doctor_command", "check that this machine can launch ranks"),
    "calibrate": ("calibrate_command", "measure this machine, for `labkit plan`"),
    "groups": ("groups_command", "print the rank groups of a layout of any size"),
    "order": ("order_command", "print a pipeline schedule, or check your own"),
    "plan": ("plan_command", "rank every layout of a model on a machine by its predicted step"),
    "data": ("data_command", "make datasets from text: clean, tokenise, show, merge"),
    "config": ("config_command", "convert configurations of Megatron-LM, torchtitan and others"),
    "train": ("train_command", "train a model under a layout"),
    "watch": ("watch_command", "show live or finished runs from their folders"),
    "why": ("why_command", "say where a run's step time went, next to the prediction"),
    "checkpoint": ("checkpoints.checkpoint_command", "list, verify, export, import checkpoints"),
    "eval": ("checkpoints.eval_command", "score checkpoints: perplexity, LAMBADA"),
    "finetune": ("checkpoints.finetune_command", "fine-tune a BERT on MNLI, QQP, RACE or SQuAD"),
    "generate": ("checkpoints.generate_command", "continue prompts with a checkpoint"),
    "parity": ("parity_command", "compare layouts with one process, tensor by tensor"),
    "run": ("run_command", "run chapters as notebooks, with parameters"),
    "lab": ("lab_command", "open JupyterLab on copies of the chapters"),
    "exercises": ("exercises_command", "copy the chapters without solutions and outputs"),
    "progress": ("progress_command", "show what you solved and predicted in the chapters"),
    "grade": ("grading.grade_command", "score the exercises in the copies of a class"),
    "board": ("board.board_command", "show in a room who has solved what"),
    "completion": ("completion_command", "print the script that completes commands in your shell"),
}
"""Subcommand -> (module, its line in the help)."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, the one that shells use."""
SILENCE = 2.0
"""Seconds that a rank of torchrun waits before it prints an error that rank 0 probably prints too."""

_HELP = """\
labkit: a workbench for Megatron-style parallel training

  labkit COMMAND [options]    labkit COMMAND --help    or python -m labkit ...

{commands}

start here
  labkit groups --world-size 16 --tp 4 --pp 2
  labkit order --pp 4 --vpp 2 --microbatches 8
  labkit train --preset tiny --nproc 4 --parallel.tp 2 --parallel.pp 2
  labkit run 00 --out build --html
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (`sys.argv` by default) and return the exit code. A user's mistake never raises."""
    words = list(sys.argv[1:] if argv is None else argv)
    with readers_may_leave():
        code = exit_code(lambda: _dispatch(words), f"labkit {words[0]}" if words else "labkit")
        if code == INTERRUPTED and argv is None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # another one must not disturb the interpreter's end
        return code


def exit_code(execute: Callable[[], int], called: str) -> int:
    """Return the result of `execute`. Its errors become a message, which begins with `called`, and an exit code."""
    try:
        code = execute()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as interrupt:
        return _say(str(interrupt) or "interrupted", INTERRUPTED)
    except _errors_of_users() as error:
        return _say(_message(error, called), 2, may_be_everybodys=True)
    except _failures() as error:
        return _say(_message(error, called), 1)
    except MemoryError as error:
        rule = "there is not enough memory for this; take smaller sizes"
        return _say(f"{called}: {rule}{f' ({error})' if str(error) else ''}", 1)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("labkit"):
            raise
        return _say(f"{called}: the package {error.name} is not installed; pip install {error.name}", 1)
    except ValueError:
        return _say(f"{called}: an error inside labkit's code\n{traceback.format_exc().rstrip()}", 1)


def _errors_of_users() -> tuple[type[BaseException], ...]:
    """Return the classes of errors that a user can fix, as the message says. A module that was never imported raised
    none."""
    return (
        ConfigError,
        *_loaded(("labkit.parallel.vocab.token_ids", "TokenIdError"), ("labkit.schedules.ir", "ScheduleError")),
    )


def _failures() -> tuple[type[BaseException], ...]:
    """Return the classes of errors whose message needs no traceback."""
    return (OSError, CommandFailedError, *_loaded(("labkit.launch.failure_report", "RankError")))


def _loaded(*names: tuple[str, str]) -> list[type[BaseException]]:
    return [getattr(sys.modules[module], name) for module, name in names if module in sys.modules]


class CommandFailedError(RuntimeError):
    """The request was right, and the command failed; the message is for the user."""


def _message(error: BaseException, called: str) -> str:
    text = str(error) or type(error).__name__
    if isinstance(error, ConfigError) and error.source.startswith(("labkit", called)):
        return text
    return f"{called}: {text}"


def _say(message: str, code: int, *, may_be_everybodys: bool = False) -> int:
    """Print to stderr, under torchrun with the rank.

    If every rank may have the same error, only the first rank of a machine prints it at once, because torchrun then
    ends the others. A rank that still runs after `SILENCE` had an error of its own, so it prints it."""
    sys.stdout.flush()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if may_be_everybodys and os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(SILENCE)
        show(f"rank {os.environ.get('RANK', '?')}: {message}", stream=sys.stderr)
        os._exit(code)  # a normal exit would wait for ranks that wait for this one
    show(message, stream=sys.stderr)
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
    return run_command(importlib.import_module(f"labkit.cli.{COMMANDS[name][0]}").COMMAND, rest)


def run_command(command: Command, rest: list[str]) -> int:
    """Read the words after the name of a command and execute it, or print its help or the configuration."""
    if any(word in ("-h", "--help", "--help-all") for word in rest):
        from labkit.cli.help_text import help_text

        print(help_text(command, rest))
        return 0
    arguments = read(command, rest)
    if arguments.print_config:
        arguments.refuse(arguments.config.problems())
        print(arguments.config.to_commented_yaml(room()), end="")
        return 0
    if arguments.ignored and os.environ.get("RANK", "0") == "0":  # torchrun gives the command to every rank
        show(f"ignored, since labkit trains the same without: {', '.join(arguments.ignored)}", stream=sys.stderr)
    return command.execute(arguments)
