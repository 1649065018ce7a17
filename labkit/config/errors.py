"""The one error that a bad configuration raises, and the words in which it shows values."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Sequence
from functools import partial


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, at once.

    `problems` holds one sentence for each problem: the field, its value, the rule, and what to do.
    """

    def __init__(self, problems: Sequence[str], *, source: str = "the configuration") -> None:
        self.problems, self.source = list(problems), source
        lines = [f"  {i}. {problem}" for i, problem in enumerate(self.problems, start=1)]
        many = "\n".join([f"{source}: {len(lines)} problems", *lines])
        super().__init__(f"{source}: {self.problems[0]}" if len(lines) == 1 else many)

    def __reduce__(self) -> tuple:
        # An exception is rebuilt from its message by default; this one travels between ranks with its list.
        return partial(ConfigError, source=self.source), (self.problems,)


def shown(value: object, limit: int = 60) -> str:
    """Return `value` for a message: its repr, cut at `limit` characters, always on one line. Never raises."""
    if isinstance(value, int) and value.bit_length() > 8 * limit:
        return f"<an integer of {value.bit_length()} bits>"
    try:
        text = repr(value)
    except Exception:  # a foreign object's repr, or one that recurses too deeply
        return f"<{type(value).__name__}>"
    text = text.encode("ascii", "backslashreplace").decode().replace("\n", " ")
    text = re.sub(r"(?<!\\)\\udc([89a-f][0-9a-f])", r"\\x\1", text)  # a byte of a name that is not UTF-8
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def no_file(path: str | os.PathLike[str]) -> str:
    """Return why there is no file at `path`: it is a folder, or it is missing."""
    return "is a folder; give a file" if os.path.isdir(path) else "no such file"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 rank`, `2 ranks` or `1,200 passes`."""
    ending = "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{number:,} {noun}{'' if number == 1 else ending}"


def kind_of(value: object) -> str:
    """Return the type of `value` in words, for a message."""
    words = {bool: "true/false", int: "an integer", float: "a number", str: "text", list: "a list", dict: "a mapping"}
    return "nothing (null)" if value is None else words.get(type(value), type(value).__name__)


def nearest(name: object, names: Iterable[str]) -> str:
    """Return `; did you mean "x"?` for the known name most like `name`, or an empty string if none is like it."""
    known, text = {n.lower(): n for n in names}, str(name)[:80].lower()
    for written in (text.replace("-", "_"), text):
        if found := difflib.get_close_matches(written, known, n=1, cutoff=0.5):
            return f'; did you mean "{known[found[0]]}"?'
    return ""
