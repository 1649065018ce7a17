"""`labkit completion`: a script for bash, zsh or fish that completes commands, options and their values.

The script is made from the tables of the commands, so it knows what this version of labkit knows, and pressing Tab
starts no Python.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from labkit.check.chapter_copies import CHAPTERS, chapters_in
from labkit.cli.arguments import MEGATRON_OPTIONS, Arguments, Command
from labkit.config import presets
from labkit.config.field_spec import FieldSpec
from labkit.config.fields import SPECS, resolve

_BASH = """\
_labkit() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
    case "$COMP_CWORD $before" in
        1\\ *) words="{commands} --help --version" ;;
{values}
    esac
    if [[ -z "$words" ]]; then
        case "${{COMP_WORDS[1]}}" in
{options}
        esac
        if [[ "$word" != -* ]]; then words="${{words%%--*}}"; fi
    fi
    COMPREPLY=( $(compgen -W "$words" -- "$word") )
}}
complete -o default -F _labkit labkit
"""
_ZSH = "autoload -U +X compinit && compinit -u\nautoload -U +X bashcompinit && bashcompinit\n"


def _bash() -> str:
    """Return the script for bash. A word that begins with a dash is completed to options, any other to the actions of
    the command, or by bash to a file."""
    commands = _commands()
    values = {
        option: _values(spec)
        for command in commands
        for spec in _specs(command)
        if _values(spec)
        for option in _options(spec)
    }
    lines = [f'        *\\ {option}) words="{" ".join(words)}" ;;' for option, words in values.items()]
    options = []
    for command in commands:
        words = [*_words(command), *(option for spec in _specs(command) for option in _options(spec)), "--help"]
        options.append(f'            {command.name}) words="{" ".join(words)}" ;;')
    names = " ".join(command.name for command in commands)
    return _BASH.format(commands=names, values="\n".join(lines), options="\n".join(options))


def _fish() -> str:
    """Return the script for fish, which also shows what each command and option is for."""
    lines = []
    for command in _commands():
        lines.append(f"complete -c labkit -n __fish_use_subcommand -a {command.name} -d {_quoted(command.summary)}")
        given = f"complete -c labkit -n '__fish_seen_subcommand_from {command.name}'"
        lines += [f"{given} -a {action}" for action in _words(command)]
        for spec in _specs(command):
            words = " ".join(_values(spec))
            takes = "" if spec.kind == "bool" else f" -x -a {_quoted(words)}" if words else " -r"
            names = " ".join(f"-l {option[2:]}" for option in _options(spec))
            lines.append(f"{given} {names} -d {_quoted(spec.doc)}{takes}")
    return "\n".join(lines) + "\n"


SHELLS: dict[str, Callable[[], str]] = {"bash": _bash, "zsh": lambda: _ZSH + _bash(), "fish": _fish}


def _commands() -> list[Command]:
    from labkit.cli.command_line import COMMANDS

    return [importlib.import_module(f"labkit.cli.{module}").COMMAND for module, _ in COMMANDS.values()]


def _specs(command: Command) -> list[FieldSpec]:
    """Return the options of a command; if it takes them, all fields of the configuration and Megatron-LM's flags."""
    return [*command.all_options, *((*SPECS.values(), *MEGATRON_OPTIONS) if command.configurable else ())]


def _options(spec: FieldSpec) -> list[str]:
    """Return the options that set a field, as `labkit train --help` writes them: with dashes, labkit's name first."""
    names = [spec.dotted, *spec.aliases]
    if spec.dotted != spec.name and resolve(spec.name)[0] == spec.dotted:
        names.append(spec.name)  # enough, if no other section has it
    return [f"--{name}" if "." in name else f"--{name.replace('_', '-')}" for name in names]


def _words(command: Command) -> list[str]:
    """Return the words that may follow the name of a command, if only some may."""
    if command.name == "run":
        return [path.stem for path in chapters_in(CHAPTERS)]
    return list(command.actions) or (command.words.split("|") if "|" in command.words else [])


def _values(spec: FieldSpec) -> tuple[str, ...]:
    """Return the words that an option may have; empty if any word will do."""
    return tuple(presets.names()) if spec.dotted == "preset" else spec.choices


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def execute(arguments: Arguments) -> int:
    """Print the script of the shell that the command line names."""
    shell, *more = arguments.words or [""]
    problem = f"give one of {', '.join(SHELLS)}, as in labkit completion bash" if more or shell not in SHELLS else ""
    arguments.refuse([problem])
    print(SHELLS[shell](), end="")
    return 0


COMMAND = Command(
    name="completion",
    summary="Print a script that completes labkit's commands, options and values in your shell. Write it into the "
    'folder of completions of the shell, or run it in a start-up file: eval "$(labkit completion bash)".',
    options=(),
    execute=execute,
    example="labkit completion bash > ~/.local/share/bash-completion/completions/labkit",
    words="|".join(SHELLS),
)
