"""A foreign configuration on its way to ours: its keys, our values so far, and what could not be carried over.

A stack's table has a row for each of its keys. The row is a field of ours, a `Note` on why there is none, or a function
that reads the key (and perhaps others). A key without a row is listed as unknown, so nothing is dropped silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from labkit.config.errors import ConfigError, nearest, shown
from labkit.config.field_spec import BadValueError
from labkit.config.fields import SPECS
from labkit.config.run_config import RunConfig
from labkit.config.sections import SECTIONS

YOURS, DIFFERS, LACKS = "for you to set", "differs on purpose", "labkit lacks it"
NO_MEANING, ALWAYS, UNKNOWN = "has no meaning here", "already the same here", "unknown to this converter"
GROUPS = (YOURS, DIFFERS, LACKS, NO_MEANING, ALWAYS, UNKNOWN)
"""The groups of keys that have no counterpart, in the order in which they are printed."""


class Note(NamedTuple):
    """The row of a key that has no field of its own here."""

    group: str
    why: str = ""
    harmless: tuple[Any, ...] = ()
    """Values with which the other stack does what labkit always does; where none is named, false is one."""


def differs(why: str, *harmless: Any) -> Note:
    """Return the row of a key that labkit answers in another way."""
    return Note(DIFFERS, why, harmless)


def lacks(why: str = "", *harmless: Any) -> Note:
    """Return the row of a key whose feature labkit does not have; with the values in `harmless` nothing is lost."""
    return Note(LACKS, why, harmless)


def rows(row: Row, names: str, form: str = "{}") -> dict[str, Row]:
    """Return one row for several keys, which `names` gives with spaces between them; form: the key of a name."""
    return {form.format(name): row for name in names.split()}


NOTHING, ALREADY = Note(NO_MEANING), Note(ALWAYS)
Reader = Callable[["Conversion", str, Any], None]
Row = str | Note | Reader
"""Names of our fields with spaces between them, a note, or a function of the conversion, the key and its value."""


@dataclass(frozen=True)
class Stack:
    """One training stack."""

    name: str
    table: Mapping[str, Row]
    """Key -> row. A `*` in a key matches anything, if no other row has the key itself."""
    recognises: Callable[[Any], bool]
    """Whether the contents of a file are a configuration of this stack."""
    keys: Callable[[Any], dict[str, Any]]
    """The keys and values in the contents of a file."""
    derive: Callable[[Conversion], None] = lambda _found: None
    """Reads keys that belong together, and the stack's defaults where they are not ours, before the table."""


def flat(contents: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings, and lists of mappings, as one with keys such as `optimizer.params.lr`."""
    found: dict[str, Any] = {}
    for key, value in contents.items():
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            value = {str(i): item for i, item in enumerate(value)}
        nested = isinstance(value, Mapping) and bool(value)
        found |= flat(dict(value), f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return found


@dataclass
class Conversion:
    """Keys that are not read yet, and what the others gave."""

    keys: dict[str, Any]
    """Each key as the file writes it, with its value."""
    values: dict[str, Any] = field(default_factory=dict)
    """Our fields so far, by dotted name."""
    origin: dict[str, str] = field(default_factory=dict)
    """Field -> the key that gave it."""
    assumed: dict[str, str] = field(default_factory=dict)
    """Keys that the file does not give -> where their values come from."""
    head: list[str] = field(default_factory=list)
    """Comments for the top of the file."""
    notes: dict[str, dict[str, list[str]]] = field(default_factory=lambda: {group: {} for group in GROUPS})
    """Group -> reason -> the keys that have it."""
    problems: list[str] = field(default_factory=list)

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of a key and mark it as read; null counts as not given."""
        value = self.keys.pop(key, None)
        return default if value is None else value

    def word(self, key: str, default: str = "") -> str:
        """Return the value of a key as text, and mark it as read."""
        return str(self.take(key, default))

    def number(self, key: str, default: Any = 0, *, keep: bool = False) -> Any:
        """Return the value of a key as a number. keep: leave the key to its row, which rejects what is not a number."""
        value = self.keys.get(key) if keep else self.take(key)
        if value is None:
            return default
        try:
            number = float(value)
            whole = int(number)
            return whole if whole == number else number
        except (TypeError, ValueError, OverflowError):  # also for nan and inf
            self.problems += [] if keep else [f"{key} = {shown(value)}: must be a number"]
            return default

    def assume(self, defaults: Mapping[str, Any], stack: str) -> None:
        """Read the defaults of a stack for keys that the file does not give."""
        left = {key: value for key, value in defaults.items() if self.keys.get(key) is None}
        self.keys |= left
        self.assumed |= {key: f"the default of {key} in {stack}" for key in left}

    def set(self, names: str, value: Any, origin: str) -> None:
        """Give fields of ours a value that `origin` says; text becomes the field's type, as on the command line."""
        origin = self.assumed.get(origin, origin)
        if isinstance(value, str) and value.replace("_", "").isdecimal():
            value = value.replace("_", "")  # YAML 1.1 writes 70_000
        if isinstance(value, list) and all(isinstance(word, str) for word in value):
            value = ",".join(value)
        for name in names.split():
            spec = SPECS[name]
            if isinstance(value, str) and "$" in value:
                self.note(YOURS, origin, f"it is {shown(value, 200)[1:-1]}, which only the shell knows; set {name}")
                continue
            words = value.split() if isinstance(value, str) and spec.kind.startswith("tuple") else []
            try:
                converted = spec.convert(",".join(words) if words else value, text=isinstance(value, str))
            except BadValueError as rule:
                self.problems.append(f"{origin} = {shown(value)}: {rule} ({name} here)")
                continue
            if spec.path == "file" and (rule := spec.broken(converted)):
                self.note(YOURS, origin, f"{converted}: {rule.partition(';')[0]}; set {name}")
                continue
            self.values[name], self.origin[name] = converted, origin

    def note(self, group: str, key: str, why: str = "") -> None:
        """List a key in a group of the report."""
        keys, name = self.notes[group].setdefault(why, []), shown(key, 200)[1:-1]
        keys += [] if name in keys else [name]

    def drop(self, start: str, why: str) -> None:
        """Mark every key with this start as read, and list them as one."""
        keys = [key for key in self.keys if key.startswith(start)]
        for key in keys:
            self.take(key)
        if keys:
            self.note(NO_MEANING, f"{start}*", why)

    def read(self, table: Mapping[str, Row]) -> None:
        """Read every key that is left, by its row."""
        patterns = [key for key in table if "*" in key]
        while self.keys:
            key = next(iter(self.keys))
            value = self.keys.pop(key)
            pattern = next((p for p in patterns if fnmatchcase(key, p)), key)
            row = table.get(key) or table.get(pattern)
            if value is None:
                continue  # null says that nothing is given
            if row is None:
                self.note(UNKNOWN, key, nearest(key, table).removeprefix("; "))
            elif isinstance(row, Note):
                harmless = str(value) in map(str, row.harmless or [False])
                is_section = row.group in (LACKS, DIFFERS) and key not in table and pattern.endswith(".*")
                named = pattern if is_section else key
                self.note(ALWAYS if harmless else row.group, named, "" if harmless else row.why)
            elif isinstance(row, str):
                self.set(row, value, key)
            else:
                row(self, key, value)

    def join(self, later: Conversion) -> None:
        """Add what another file gave, whose values override these."""
        for name in self.values.keys() & later.values.keys():
            if self.values[name] != later.values[name]:
                self.note(NO_MEANING, self.origin[name], f"{later.origin[name]} of a later file overrides it")
        self.values |= later.values
        self.origin |= later.origin
        self.head += later.head
        self.problems += later.problems
        for group, reasons in later.notes.items():
            for why, keys in reasons.items():
                for key in keys:
                    self.note(group, key, why)

    def config(self, source: str) -> RunConfig:
        """Return the configuration. Fields that nothing would read are moved to the notes.

        Raises ConfigError with every value that labkit rejects, each under the name that the file gives it.
        """
        while True:
            config = RunConfig().replaced(self.values)
            found = [problem.partition(" = ") for problem in config.problems()]
            idle = [(name, rest) for name, _, rest in found if name in self.values and ": has no effect " in rest]
            for name, rest in idle:
                why = rest.partition(": has no effect ")[2].partition(";")[0]
                self.note(NO_MEANING, self.origin[name], f"{name} has no effect {why}")
                del self.values[name]
            if not idle:
                break
        said = [f"{self.origin[name]} (here {name}) = {rest}" for name, _, rest in found if name in self.origin]
        unsaid = [f"{name} = {rest}" for name, _, rest in found if name not in self.origin]
        if problems := [*self.problems, *said] or unsaid:
            raise ConfigError(problems, source=source)
        return config

    def report(self) -> str:
        """Return the keys that have no counterpart, by group; empty if there is none."""
        lines: list[str] = []
        for group, reasons in self.notes.items():
            lines += [f"{group}:"] if reasons else []
            lines += [f"  {', '.join(keys)}{f': {why}' if why else ''}" for why, keys in reasons.items()]
        return "\n".join(lines)


def pick(names: str, words: Mapping[Any, Any], *, others: bool = False) -> Reader:
    """Return the row of a key whose values have other words here; any other value is rejected, or kept if `others`."""

    def row(found: Conversion, key: str, value: Any) -> None:
        if value is False and False not in words:
            return  # a flag that is switched off
        theirs = next((word for word in words if word == value), None)
        if theirs is not None or others:
            found.set(names, words[theirs] if theirs is not None else value, key)
        else:
            known = ", ".join(map(str, words))
            found.problems.append(f"{key} = {shown(value)}: has no counterpart here; choose from {known}")

    return row


def above_zero(name: str) -> Row:
    """Return the row of a key whose values up to 0 switch it off."""

    def row(found: Conversion, key: str, value: Any) -> None:
        found.keys[key] = value
        if found.number(key, 1, keep=True) > 0:
            found.set(name, found.take(key), key)
        found.take(key)

    return row


def as_yaml(config: RunConfig, found: Conversion) -> str:
    """Return the fields of `config` that do not have our defaults, each with the key that gave it as a comment."""
    from labkit.config import yaml_text

    default, lines = RunConfig(), [f"# {line}" for line in found.head]
    for section in SECTIONS:
        inside = vars(getattr(config, section))
        changed = {name: value for name, value in inside.items() if value != vars(getattr(default, section)).get(name)}
        lines += [f"{section}:"] if changed else []
        for name, value in changed.items():
            plain = list(value) if isinstance(value, tuple) else value
            first, *more = yaml_text.dump({name: plain}).splitlines()
            origin = found.origin.get(f"{section}.{name}", "")
            lines += [f"  # {origin}", f"  {first}"] if more else [f"  {first}  # {origin}"]
            lines += [f"  {line}" for line in more]
    return "\n".join([*lines, ""])
