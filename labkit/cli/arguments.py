"""Reading a command line: every problem at once, no abbreviations, nearest names, no option with two values; then
jsonargparse.

jsonargparse stops at the first error and expands abbreviations. So our own pass goes over the arguments (and over the
YAML file that they name) first and collects all that is wrong. What it lets through is typed; `train`, `parity` and
--print_config then have jsonargparse build the configuration from it (`help_text.checked_config`) and run what that
gives, held equal to our own reading. jsonargparse also writes the help.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from labkit.config import ConfigError, RunConfig
from labkit.config.errors import nearest, shown
from labkit.config.fields import (
    KNOWN_NAMES,
    SPECS,
    BadValueError,
    Entry,
    FieldSpec,
    Given,
    convert,
    convert_entries,
    resolve,
)


class Option(NamedTuple):
    """One option of a command."""

    name: str
    """With dashes; underscores are accepted as well."""
    kind: str
    """`int`, `float`, `bool`, `str` or `tuple[str, ...]`."""
    help: str
    default: Any = None
    aliases: tuple[str, ...] = ()
    """Other names for it, with underscores."""
    pairs: bool = False
    """Takes two words, a name and a value, and may be repeated."""

    @property
    def key(self) -> str:
        """Its name in `Arguments.options`."""
        return self.name.replace("-", "_")


@dataclass(frozen=True)
class Command:
    """One subcommand."""

    name: str
    summary: str
    """One line for `labkit --help`."""
    options: tuple[Option, ...]
    execute: Callable[[Arguments], int]
    """Does it; returns the exit code."""
    example: str
    words: str = ""
    """What its positional arguments are, in capitals; empty where it takes none."""
    configurable: bool = False
    """Whether it takes --config, --preset and every field of the configuration."""


@dataclass
class Arguments:
    """What was asked for."""

    options: dict[str, Any]
    words: list[str] = field(default_factory=list)
    config: RunConfig = field(default_factory=RunConfig)
    problems: list[str] = field(default_factory=list)
    """What is wrong so far."""
    source: str = "labkit"
    print_config: bool = False

    def refuse(self, extra: Sequence[str] = ()) -> None:
        """ConfigError with every problem, if there is any."""
        if self.problems or extra:
            raise ConfigError([*self.problems, *extra], source=self.source)


CONFIG_OPTIONS = (
    Option("config", "str", "YAML file of the run; fields on the command line come on top"),
    Option("preset", "str", "ready configuration under the file: tiny, llama_tiny, gpt2_124m, table1_1_2b, ..."),
    Option("print-config", "bool", "print the whole configuration as YAML, every field explained, and stop", False),
)


class _Scan(NamedTuple):
    """The command line cut into pieces, nothing typed yet."""

    options: list[tuple[Option, str, str]]
    """(option, name as written, value); pairs appear once for each with both words joined by a NUL."""
    entries: list[Entry]
    words: list[str]
    problems: list[str]


def read(command: Command, argv: Sequence[str]) -> Arguments:
    """The arguments of `command`, as far as they can be read.

    What is wrong is left in `problems`: the command adds what it finds itself and refuses all of it at once.
    """
    options = (*CONFIG_OPTIONS, *command.options) if command.configurable else command.options
    scan = _scan(argv, {o.key: o for o in options}, command)
    source = f"labkit {command.name}"
    values: dict[str, Any] = {o.key: [] if o.pairs else o.default for o in options}
    problems, given = list(scan.problems), Given()
    for option, written, text in scan.options:
        spec = FieldSpec("", option.key, option.kind, False, option.default)
        try:
            if option.pairs:
                name, value = text.split("\0")
                problems += given.add(f"-{option.name[0]} {name}", value, shown(value))
                values[option.key].append((name, value))
            else:
                values[option.key] = convert(spec, text, text=True)
                problems += given.add(f"--{option.name}", values[option.key], f"--{written} {shown(text)}")
        except BadValueError as rule:
            problems.append(f"--{written} {shown(text)}: {rule}")
    arguments = Arguments(values, scan.words, source=source, problems=problems)
    if command.configurable:
        _read_config(arguments, scan.entries)
    return arguments


def _scan(argv: Sequence[str], options: dict[str, Option], command: Command) -> _Scan:
    by_name = options | {alias: o for o in options.values() for alias in o.aliases}
    scan = _Scan([], [], [], [])
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if token == "-p" and "parameter" in options:
            token = "--parameter"
        if not token.startswith("-") or token == "-":
            if command.words:
                scan.words.append(token)
            else:
                scan.problems.append(f"{shown(token)}: labkit {command.name} takes no such word; options begin with --")
            continue
        written, equals, text = token.lstrip("-").partition("=")
        key = written.replace("-", "_")
        option = by_name.get(key) if token.startswith("--") else None
        dotted, why = resolve(written) if command.configurable and option is None else (None, "")
        if option is None and dotted is None:
            scan.problems.append(f"{token.partition('=')[0]}: {_unknown(key, by_name, command, why)}")
            if not equals and rest and not rest[0].startswith("-"):
                rest.pop(0)  # the value of the unknown option
            continue
        kind = option.kind if option else SPECS[str(dotted)].kind
        if not equals:
            text = _value(rest, kind, pairs=bool(option and option.pairs), words=bool(command.words))
        if text is None:
            words = "a name and a value" if option and option.pairs else "a value"
            scan.problems.append(f"--{written}: needs {words} after it")
        elif option:
            scan.options.append((option, written, text))
        else:
            scan.entries.append(Entry(f"--{written}", str(dotted), text, ""))
    return scan


def _value(rest: list[str], kind: str, *, pairs: bool, words: bool) -> str | None:
    """The words that belong to an option, taken off `rest`; None where they are missing.

    A bool may stand alone. A word after it is its value, unless the command takes `words`: then only `true`, `false`
    and `null` are.
    """
    if kind == "bool":
        alone = not rest or rest[0].startswith("-") or (words and rest[0].lower() not in ("true", "false", "null"))
        return "true" if alone else rest.pop(0)
    count = 2 if pairs else 1
    if len(rest) < count or any(word.startswith("--") for word in rest[:count]):
        return None
    taken, rest[:count] = rest[:count], []
    return "\0".join(taken)


def _unknown(key: str, by_name: dict[str, Option], command: Command, why: str) -> str:
    names = [o.name for o in by_name.values()] + [n.replace("_", "-") for n in by_name]
    if command.configurable:
        if why and "unknown field" not in why:
            return why.partition(": ")[2]
        names += list(KNOWN_NAMES)
    hint = nearest(key, [f"--{name}" for name in names]) or nearest(key.replace("_", "-"), names)
    return f"unknown option{hint or f'; labkit {command.name} --help lists them'}"


def _read_config(arguments: Arguments, entries: Sequence[Entry]) -> None:
    from labkit.config import fields, presets, yaml_text

    options, problems = arguments.options, arguments.problems
    arguments.print_config = options.pop("print_config")
    path, preset = options["config"], options["preset"]
    config, values = RunConfig(), {}
    if path is None and preset is None:
        problems.append(
            "--config: nothing to run; give a YAML file (--config f.yaml), a preset (--preset tiny) or both"
        )
    try:
        config = presets.get(preset) if preset is not None else config
    except ConfigError as error:
        problems += [f"--preset {shown(preset)}: {p}" for p in error.problems]
    try:
        if path is not None:
            written, bad_keys = yaml_text.parse(yaml_text.read_file(path))
            values, bad_values = fields.convert_entries(written)
            problems += [f"{path}: {p}" for p in bad_keys + bad_values]
    except ConfigError as error:
        problems += [f"--config {shown(path, 200)}: {p}" for p in error.problems]
    newer, bad = convert_entries(entries, text=True)
    problems += bad
    arguments.config = config.replaced(values | newer)
