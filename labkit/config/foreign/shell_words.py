"""The flags of a Python program in a shell script, or in a bare list of them, without running anything.

Assignments, arrays, `+=`, `$NAME`, `${NAME:-default}` and `${NAME[@]}` are followed. A condition is not evaluated: the
first branch of each `if` and `case` is read. What only a running shell knows, such as `$1`, stays as it is written.
"""

from __future__ import annotations

import re
import shlex
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

_PUNCTUATION = "();|&\n"
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\}|\$(\w+)")


class Flags(NamedTuple):
    """What a script gives to its program."""

    values: dict[str, str | list[str] | bool]
    """Flag with dashes -> its word, its words, or True if it has none."""
    program: str
    """Name of the Python file, without folders; empty if the script names none."""
    skipped: bool
    """True if branches of conditions were left out."""


def flags(text: str) -> Flags:
    """Return the flags in a script's last call of a Python file; without such a call, all flags in the text.

    Raises ValueError if quotes do not match.
    """
    variables: dict[str, list[str]] = {}
    loose, skipped = _statements(deque(_tokens(text)), variables)
    words = [word for token in loose for word in _expanded(token, variables)]
    calls = [i for i, word in enumerate(words) if word.endswith(".py")]
    if calls:
        after = words[calls[-1] + 1 :]
        end = next((i for i, word in enumerate(after) if word in _PUNCTUATION), len(after))
        return Flags(_paired(after[:end]), words[calls[-1]].rpartition("/")[2], skipped)
    everything = [word for value in variables.values() for word in [*value, "\n"]]
    return Flags(_paired([*everything, *words]), "", skipped)


def _tokens(text: str) -> Iterator[str]:
    """Yield the words of a script without quotes, and each separator, bracket and end of a line by itself."""
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=_PUNCTUATION)
    lexer.whitespace, lexer.whitespace_split = " \t\r", True
    for token in lexer:
        yield from re.findall(r";;|[();|&\n]", token) if set(token) <= set(_PUNCTUATION) else [token]


def _statements(tokens: deque[str], variables: dict[str, list[str]]) -> tuple[list[str], bool]:
    """Carry out the assignments; return the other words, and whether branches were left out."""
    loose: list[str] = []
    left: list[bool] = []  # for each open condition: whether its first branch is over
    skipped = False
    while tokens:
        token = tokens.popleft()
        if token in ("if", "case"):
            left.append(False)
        elif token in ("else", "elif", ";;") and left:
            left[-1] = True
        elif token in ("fi", "esac") and left:
            left.pop()
        elif any(left):
            skipped = skipped or token.strip() != ""
        elif assignment := _ASSIGNMENT.fullmatch(token):
            name, more, value = assignment.groups()
            is_array = tokens and tokens[0] == "(" and value in ("", "$")
            words = _bracketed(tokens) if is_array else [value]
            if value == "$":
                words = [f"$({' '.join(words)})"]
            new = [word for raw in words for word in _expanded(raw, variables)]
            variables[name] = [*variables.get(name, []), *new] if more else new
        else:
            loose.append(token)
    return loose, skipped


def _bracketed(tokens: deque[str]) -> list[str]:
    """Remove `( ... )` from the front of the tokens; return the words inside."""
    words, depth = [], 0
    while tokens:
        token = tokens.popleft()
        depth += (token == "(") - (token == ")")
        if depth == 0:
            break
        words += [] if token in _PUNCTUATION else [token]
    return words


def _expanded(token: str, variables: dict[str, list[str]]) -> list[str]:
    """Return the words that a token becomes when known variables are replaced."""
    if token in _PUNCTUATION:
        return [token]
    whole = _VARIABLE.fullmatch(token)
    if whole and (name := whole[1] or whole[3]) in variables:
        return variables[name]

    def value(found: re.Match[str]) -> str:
        braced, default, plain = found.groups()
        known = variables.get(braced or plain)
        return " ".join(known) if known is not None else found.group() if default is None else default

    text = _VARIABLE.sub(value, token)
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _paired(words: list[str]) -> dict[str, str | list[str] | bool]:
    """Return each flag with the words after it; of a flag that is given twice, the last."""
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            values = found[name.replace("_", "-")] = [value] if equals else []
        elif word in _PUNCTUATION:
            values = []
        else:
            values.append(word)
    return {name: given[0] if len(given) == 1 else given or True for name, given in found.items()}
