"""Read and write YAML, strictly.

The reader knows the YAML 1.2 core types, so `1e-4` is a number, `on` and `no` are words, and `010` is not 8. It rejects
tags, anchors and aliases: a configuration needs none, and they are how a small file becomes a large object or a call.
Keys keep their line numbers, so that a message can name the line; a key that is given twice is an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

try:
    import yaml
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "a configuration as YAML text needs PyYAML (pip install PyYAML); presets and override() do without", name="yaml"
    ) from None

from labkit.config import fields
from labkit.config.errors import ConfigError, no_file, shown
from labkit.config.field_spec import FieldSpec, expanded
from labkit.config.sections import SECTIONS

MAX_BYTES = 100_000
"""Largest configuration file that is read."""
WIDTH = 100
"""Columns of the text that is written."""

_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"
    r"|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader with the YAML 1.2 core types, but without tags, anchors and aliases."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 - PyYAML's own name and form

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        for name, words in (("anchor", "an anchor or alias"), ("tag", "a tag")):
            if getattr(event, name, None):
                raise yaml.MarkedYAMLError(problem=f"{words} is not allowed here", problem_mark=event.start_mark)
        return super().compose_node(parent, index)


for _tag, _pattern, _first in (
    ("null", re.compile(r"(~|null|Null|NULL|)$"), [*"~nN", ""]),
    ("bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("int", re.compile(r"[-+]?(0|[1-9][0-9]*)$"), list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
):
    _StrictLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, _first)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes text which our reader would mistake for a number."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def dump(values: dict[str, Any]) -> str:
    """Return YAML text of nested plain values, in their order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=WIDTH)


def dump_commented(values: dict[str, dict[str, Any]], specs: Mapping[str, FieldSpec], width: int = WIDTH) -> str:
    """Return `dump` of sections with the help above each section and field, and an empty line between sections.

    width: columns of the help.
    """
    lines: list[str] = []
    section = ""
    for line in dump(values).splitlines():
        if key := re.match(r"( {0,2})(\w+):", line):
            indent, name = key.groups()
            section = section if indent else name
            doc = "" if indent else str(SECTIONS[name].__doc__)
            spec = specs.get(f"{section}.{name}" if indent else "", FieldSpec(name, "plain", doc))
            comment = spec.help_lines(width - len(indent) - 2)
            lines += [] if indent or not lines else [""]
            lines += [f"{indent}# {words}" for words in comment]
        lines.append(line)
    return "\n".join([*lines, ""])


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the typed values in the file at `path` by dotted name, and a sentence for each mistake in it.

    Raises ConfigError for a file that cannot be read.
    """
    return parse(text_of(path, "YAML"))


def text_of(path: str | os.PathLike[str], kind: str) -> str:
    """Return the text of a configuration. Raises ConfigError for a file that cannot be one; kind: its kind in words."""
    name = shown(str(path), 200)[1:-1]
    try:
        with open(expanded(os.fspath(path)), "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) <= MAX_BYTES:
            return data.decode("utf-8-sig")
        problem = f"is larger than {MAX_BYTES:,} bytes; this is not a configuration file"
    except FileNotFoundError:
        problem = f"no such file; give the path of a {kind} file"
    except IsADirectoryError:
        problem = no_file(expanded(os.fspath(path)))
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text (byte {error.start})"
    except (OSError, ValueError, TypeError) as error:
        problem = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    raise ConfigError([problem], source=name)


def plain(text: str) -> Any:
    """Return the values in `text`, of any shape. Raises yaml.YAMLError."""
    loader = _StrictLoader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def parse(text: str) -> tuple[dict[str, Any], list[str]]:
    """Return the typed values in `text` by dotted name, and a sentence for each mistake in it."""
    try:
        loader = _StrictLoader(text)
        try:
            node = loader.get_single_node()
            if node is None or node.tag == "tag:yaml.org,2002:null":
                return {}, []  # an empty file sets nothing
            if not isinstance(node, yaml.MappingNode):
                return {}, ["a configuration is a mapping of sections, as in `parallel: {tp: 2}`"]
            twice: list[str] = []
            values, problems = fields.read(_rows(loader, node, twice))
            return values, twice + problems
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        return {}, [f"{line}not valid YAML: {error.problem or error.context}"]
    except RecursionError:
        return {}, ["not valid YAML: nested too deeply; a configuration has sections, and fields in them"]
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # such as an integer of thousands of digits
        return {}, [f"not valid YAML: {str(error).splitlines()[0]}"]


def _rows(
    loader: _StrictLoader, node: Any, twice: list[str], section: str | None = None
) -> Iterator[tuple[str, str | None, object, object]]:
    """Yield `fields.rows` with line numbers; add a sentence to `twice` for each key that is given twice."""
    seen: dict[Any, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = loader.construct_object(key_node) if isinstance(key_node, yaml.ScalarNode) else "<a collection>"
        if key in seen:
            name = shown(f"{section}.{key}" if section else str(key))
            twice.append(f"line {line}: {name}: given twice, first in line {seen[key]}; keep one")
            continue
        seen[key] = line
        is_section = section is None and key in SECTIONS
        if is_section and isinstance(value_node, yaml.MappingNode):
            yield from _rows(loader, value_node, twice, key)
        elif (
            value := loader.construct_object(value_node, deep=True)
        ) is not None or not is_section:  # `model:` alone sets nothing
            yield f"line {line}: ", section, key, value
