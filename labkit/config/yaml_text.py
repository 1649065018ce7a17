"""YAML in and out, strictly.

Reads the YAML 1.2 core types, so that `1e-4` is a number, `on` and `no` are words, and `010` is not 8. Tags, anchors
and aliases are refused: a configuration needs none, and they are how a small file becomes a large object or a call.
Keys keep their line numbers, so that a message can name them; a key given twice is an error.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Mapping
from typing import Any

try:
    import yaml
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "a configuration as YAML text needs PyYAML (pip install PyYAML); presets and override() do without", name="yaml"
    ) from None

from labkit.config.errors import ConfigError, shown
from labkit.config.fields import Entry, Pairs, flatten
from labkit.config.sections import SECTIONS

MAX_BYTES = 100_000
"""Largest configuration file that is read."""
MAX_DEPTH = 20
"""Deepest nesting that is read; a configuration has two levels."""
WIDTH = 100
"""Columns of the text that is written."""

_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"
    r"|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader with the YAML 1.2 core types and neither tags, anchors nor aliases."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 - PyYAML's own name and form

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        if self.flow_level >= MAX_DEPTH:  # seen here as well: the scanner runs ahead, and is quadratic in this depth
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=self.get_mark())
        super().fetch_flow_collection_start(TokenClass)

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        self.level = getattr(self, "level", 0) + 1
        if self.level > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=event.start_mark)
        for name, words in (("anchor", "an anchor or alias"), ("tag", "a tag")):
            if getattr(event, name, None):
                raise yaml.MarkedYAMLError(problem=f"{words} is not allowed here", problem_mark=event.start_mark)
        node = super().compose_node(parent, index)
        self.level -= 1
        return node


for _tag, _pattern, _first in (
    ("null", re.compile(r"(~|null|Null|NULL|)$"), [*"~nN", ""]),
    ("bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("int", re.compile(r"[-+]?(0|[1-9][0-9]*)$"), list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
):
    _StrictLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, _first)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes text which our reader would take for a number."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def dump(values: dict[str, Any]) -> str:
    """YAML text of nested plain values, in their order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=WIDTH)


def dump_commented(values: dict[str, dict[str, Any]], comments: Mapping[str, str]) -> str:
    """`dump` of sections with a comment above each section and field, and an empty line between sections.

    comments: by section, and by `section.field`.
    """
    parts: list[str] = []
    for section, fields in values.items():
        lines = [*_comment(comments[section], ""), f"{section}:"]
        for name, value in fields.items():
            text = dump({section: {name: value}})
            lines += [*_comment(comments[f"{section}.{name}"], "  "), text.partition("\n")[2].rstrip("\n")]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _comment(text: str, indent: str) -> list[str]:
    mark = f"{indent}# "
    return textwrap.wrap(
        text, WIDTH, initial_indent=mark, subsequent_indent=mark, break_long_words=False, break_on_hyphens=False
    )


def read_file(path: str | os.PathLike[str]) -> str:
    """Text of the file at `path`; ConfigError says what is in the way."""
    name = shown(str(path), 200)[1:-1]
    try:
        with open(os.fspath(path), "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(["no such file; give the path of a YAML file"], source=name) from None
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError([f"cannot be read: {reason}"], source=name) from None
    if len(data) > MAX_BYTES:
        raise ConfigError([f"is larger than {MAX_BYTES:,} bytes; this is no configuration file"], source=name)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError([f"is not UTF-8 text (byte {error.start})"], source=name) from None


def parse(text: str) -> tuple[list[Entry], list[str]]:
    """The fields that `text` sets, and a sentence for each key that is no field or is given twice."""
    try:
        loader = _StrictLoader(text)
        try:
            node = loader.get_single_node()
            if node is None or node.tag == "tag:yaml.org,2002:null":
                return [], []  # an empty file sets nothing
            if not isinstance(node, yaml.MappingNode):
                return [], ["a configuration is a mapping of sections, as in `parallel: {tp: 2}`"]
            twice: list[str] = []
            entries, problems = flatten(_pairs(loader, node, "", twice))
            return entries, twice + problems
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        return [], [f"{line}not valid YAML: {error.problem or error.context}"]
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        return [], [f"not valid YAML: {str(error).splitlines()[0]}"]


def _pairs(loader: _StrictLoader, node: Any, section: str, twice: list[str]) -> Pairs:
    """The items of a mapping with their lines; a section's are `Pairs` again. Keys given twice go to `twice`."""
    seen: dict[Any, int] = {}
    pairs = Pairs()
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = _plain(loader, key_node) if isinstance(key_node, yaml.ScalarNode) else "<a collection>"
        if key in seen:
            name = shown(f"{section}{key}")
            twice.append(f"line {line}: {name}: given twice, first in line {seen[key]}; keep one")
            continue
        seen[key] = line
        if isinstance(value_node, yaml.MappingNode) and not section and key in SECTIONS:
            value = _pairs(loader, value_node, f"{key}.", twice)
        else:
            value = _plain(loader, value_node)
            value = Pairs() if value is None and key in SECTIONS else value  # `model:` alone sets nothing
        pairs.append((f"line {line}: ", key, value))
    return pairs


def _plain(loader: _StrictLoader, node: Any) -> Any:
    try:
        return loader.construct_object(node, deep=True)
    except (ValueError, OverflowError):  # an integer of thousands of digits
        return node.value
