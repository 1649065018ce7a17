"""Find sentences in labkit's docstrings that stop a newcomer.

    python scripts/prose.py             counts by package
    python scripts/prose.py models      the sentences in files of labkit whose path contains `models`

Two kinds are found: a sentence that opens with a relative clause ("What is gathered is ..."), and a sentence of more
than 25 words. Lists, tables, code and indented lines are not read.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[1] / "labkit"
MOST_WORDS = 25
_OPENING = re.compile(r"(What|Which|Whether|Who|Whose|How|Where)\b")
_END = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)\s+|(?<=[.!?][)\"`])\s+")
_NOT_PROSE = re.compile(r"\s|[-*|>]|\d+\. |.*\S {3,}\S")
"""Starts of lines that are skipped: indentation, list items and tables; a row of a table has columns wide apart."""


class Finding(NamedTuple):
    """A sentence against the rules."""

    file: str
    """Path from `labkit/`."""
    line: int
    """First line of the docstring."""
    kind: str
    """`opening` or `long`."""
    sentence: str


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each docstring: of modules, classes and functions, and under attributes and constants."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                value = statement.value if isinstance(statement, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield statement.lineno, cleandoc(value.value)


def sentences(text: str) -> Iterator[str]:
    """The sentences of a text. A line that is no prose, like an empty line, ends the sentence before it."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines = ["" if _NOT_PROSE.match(line) else line for line in text.splitlines()]
    for paragraph in re.split(r"\n{2,}", "\n".join(lines)):
        yield from filter(None, _END.split(" ".join(paragraph.split())))


def problems(text: str) -> Iterator[tuple[str, str]]:
    """(kind, sentence) of each sentence of a text that breaks a rule."""
    for sentence in sentences(text):
        if _OPENING.match(sentence) and not sentence.endswith("?"):
            yield "opening", sentence
        if len(sentence.split()) > MOST_WORDS:
            yield "long", sentence


def findings(part: str = "") -> Iterator[Finding]:
    """The sentences against the rules in the files of labkit whose path contains `part`."""
    for path in sorted(PACKAGE.rglob("*.py")):
        file = str(path.relative_to(PACKAGE))
        if part in file:
            for line, text in docstrings(path.read_text()):
                yield from (Finding(file, line, kind, sentence) for kind, sentence in problems(text))


def main(arguments: list[str]) -> None:
    if arguments:
        for finding in findings(arguments[0]):
            print(f"labkit/{finding.file}:{finding.line}: {finding.kind}: {finding.sentence}")
    counts = Counter((finding.file.split("/")[0], finding.kind) for finding in findings(*arguments))
    for (package, kind), count in sorted(counts.items()):
        print(f"{package}: {count} {kind}")


if __name__ == "__main__":
    main(sys.argv[1:])
