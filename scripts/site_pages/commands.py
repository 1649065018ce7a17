"""The reference of the command line, from the tables of `labkit.cli`."""

from __future__ import annotations

import importlib

from labkit.cli import command_line
from labkit.cli.arguments import CONFIG_OPTIONS, Action, Command, Option
from labkit.cli.command_line import COMMANDS
from site_pages.tables import table

_HEAD = """\
# Command line

Every command and its options. `labkit COMMAND --help` prints the same in a terminal, and `python -m labkit` is the same
command as `labkit`. A `-` and a `_` in the name of an option are the same, and names cannot be abbreviated.
"""


def commands_page() -> str:
    """Return the page, with a section for each command."""
    commands = [importlib.import_module(f"labkit.cli.{module}").COMMAND for module, _ in COMMANDS.values()]
    rows = [
        (f"[`{command.called}`](#{_anchor(command)})", line) for command, (_, line) in zip(commands, COMMANDS.values())
    ]
    exit_codes = (command_line.__doc__ or "").split("\n\n")[1]
    return "\n".join([_HEAD, exit_codes, table(("command", "what it does"), rows), *map(_section, commands)])


def _anchor(command: Command) -> str:
    return f"labkit-{command.name}"


def _section(command: Command) -> str:
    """A command: what it does, how it is called, and the tables of its actions and options."""
    usage = " ".join(filter(None, (command.called, command.words, "[options]" if command.all_options else "")))
    example = f"\n{command.example}" if command.example else ""
    lines = [f"## {command.called}\n\n{command.summary}\n", f"```\n{usage}{example}\n```\n"]
    if command.actions:
        rows = [_action(command, name, action) for name, action in command.actions.items()]
        lines.append(table(("action", "what it does", "options that it reads"), rows))
    options = [option for option in command.all_options if option not in CONFIG_OPTIONS]
    if options:
        lines.append(table(("option", "default", "meaning"), map(_option, options)))
    if command.configurable:
        names = ", ".join(f"`--{option.name}`" for option in CONFIG_OPTIONS)
        fields = "[every field of the configuration](/docs/config.md)"
        lines.append(f"It also takes {names}, and {fields}, as in `--parallel.tp 2`.\n")
    return "\n".join(lines)


def _action(command: Command, name: str, action: Action) -> tuple[str, str, str]:
    words = f"{name} {action.words}".strip()
    options = ", ".join(f"`--{option.name}`" for option in command.options if option.key in action.options)
    return f"`{words}`", (action.do.__doc__ or "").partition("\n")[0], options


def _option(option: Option) -> tuple[str, str, str]:
    short = "`-p`, " if option.pairs else ""
    values = {"bool": "", "tuple[str, ...]": " A,B", "tuple[int, ...]": " 1,0"}
    value = " NAME VALUE" if option.pairs else values.get(option.kind, f" {option.kind.upper()}")
    default = option.unset.removeprefix("default: ") or f"`{option.default_words}`"
    return f"{short}`--{option.name}{value}`", default, option.help
