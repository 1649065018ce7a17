"""One field of the configuration: default, help, bounds, words, aliases and readers, all declared in one place.

`sections` declares each field by `field(default, doc, ...)`. `fields` turns each declaration into a `FieldSpec`.
The checks, the command line's help, the comments of a printed configuration and docs/config.md are made from these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labkit.config.errors import nearest

LARGEST = 2**31 - 1
"""Largest size and count, and largest world size: ranks are 32-bit integers in every transport."""


def field(default: Any, doc: str, **rules: Any) -> Any:
    """A dataclass field with everything that labkit knows of it: `rules` are the attributes of `FieldSpec`.

    `choices`, `aliases` and `needs` are words with spaces between them.
    """
    split = {name: tuple(rules.pop(name, "").split()) for name in ("choices", "aliases", "needs")}
    return dataclasses.field(default=default, metadata={"doc": doc, **split, **rules})


@dataclass(frozen=True)
class FieldSpec:
    """The place of a field and the values that it may hold."""

    section: str
    name: str
    kind: str
    """`int`, `float`, `bool`, `str`, `tuple[str, ...]` or `tuple[int, ...]`."""
    optional: bool = False
    """None is a value."""
    default: Any = None
    doc: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    """Largest value; not given, LARGEST for an integer and 1e30 for a number."""
    lt: float | None = None
    choices: tuple[str, ...] = ()
    """Words that the field may hold; empty where any will do."""
    aliases: tuple[str, ...] = ()
    """Megatron-LM's names of the field."""
    synonyms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Megatron-LM's words for values -> labkit's."""
    needs: tuple[str, ...] = ()
    """Nothing reads the field unless each of these holds: `optim.fp8=e4m3|hybrid`, or `train.output_dir`, which then
    must be given and not be 0. A field that nothing reads must have its default."""
    file: bool = False
    """The field names an existing file."""
    hint: str = ""
    """Advice for a list that Megatron-LM writes in another form."""

    @property
    def dotted(self) -> str:
        """`section.field`."""
        return f"{self.section}.{self.name}"

    def broken(self, value: Any) -> str:
        """The rule that a value of the right type breaks by itself, or an empty string. NaN breaks every bound."""
        if self.choices and value not in self.choices:
            return f"must be one of {', '.join(self.choices)}{nearest(value, self.choices)}"
        if self.ge is not None and not value >= self.ge:
            return f"must be at least {self.ge:g}"
        if self.gt is not None and not value > self.gt:
            return f"must be greater than {self.gt:g}"
        if self.lt is not None and not value < self.lt:
            return f"must be below {self.lt:g}"
        high = self.le or {"int": LARGEST, "float": 1e30}.get(self.kind)
        if high is None or value <= high:
            return ""
        return f"must be at most {f'{high:,}' if isinstance(high, int) else f'{high:g}'}"

    @property
    def limits(self) -> str:
        """The values for a reader: `>= 1`, `>= 0 and < 1`, `gpt, bert, t5`; empty where the type says all."""
        bounds = ((">=", self.ge), (">", self.gt), ("<=", self.le), ("<", self.lt))
        shown = (f"{sign} {bound:g}" for sign, bound in bounds if bound is not None and bound < LARGEST)
        return ", ".join(self.choices) or " and ".join(shown)

    @property
    def help(self) -> str:
        """The text with the limits behind it."""
        return self.doc + (f" [{self.limits}]" if self.limits else "")


SIZE = FieldSpec("", "size", "int", ge=1)
"""Any size or count by itself, such as a world size."""
