"""The strings under the fields, read from the source: help, comments of a printed configuration, reference page."""

from __future__ import annotations

import ast
import importlib.util
import itertools
from functools import cache
from pathlib import Path
from typing import NamedTuple

from labkit.config.fields import ALIASES, SPECS
from labkit.config.limits import CHOICES, RANGES, Interval
from labkit.config.sections import SECTIONS


class FieldDoc(NamedTuple):
    """What a reader wants to know about one field."""

    dotted: str
    kind: str
    """Type as written, `int | None`."""
    default: str
    """As in YAML."""
    text: str
    """The string under the field, on one line."""
    limits: str
    """Values it may hold beyond its type, or empty."""
    aliases: tuple[str, ...]
    """Megatron-LM's names for it."""

    @property
    def help(self) -> str:
        """The text with the limits behind it, as the command line and a printed configuration say it."""
        return self.text + (f" [{self.limits}]" if self.limits else "")


@cache
def section_docs() -> dict[str, str]:
    """Section -> docstring of its class."""
    return {section: " ".join((cls.__doc__ or "").split()) for section, cls in SECTIONS.items()}


@cache
def field_docs() -> dict[str, FieldDoc]:
    """Every field by its dotted name, in file order."""
    spec = importlib.util.find_spec("labkit.config.sections")
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    bodies = {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}
    texts: dict[str, str] = {}
    for section, cls in SECTIONS.items():
        body = bodies[cls.__name__]
        for statement, following in itertools.pairwise(body):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                texts[f"{section}.{statement.target.id}"] = _string(following)
    return {dotted: _doc(dotted, texts[dotted]) for dotted in SPECS}


def _string(node: ast.stmt) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""


def _doc(dotted: str, text: str) -> FieldDoc:
    spec = SPECS[dotted]
    kind = f"{spec.kind} | None" if spec.optional else spec.kind
    aliases = tuple(name for name, target in ALIASES.items() if target == dotted)
    limits = ", ".join(CHOICES[dotted]) if dotted in CHOICES else interval_words(RANGES.get(dotted))
    return FieldDoc(dotted, kind, _as_yaml(spec.default), text, limits, aliases)


def _as_yaml(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)


def interval_words(interval: Interval | None) -> str:
    """An interval for readers: `>= 1`, `>= 0 and < 1`."""
    if interval is None:
        return ""
    low = f"> {interval.low:g}" if interval.low_open else f">= {interval.low:g}"
    if interval.high >= 2**31 - 1:
        return low
    return f"{low} and {'<' if interval.high_open else '<='} {interval.high:g}"
