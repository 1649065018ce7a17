"""One field of the configuration: default, help, type, bounds, words, aliases and readers, all declared in one place.

`sections` declares each field by `field(default, doc, ...)`, and `fields` turns each declaration into a `FieldSpec`.
The checks, the command line's help, the comments of a printed configuration and docs/config.md are made from that.

In YAML and Python a value has the field's own type: a quoted `"8"` is text, not a number. On the command line
everything is text, and labkit reads it as the field's type: `8`, `1e-4`, `true`, `null` for none, `a,b` for a list.
Everywhere a `~` at the start of a path means the home folder, and a path must not be empty.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import re
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from labkit.config.errors import kind_of, nearest, no_file

LARGEST = 2**31 - 1
"""Largest size, count and world size, because ranks are 32-bit integers in every transport."""
LONGEST_NAME, LONGEST_PATH = 255, 3840
"""Bytes of a name and of a path. Linux allows 4,096 for a path; the rest is for the files that labkit writes inside."""
_INTEGER = re.compile(r"[+-]?[0-9]{1,40}", re.ASCII)
_NUMBER = re.compile(r"[+-]?([0-9]{1,400}(\.[0-9]{0,400})?|\.[0-9]{1,400})([eE][+-]?[0-9]{1,5})?", re.ASCII)
_DIGIT, _LEADING_ZERO, _OCTAL = (re.compile(f"[+-]?{rest}") for rest in ("[.]?[0-9]", "0[0-9]", "0[0-7]{1,40}"))
_TRUTH = {"true": ("true", "yes", "on", "y"), "false": ("false", "no", "off", "n")}
KIND_WORDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "tuple[str, ...]": "a list of words",
    "tuple[int, ...]": "a list of integers",
    "plain": "text, a number, true, false or a list of these",
}


class BadValueError(ValueError):
    """A value that does not have its field's type; the message is the rule that it breaks."""


def field(default: Any, doc: str, **rules: Any) -> Any:
    """Return a dataclass field with everything that labkit knows about it: `rules` are the attributes of `FieldSpec`.

    `choices`, `aliases` and `needs` are words with spaces between them; `choices` may also be a table of
    `labkit.config.choices`, whose keys are the words.
    """
    words = {name: rules.pop(name, "") for name in ("choices", "aliases", "needs")}
    split = {name: tuple(given.split() if isinstance(given, str) else given) for name, given in words.items()}
    return dataclasses.field(default=default, metadata={"doc": doc, **split, **rules})


@dataclass(frozen=True)
class FieldSpec:
    """Where a field is, and the values that it may have. An option of a command is a field without a section."""

    name: str
    kind: str
    """`int`, `float`, `bool`, `str`, `tuple[str, ...]` or `tuple[int, ...]`; `plain` is any of these."""
    doc: str = ""
    default: Any = None
    section: str = ""
    optional: bool = False
    """True if None is a value of the field."""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    """Largest value. If it is not given, it is LARGEST for an integer and 1e30 for a number."""
    lt: float | None = None
    choices: tuple[str, ...] = ()
    """Words that the field may have; empty if any word will do."""
    aliases: tuple[str, ...] = ()
    """Names of the field in Megatron-LM."""
    synonyms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Megatron-LM's words for values -> labkit's words."""
    needs: tuple[str, ...] = ()
    """Conditions without which nothing reads the field: `optim.fp8=e4m3|hybrid`, or `train.output_dir`, which then must
    be given and not be 0; of `checkpoint.dir|train.output_dir` one must be. A field that nothing reads must have its
    default."""
    path: str = ""
    """Says that the value names a `file` that exists, a `folder` that may exist, or `any` path; empty if it names none.
    A `~` at its start means the home folder."""
    none: str = "none"
    """A word that means None on the command line, in addition to `null`; empty if `none` is a value of the field."""
    ending: str = ""
    """An ending that may be left out of the name of a file."""
    hint: str = ""
    """Advice for a list that Megatron-LM writes in another form."""
    of_model: bool = False
    """True if the field changes the model's tensors, or what it computes with them: a resumed run must keep it."""

    @property
    def dotted(self) -> str:
        """`section.field`, or the name of an option."""
        return f"{self.section}.{self.name}" if self.section else self.name

    def broken(self, value: Any) -> str:
        """Return the rule of type, words, bounds or file that a value breaks on its own, or an empty string."""
        try:
            self.convert(value)
        except BadValueError as rule:
            return str(rule)
        if value is None:
            return ""
        if self.path == "file" and not (os.path.isfile(value) or (self.ending and os.path.isfile(value + self.ending))):
            return no_file(value) + ("" if os.path.isdir(value) else "; give an existing file")
        if self.path == "folder" and os.path.lexists(value) and not os.path.isdir(value):
            missing = "a dangling symbolic link" if os.path.islink(value) and not os.path.exists(value) else "a file"
            return f"is {missing}; name a folder"
        if self.choices and value not in self.choices:
            return f"must be one of {', '.join(self.choices)}{nearest(value, self.choices)}"
        if self.ge is not None and value < self.ge:
            return f"must be at least {self.ge:g}"
        if self.gt is not None and value <= self.gt:
            return f"must be greater than {self.gt:g}"
        if self.lt is not None and value >= self.lt:
            return f"must be below {self.lt:g}"
        high = self.le or {"int": LARGEST, "float": 1e30}.get(self.kind)
        if high is None or value <= high:
            return ""
        return f"must be at most {f'{high:,}' if isinstance(high, int) else f'{high:g}'}"

    @property
    def limits(self) -> str:
        """The allowed values in words: `>= 1`, `>= 0 and < 1`, `gpt, bert, t5`; empty if the type says everything."""
        bounds = ((">=", self.ge), (">", self.gt), ("<=", self.le), ("<", self.lt))
        shown = (f"{sign} {bound:g}" for sign, bound in bounds if bound is not None and bound < LARGEST)
        return ", ".join(self.choices) or " and ".join(shown)

    @property
    def help(self) -> str:
        """The text, followed by the limits."""
        return self.doc + (f" [{self.limits}]" if self.limits else "")

    @property
    def default_words(self) -> str:
        """The default as the command line takes it: `none`, `true`, `1e-08`, `1,0`."""
        if isinstance(self.default, tuple):
            return ",".join(map(str, self.default)) or "empty"
        if self.default is None or isinstance(self.default, bool):
            return str(self.default).lower()
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    def help_lines(self, width: int) -> list[str]:
        """Return `help` in lines of at most `width` columns; limits that fit on one line are not broken."""
        limits = self.help[len(self.doc) + 1 :]
        kept = limits.replace(" ", "\0") if len(limits) <= width else limits
        lines = textwrap.wrap(f"{self.doc} {kept}", width, break_long_words=False, break_on_hyphens=False)
        return [line.replace("\0", " ") for line in lines]

    def convert(self, value: object, *, text: bool = False) -> Any:
        """Return `value` as the field's type, or raise BadValueError with the rule. `text`: from the command line."""
        empty = ("null", self.none or "null", *(() if self.path else ("~", "")))
        if value is None or (text and self.optional and str(value).lower() in empty):
            if self.optional:
                return None
            raise BadValueError(f"must be {self._kind_words}, not nothing (null)")
        converted = self._from_text(str(value)) if text else self._typed(value)
        if self.path:
            return tuple(map(_sound_path, converted)) if isinstance(converted, tuple) else _sound_path(converted)
        return self.synonyms.get(converted, converted) if isinstance(converted, str) else converted

    @property
    def _kind_words(self) -> str:
        return "true, false or null" if self.kind == "bool" and self.optional else KIND_WORDS[self.kind]

    def _typed(self, value: object) -> Any:
        kind, is_bool = self.kind, isinstance(value, bool)
        if (kind == "bool" and is_bool) or (kind == "str" and isinstance(value, str)):
            return value
        if kind == "int" and isinstance(value, numbers.Integral) and not is_bool:
            return int(value)
        if kind == "float" and isinstance(value, numbers.Real) and not is_bool:
            return _finite(value)
        if kind == "plain" and isinstance(value, bool | int | float | str | list | tuple):
            inside = value if isinstance(value, list | tuple) else ()
            if all(isinstance(v, bool | int | float | str) for v in inside):
                return tuple(inside) if inside is value else value
        if kind.startswith("tuple") and isinstance(value, list | tuple):
            item = str if kind == "tuple[str, ...]" else int
            if all(isinstance(v, item) and not isinstance(v, bool) for v in value):
                return tuple(value)
        hint = self.hint
        if isinstance(value, str) and kind in ("int", "float", "bool"):
            hint = _notation(value, kind)
        elif kind == "int" and isinstance(value, float) and value.is_integer():
            hint = "; write it without a decimal point or exponent"
        elif kind == "str" and isinstance(value, int | float):
            hint = "; put it in quotes"
        raise BadValueError(f"must be {self._kind_words}, not {kind_of(value)}{hint}")

    def _from_text(self, value: str) -> Any:
        word, kind = value.strip(), self.kind
        if kind == "str":
            return value
        if kind.startswith("tuple"):
            inside = word[1:-1] if word.startswith("[") and word.endswith("]") else word
            parts = tuple(part.strip() for part in inside.split(",") if part.strip())
            if kind == "tuple[str, ...]":
                return parts
            if all(_INTEGER.fullmatch(part) for part in parts):
                return tuple(int(part) for part in parts)
            raise BadValueError(f"must be {self._kind_words}, as in 1,0{self.hint}")
        if kind == "int" and _INTEGER.fullmatch(word):
            return int(word)
        if kind == "float" and (_NUMBER.fullmatch(word) or word.lower().lstrip("+-") in ("nan", "inf", "infinity")):
            return _finite(word)
        if kind == "bool" and word.lower() in ("true", "false"):
            return word.lower() == "true"
        raise BadValueError(f"must be {self._kind_words}")


def _notation(word: str, kind: str) -> str:
    """Advise on a number or truth value that is text in YAML 1.2; return nothing if the word is neither."""
    if kind == "bool":
        plain = next((plain for plain, words in _TRUTH.items() if word.lower() in words), None)
        return "" if plain is None else "; write it without quotes" if word.lower() == plain else f"; write {plain}"
    if _OCTAL.fullmatch(word):
        return f"; a leading 0 is octal in YAML 1.1 and not in YAML 1.2: write {int(word)} or {int(word, 8)}"
    if _NUMBER.fullmatch(word) and not _LEADING_ZERO.match(word):
        return "; write it without quotes"
    return "; write a decimal number without a leading 0, 0x, 0o, `_`, `,` or `:`" if _DIGIT.match(word) else ""


def _finite(value: Any) -> float:
    with suppress(OverflowError):
        if math.isfinite(number := float(value)):
            return number
    raise BadValueError("must be a finite number")


def expanded(value: Any) -> Any:
    """Return a path with the home folder in place of a `~` at its start; in a list, each path. Leave other values."""
    if isinstance(value, list | tuple):
        return tuple(map(expanded, value))
    with suppress(ValueError):  # a NUL, or a lone surrogate
        return os.path.expanduser(value) if isinstance(value, str) else value
    return value


def _sound_path(value: str) -> str:
    """Return the expanded path. Raises BadValueError for a path that no file can have."""
    path = expanded(value)
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        encoded = b"\0"
    size, longest = len(encoded), max(map(len, encoded.split(b"/")))
    for broken, rule in (
        (not path.strip(), "a path must not be empty; name one"),
        (b"\0" in encoded, "a file name cannot contain a NUL or half of a surrogate pair; remove these characters"),
        (
            path.startswith("~"),
            f"{path.split('/')[0]} is not the home folder of any user; write the whole path, or put ./ before it",
        ),
        (
            longest > LONGEST_NAME,
            f"a name in it has {longest:,} bytes, but at most {LONGEST_NAME} are allowed; shorten it",
        ),
        (size > LONGEST_PATH, f"has {size:,} bytes, but a path can have at most {LONGEST_PATH:,}; shorten it"),
    ):
        if broken:
            raise BadValueError(rule)
    return path


SIZE = FieldSpec("size", "int", ge=1)
"""The rule for any size or count by itself, such as a world size."""
