"""Names of the fields, their aliases, and the typed values that a text gives them.

A field may be written as `section.field`, by its last part if only one section has it (`lr`), or under its name in
Megatron-LM (`tensor_model_parallel_size`). `-` and `_` mean the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from labkit.config import megatron_flags
from labkit.config.errors import kind_of, nearest, shown
from labkit.config.field_spec import KIND_WORDS, BadValueError, FieldSpec
from labkit.config.sections import SECTIONS, ExtraConfig


def _specs_of(section: str, cls: Any) -> dict[str, FieldSpec]:
    found = {}
    for f in dataclasses.fields(cls):
        kind = f.type.__name__ if isinstance(f.type, type) else str(f.type)  # a string where annotations are postponed
        plain, rules = kind.removesuffix(" | None"), dict(f.metadata)
        if section == "moe" and f.name != "num_experts":
            rules["needs"] = ("moe.num_experts", *rules["needs"])  # nothing in a dense model reads the section
        place = {"section": section, "optional": plain != kind}
        found[f"{section}.{f.name}"] = FieldSpec(f.name, plain, default=f.default, **place, **rules)
    return found


_DECLARED = {name: cls for name, cls in SECTIONS.items() if cls is not ExtraConfig}
SPECS: dict[str, FieldSpec] = {k: spec for name, cls in _DECLARED.items() for k, spec in _specs_of(name, cls).items()}
"""Every field by its dotted name, in file order."""
ALIASES: dict[str, str] = {alias: dotted for dotted, spec in SPECS.items() for alias in spec.aliases}
"""Megatron-LM's names for fields that have another name here."""

NOT_FIELDS: dict[str, str] = {
    "world_size": "the world size is that of the launch (--nproc, --world-size or torchrun), not a field",
    "data_parallel_size": "data parallelism takes the remaining ranks: dp = world size / (tp cp pp)",
    "dp": "data parallelism takes the remaining ranks: dp = world size / (tp cp pp)",
    **megatron_flags.DIFFERENT,
}
"""Names that a user might take for fields -> why they are none."""

_LAST_PARTS: dict[str, list[str]] = {}
for _dotted, _spec in SPECS.items():
    _LAST_PARTS.setdefault(_spec.name, []).append(_dotted)
KNOWN_NAMES: tuple[str, ...] = (*SPECS, *_LAST_PARTS, *ALIASES)
"""Every name under which a field may be written."""
_ANY_NAME = (*KNOWN_NAMES, *SECTIONS)
_UNDECLARED = FieldSpec("", "plain", optional=True)
"""The spec of a script's field while the fields that the script declares are not known."""


def extra_specs(provider: Any) -> dict[str, FieldSpec]:
    """Return the fields that a script adds in the section `extra`, by dotted name.

    provider: a dataclass with fields made by `labkit.config.field`; None adds none. Raises ValueError for a provider
    or a field that cannot be used.
    """
    if not (provider is None or (isinstance(provider, type) and dataclasses.is_dataclass(provider))):
        form = "a dataclass with a line `name: type = labkit.config.field(default, text)` for each field"
        raise ValueError(f"extra_args_provider must be {form}; it is {shown(provider)}")
    specs = {} if provider is None else _specs_of("extra", provider)
    for name, spec in specs.items():
        problem = "needs a default" if spec.default is dataclasses.MISSING else ""
        if spec.name in {*_ANY_NAME, *NOT_FIELDS, *megatron_flags.SWITCHES, *megatron_flags.NUMBERS}:
            problem = "has a name that the configuration knows; choose another"
        elif spec.kind not in KIND_WORDS or spec.aliases:
            problem = f"must be one of {', '.join(KIND_WORDS)}, or one of them | None, and has no aliases"
        elif not problem and (rule := spec.broken(spec.default)):
            problem = f"has the default {shown(spec.default)}, which {rule}"
        if problem:
            raise ValueError(f"extra_args_provider: {name} {problem}")
    return specs


def resolve(key: object, section: str | None = None) -> tuple[str | None, str]:
    """Return the dotted name of the field called `key` (in `section`, if given), or None and a sentence on why not."""
    if not isinstance(key, str):
        return None, f"{shown(key)}: a key must be a name, not {kind_of(key)}"
    name = key.replace("-", "_")
    first, _, last = name.rpartition(".")
    if "extra" in (first, section):
        sound = last.isidentifier() and "." not in name.removeprefix("extra.")
        return (f"extra.{last}", "") if sound else (None, f"{shown(key)}: a field of a script has a name of letters")
    if last in NOT_FIELDS:
        return None, f"{shown(key)}: {NOT_FIELDS[last]}"
    if section is None and name not in SPECS and first in SECTIONS:
        return resolve(last, first)
    if section is None:
        found = [name] if name in SPECS else [ALIASES[name]] if name in ALIASES else _LAST_PARTS.get(name, [])
        if len(found) > 1:
            return None, f"{shown(key)}: several sections have this field; write one of {', '.join(found)}"
        if found:
            return found[0], ""
        if name in SECTIONS:
            return None, f"{shown(key)}: is a section; write one of its fields, such as {name}.{_fields_of(name)[0]}"
        return None, f"{shown(key)}: {megatron_flags.advice(last) or f'unknown field{nearest(name, _ANY_NAME)}'}"
    dotted = f"{section}.{name}" if f"{section}.{name}" in SPECS else ALIASES.get(name, "")
    if dotted.startswith(f"{section}."):
        return dotted, ""
    inside = _fields_of(section)
    elsewhere = resolve(key)[0]
    hint = f'; it belongs to another section: "{elsewhere}"' if elsewhere else nearest(name, inside)
    return None, f"{shown(f'{section}.{key}')}: {megatron_flags.advice(name) or f'unknown field{hint}'}"


def _fields_of(section: str) -> list[str]:
    return [dotted.partition(".")[2] for dotted in SPECS if dotted.startswith(f"{section}.")]


class Entry(NamedTuple):
    """One value as it was written."""

    key: str
    dotted: str
    value: object
    where: str = ""
    """A prefix for messages, such as `line 4: `."""


def rows(written: Mapping[Any, object]) -> Iterator[tuple[str, str | None, object, object]]:
    """Yield line (none), section, key and value of each item; a whole section gives the items inside it."""
    for key, value in written.items():
        section = SECTIONS.get(key) if isinstance(key, str) else None
        if section is not None and isinstance(value, Mapping | section):
            inside = value if isinstance(value, Mapping) else vars(value)
            yield from (("", key, name, inner) for name, inner in inside.items())
        else:
            yield "", None, key, value


def read(written: Iterable[tuple[str, str | None, object, object]]) -> tuple[dict[str, Any], list[str]]:
    """Return the typed values of `rows` by dotted name, and a sentence for each mistake."""
    entries: list[Entry] = []
    problems: list[str] = []
    for where, section, key, value in written:
        dotted, problem = resolve(key, section)
        if section is None and isinstance(key, str) and key in SECTIONS:
            problems.append(f"{where}{key} = {shown(value)}: a section holds fields, as in `{key}: {{field: value}}`")
        elif dotted is None:
            problems.append(where + problem)
        else:
            entries.append(Entry(f"{section}.{key}" if section else str(key), dotted, value, where))
    values, bad = convert_entries(entries)
    return values, problems + bad


class Given:
    """Values by name, as a text gives them. Giving two values for one name is a problem; repeating a value is not."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._words: dict[str, str] = {}

    def add(self, name: str, value: object, words: str) -> list[str]:
        """Keep `value`, which was written as `words`; return a sentence if `name` already has another value."""
        first = self._words.setdefault(name, words)
        same = self.values.setdefault(name, value) == value
        return [] if same else [f"{name}: given twice, as {first} and as {words}; keep one"]


def convert_entries(
    entries: Iterable[Entry], *, text: bool = False, specs: Mapping[str, FieldSpec] = SPECS
) -> tuple[dict[str, Any], list[str]]:
    """Return the typed values by dotted name, and a sentence for each entry that has none.

    Naming a field twice is a problem. On the command line (`text`) it is one only if the values differ.
    """
    given, written = Given(), dict[str, str]()
    problems: list[str] = []
    for key, dotted, value, where in entries:
        if dotted in written and not text:
            problems.append(f"{where}{dotted}: given twice, as {written[dotted]} and as {key}; keep one")
            continue
        written[dotted] = key
        spec = specs.get(dotted, _UNDECLARED)
        try:
            problems += given.add(dotted, spec.convert(value, text=text), f"{key} {shown(value)}")
        except BadValueError as rule:
            alias = f" (written {shown(key)})" if key != dotted else ""
            problems.append(
                f"{key} {shown(value)}: {rule}" if text else f"{where}{dotted} = {shown(value)}{alias}: {rule}"
            )
    return given.values, problems
