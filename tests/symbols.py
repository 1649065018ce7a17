"""One piece of Python inside one symbol of labkit, found and replaced.

A symbol is a function, a class or a variable of a module: `Bucket.reduce`, `reduce.inner`, `SCOPES`. Its name alone
finds its file, wherever the file lies; `layers:forward` also names the module where several files have the symbol.
The piece is compared as a syntax tree, so line breaks, quotes and comments do not matter. A move, a reformatting or a
change elsewhere in the same file leaves both as they are.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent, indent
from typing import NamedTuple

import labkit

PACKAGE = Path(labkit.__file__).parent


class Symbol(NamedTuple):
    """Where a symbol is defined."""

    file: Path
    node: ast.AST


def find_symbol(anchor: str) -> Symbol:
    """The symbol `name` or `module:name`; the module may be its last name alone. ValueError unless there is one."""
    module, _, name = anchor.rpartition(":")
    found = [symbol for symbol in _symbols().get(name, []) if f".{dotted(symbol.file)}".endswith(f".{module}")]
    if not module:
        found = _symbols().get(name, [])
    if len(found) != 1:
        places = ", ".join(dotted(symbol.file) for symbol in found) or "no module"
        raise ValueError(f"{len(found)} symbols are called {anchor}, not one: {places}")
    return found[0]


def replaced(anchor: str, old: str, new: str) -> tuple[Path, str]:
    """The symbol's file and its text, in which `new` stands for `old`. Both are an expression or statements.

    ValueError unless `old` is there exactly once. Nothing for `new` removes statements.
    """
    file, node = find_symbol(anchor)
    text = file.read_text(encoding="utf-8")
    pieces = list(_pieces(node, ast.parse(dedent(old)).body))
    if len(pieces) != 1:
        raise ValueError(f"the piece {old!r} is {len(pieces)} times in {anchor}, not once")
    first, last, is_statement = pieces[0]
    lines = text.encode().splitlines(keepends=True)
    start = sum(map(len, lines[: first.lineno - 1])) + first.col_offset
    stop = sum(map(len, lines[: last.end_lineno - 1])) + last.end_col_offset
    if is_statement:
        new = indent(dedent(new).strip() or "pass", " " * first.col_offset).lstrip()
    else:
        new = f"({new})"
    changed = text.encode()
    return file, (changed[:start] + new.encode() + changed[stop:]).decode()


@cache
def _symbols() -> dict[str, list[Symbol]]:
    """Every symbol of labkit by its qualified name."""
    found: dict[str, list[Symbol]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for name, node in _definitions(ast.parse(file.read_text(encoding="utf-8")), ""):
            found.setdefault(name, []).append(Symbol(file, node))
    return found


def _definitions(parent: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
            yield from _definitions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not isinstance(parent, ast.FunctionDef):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield prefix + target.id, node


def _pieces(inside: ast.AST, wanted: list[ast.stmt]) -> Iterator[tuple[ast.expr | ast.stmt, ast.expr | ast.stmt, bool]]:
    """First and last node of each place that reads as `wanted`, and whether it is made of statements."""
    if len(wanted) == 1 and isinstance(wanted[0], ast.Expr):
        as_written = ast.dump(wanted[0].value)
        statements = {id(node.value) for node in ast.walk(inside) if isinstance(node, ast.Expr)}
        for node in ast.walk(inside):
            if isinstance(node, ast.expr) and ast.dump(node) == as_written:
                yield node, node, id(node) in statements
        return
    as_written = [ast.dump(node) for node in wanted]
    for node in ast.walk(inside):
        for block in ("body", "orelse", "finalbody"):
            body = getattr(node, block, None)
            for at in range(len(body) - len(wanted) + 1) if isinstance(body, list) else ():
                if [ast.dump(each) for each in body[at : at + len(wanted)]] == as_written:
                    yield body[at], body[at + len(wanted) - 1], True


def dotted(file: Path) -> str:
    """Name of the module in this file."""
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
