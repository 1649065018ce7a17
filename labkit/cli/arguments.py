"""Read a command line in one pass: report all problems at once, with the nearest name for a wrong one.

Names cannot be abbreviated, and an option has one value.

Options belong to a command; if the command is `configurable`, every field of the configuration is an option, too. The
loop in `read` is labkit's own, because libraries for command lines stop at the first error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from labkit.config import ConfigError, RunConfig, fields, megatron_flags
from labkit.config.errors import counted, nearest, shown
from labkit.config.field_spec import BadValueError, FieldSpec
from labkit.config.fields import KNOWN_NAMES, NOT_FIELDS, SPECS, Entry, Given, extra_specs, resolve


@dataclass(frozen=True)
class Option(FieldSpec):
    """One option of a command. Names have dashes, aliases underscores; users may write either for both."""

    pairs: bool = False
    """Whether it takes two words, a name and a value, or both as NAME=VALUE, and may be repeated."""
    unset: str = ""
    """What the help says in place of `default: ` and the default, such as `required` or `default: one per core`."""

    @property
    def key(self) -> str:
        """The option's name in `Arguments.options`."""
        return self.name.replace("-", "_")

    @property
    def names(self) -> tuple[str, ...]:
        """Every name by which it may be given, with underscores."""
        return (self.key, *self.aliases)


class Action(NamedTuple):
    """One action of a command that has several, such as `labkit data merge`."""

    do: Callable[..., int]
    """Function that performs it and returns the exit code; the first line of its docstring is the action's help."""
    words: str
    """Names of the words after its own; one that ends with `...` is one or more words."""
    options: tuple[str, ...] = ()
    """Keys of the options that it reads."""


@dataclass(frozen=True)
class Command:
    """One subcommand: `execute` performs it and returns the exit code."""

    name: str
    summary: str
    options: tuple[Option, ...]
    execute: Callable[[Arguments], int]
    example: str
    """A command line to copy, or several, one per line."""
    words: str = ""
    """The name of its positional arguments, in capitals; empty if it takes none."""
    paths: bool = False
    """Whether these arguments may be paths."""
    configurable: bool = False
    """Whether the command takes --config, --preset and every field of the configuration."""
    program: str = "labkit"
    """First word of the command line: `labkit`, or `python` before the name of a script."""
    preset: str | None = None
    """Preset that is used if the command line names neither a preset nor a file."""
    sources: tuple[str, ...] = ()
    """Keys of options that say what to run in place of a preset, a file or fields."""
    actions: Mapping[str, Action] = field(default_factory=dict)
    """The actions of a command that has several, by the word that names them."""
    extra_args_provider: type | None = None
    """Fields of a script, which the command takes as options, too (`RunConfig.with_extra`)."""

    @property
    def called(self) -> str:
        """The command as users write it, such as `labkit train`."""
        return f"{self.program} {self.name}"

    @property
    def all_options(self) -> tuple[Option, ...]:
        """Its own options, after those of a configuration."""
        return (*CONFIG_OPTIONS, *self.options) if self.configurable else self.options


@dataclass
class Arguments:
    """A command line as it was read."""

    options: dict[str, Any]
    words: list[str] = field(default_factory=list)
    config: RunConfig = field(default_factory=RunConfig)
    problems: list[str] = field(default_factory=list)
    """Everything that was found wrong so far."""
    source: str = "labkit"
    print_config: bool = False
    ignored: list[str] = field(default_factory=list)
    """Flags of Megatron-LM that change nothing here."""
    given: dict[str, Any] = field(default_factory=dict)
    """Fields of the configuration that the command line itself sets, by dotted name."""
    typed: dict[str, str] = field(default_factory=dict)
    """Name in a message, such as `parallel.tp` or `world_size` -> the name that the user typed, `--tp` or `--nproc`."""

    def refuse(self, extra: Sequence[str] = ()) -> None:
        """Raise ConfigError with every problem, if there is one. Empty and repeated sentences are left out."""
        if problems := [*self.problems, *filter(None, dict.fromkeys(extra))]:
            raise ConfigError(list(map(self._as_typed, problems)), source=self.source)

    def action(self, command: Command) -> tuple[Action, list[str]]:
        """Return the action that the first word names, and the words after it.

        Raises ConfigError if there is no such action, if it takes another number of words, and for options that it does
        not read.
        """
        name, *words = self.words or [""]
        if name not in command.actions:
            missing = f"{shown(name)}: there is no such action" if self.words else "no action named"
            hint = nearest(name, command.actions) if name else ""
            self.refuse([f"{missing}; give one of {', '.join(command.actions)}, as in {command.example}{hint}"])
        action, problems = command.actions[name], []
        least = len(action.words.split())
        if len(words) < least or (len(words) > least and "..." not in action.words):
            problems.append(f"{name} takes {action.words}, got {counted(len(words), 'word')}")
        idle = [option for option in command.options if option.key not in action.options]
        given = [option.name for option in idle if self.options[option.key] != option.default]
        problems += [f"--{option}: {name} does not read it; leave it out" for option in given]
        self.refuse(problems)
        return action, words

    def _as_typed(self, problem: str) -> str:
        """Return `--tp -1: must ...` for `parallel.tp = -1: must ...`, if `--tp` is what the user typed."""
        name, equals, rest = problem.partition(" = ")
        written = self.typed.get(name) or self.typed.get(name.rpartition(".")[2])
        return f"{written} {rest}" if equals and written else problem


CONFIG_OPTIONS = (
    Option("config", "str", "YAML file of the run; options override what it says", path="any"),
    Option("preset", "str", "ready-made configuration to start from, one of those below"),
    Option("print-config", "bool", "print the configuration as explained YAML, and stop", False),
)
MEGATRON_OPTIONS = (
    *(Option(name.replace("_", "-"), "bool", default=False) for name in megatron_flags.SWITCHES),
    *(Option(name.replace("_", "-"), "int", ge=1) for name in megatron_flags.NUMBERS),
)
"""Flags of Megatron-LM that set fields by another name or rule; a `configurable` command takes them."""
_WORD = FieldSpec("word", "str", path="any")


def read(command: Command, argv: Sequence[str]) -> Arguments:
    """Return the arguments of `command`, as far as they can be read.

    Problems are only collected in `problems`, so that the command can add its own and reject all of them at once.
    Raises ConfigError for an option or word that cannot be a path.
    """
    line = _Line(command, argv)
    while line.rest:
        word = line.rest.pop(0)
        if word.startswith("-") and word != "-":
            line.read_option(word)
        else:
            line.read_word(word)
    arguments = line.arguments
    if line.no_path:
        arguments.refuse()  # at once, because the command would say that the path is missing
    if not command.words:
        rule = f"{command.called} takes only options, which begin with --"
        arguments.problems += [f"{shown(word)}: {rule}" for word in arguments.words]
    if command.configurable:
        _read_config(arguments, line.entries, command)
    return arguments


class _Line:
    """A command line: the words that are not read yet, and what the others gave."""

    def __init__(self, command: Command, argv: Sequence[str]) -> None:
        options = (*command.all_options, *(MEGATRON_OPTIONS if command.configurable else ()))
        self.command, self.rest = command, list(argv)
        self.by_name = {name: option for option in options for name in option.names}
        own_specs = extra_specs(command.extra_args_provider)
        if clash := [spec.name for spec in own_specs.values() if spec.name in self.by_name]:
            raise ValueError(f"extra_args_provider: --{clash[0]} is an option of {command.called}; choose another name")
        self.own_fields = {name: spec for spec in own_specs.values() for name in (spec.name, spec.dotted)}
        values: dict[str, Any] = {option.key: [] if option.pairs else option.default for option in options}
        self.arguments = Arguments(values, source=command.called)
        self.given, self.entries = Given(), list[Entry]()
        self.no_path = False

    def read_word(self, word: str) -> None:
        """Read a positional argument."""
        try:
            self.arguments.words.append(_WORD.convert(word) if self.command.paths else word)
        except BadValueError as rule:
            self.arguments.problems.append(f"{shown(word, 200)}: {rule}")
            self.no_path = True

    def read_option(self, token: str) -> None:
        """Read an option or a field of the configuration, with the words after it that belong to it."""
        command, rest, problems = self.command, self.rest, self.arguments.problems
        token = "--parameter" if token == "-p" and "parameter" in self.by_name else token
        written, equals, text = token.lstrip("-").partition("=")
        key = written.replace("-", "_")
        option = self.by_name.get(key) if token.startswith("--") else None
        dotted, why = resolve(written) if command.configurable and option is None else (None, "")
        spec = option or self.own_fields.get(key) or SPECS.get(str(dotted))
        if option is not None and option.pairs:
            self._read_pair(option, written, text if equals else None)
            return
        if spec is None:
            name = token.partition("=")[0]
            if command.configurable and megatron_flags.is_ignored(key):
                self.arguments.ignored.append(name)
            else:
                problems.append(f"{name}: {_unknown(key, command, why)}")
            if not equals and rest and not rest[0].startswith("-"):
                rest.pop(0)  # its value
            return
        taken = [text] if equals else _take(rest, 1, is_bool=spec.kind == "bool", words=command.words)
        if not command.words and not equals:
            spec, taken = _with_more(spec, taken, rest)
        if not taken:
            listed = f": {', '.join(spec.choices)}" if spec.choices else ""
            problems.append(f"--{written}: needs a value after it{listed}")
        elif option is not None:
            self._keep(option, written, taken[0])
        else:
            self.entries.append(Entry(f"--{written}", spec.dotted, taken[0]))
            if written != spec.dotted:
                self.arguments.typed[spec.dotted] = f"--{written}"

    def _read_pair(self, option: Option, written: str, text: str | None) -> None:
        """Read a name and a value: two words, or `text` or the next word as NAME=VALUE."""
        rest, arguments = self.rest, self.arguments
        if text is None and rest and "=" in rest[0] and not rest[0].startswith("--"):
            text = rest.pop(0)
        pair = _take(rest, 2, is_bool=False, words="") if text is None else text.split("=", 1)
        if len(pair) < 2:
            if text is None and rest and not rest[0].startswith("-"):
                rest.pop(0)  # the name without a value, which is no chapter either
            needed = "a name and a value, as in -p steps 5 or -p 10:steps=5"
            arguments.problems.append(f"--{written}: needs {needed}")
            return
        name, value = pair
        arguments.options[option.key].append((name, value))
        arguments.problems += self.given.add(f"-{option.name[0]} {name}", value, shown(value))

    def _keep(self, option: Option, written: str, text: str) -> None:
        """Give an option of the command its value."""
        arguments, words = self.arguments, f"--{written} {shown(text)}"
        arguments.typed |= dict.fromkeys(option.names, f"--{written}")
        try:
            value = arguments.options[option.key] = option.convert(text, text=True)
            arguments.problems += self.given.add(f"--{option.name}", value, words)
            if rule := option.broken(value):
                arguments.problems.append(f"--{written} {shown(value, 200)}: {rule}")
        except BadValueError as rule:
            arguments.problems.append(f"{words}: {rule}")
            self.no_path = self.no_path or bool(option.path)


def _take(rest: list[str], count: int, *, is_bool: bool, words: str) -> list[str]:
    """Remove the words that belong to an option from `rest` and return them; empty if they are missing.

    A bool needs no value. A word after it is its value, but if the command takes `words`, only `true`, `false` and
    `null` are.
    """
    if is_bool and (
        not rest or rest[0].startswith("-") or (words and rest[0].lower() not in ("true", "false", "null"))
    ):
        return ["true"]
    if len(rest) < count or any(word.startswith("--") for word in rest[:count]):
        return []
    taken, rest[:count] = rest[:count], []
    return taken


def _with_more(spec: FieldSpec, taken: list[str], rest: list[str]) -> tuple[FieldSpec, list[str]]:
    """Return the field and its value with the words after it, which Megatron-LM writes in place of commas.

    Several words after `--data-path` are weights and prefixes, and so the value of `data.blend`.
    """
    if taken and (spec.kind.startswith("tuple") or spec.dotted == "data.path"):
        while rest and not rest[0].startswith("-"):
            taken = [f"{taken[0]},{rest.pop(0)}"]
            spec = SPECS["data.blend"] if spec.dotted == "data.path" else spec
    return spec, taken


def _unknown(key: str, command: Command, why: str) -> str:
    """Return why there is no option of this name, with the nearest name that there is."""
    if key in NOT_FIELDS:
        return NOT_FIELDS[key]
    if why and "unknown field" not in why:
        return why.partition(": ")[2]
    names = [name.replace("_", "-") for option in command.all_options for name in option.names]
    names += (*KNOWN_NAMES, *(option.name for option in MEGATRON_OPTIONS)) if command.configurable else ()
    names += [spec.name for spec in extra_specs(command.extra_args_provider).values()]
    hint = nearest(key, [f"--{name}" for name in names]) or nearest(key.replace("_", "-"), names)
    hint = hint if "." in hint else hint.replace("_", "-")  # as the command line writes Megatron-LM's names
    pairs = any(option.pairs for option in command.options)
    listed = (
        f"a chapter's parameter is set by -p {key} VALUE"
        if pairs
        else f"{command.called} --help{'-all' * command.configurable} lists them"
    )
    return f"unknown option{hint or f'; {listed}'}"


def _read_config(arguments: Arguments, entries: list[Entry], command: Command) -> None:
    """Read the configuration: the fields of the command line override the file, and the file overrides the preset."""
    from labkit.config import presets, yaml_text

    options, problems = arguments.options, arguments.problems
    arguments.print_config = options.pop("print_config")
    path, preset = options["config"], options["preset"]
    preset = options["preset"] = command.preset if path is None and preset is None else preset
    values: dict[str, Any] = {}
    try:
        arguments.config = presets.get(preset) if preset is not None else RunConfig()
    except ConfigError as error:
        problems += [f"--preset {shown(preset)}: {p}" for p in error.problems]
    try:
        values, bad = yaml_text.read(path) if path is not None else ({}, [])
        problems += [f"{path}: {p}" for p in bad]
    except ConfigError as error:
        problems += [f"--config {shown(path, 200)}: {p}" for p in error.problems]
    flags = {option.key: options.pop(option.key) for option in MEGATRON_OPTIONS}
    for name, sets in megatron_flags.SWITCHES.items():
        for dotted, value in sets.items() if flags[name] else ():
            entries.append(Entry(f"--{name.replace('_', '-')}", dotted, value))
            arguments.typed[dotted] = f"{entries[-1].key}, so {dotted} ="
    elsewhere = any(options[name] is not None for name in command.sources)
    if path is None and preset is None and not (entries or problems or elsewhere):  # a problem may be a field misspelt
        problems.append(
            "--config: nothing to run; give a preset (--preset tiny), a file (--config f.yaml) or fields of the "
            "configuration (--num-layers 12)"
        )
    newer, bad = fields.convert_entries(entries, text=True, specs=SPECS | extra_specs(command.extra_args_provider))
    problems += bad
    config = arguments.config.replaced(values | newer).with_extra(command.extra_args_provider)
    more, bad = megatron_flags.derived(flags, config)
    problems += bad
    problems += [f"{name}: a flag of Megatron-LM sets it as well; give one of them" for name in more if name in newer]
    arguments.config, arguments.given = config.replaced(more), newer | more
