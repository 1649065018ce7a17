"""The sample of mutants: places of the source where cosmic-ray has an operator, one change of each place.

The choice goes by a hash of the seed and of the place's name. So a change of the source moves few choices but its own.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("train/checkpoint", "data", "evaluate", "finetune", "models/bert", "models/t5", "models/mamba")
SIZE, SEED = 320, 1
"""Mutants in all."""
LEFT_OUT = ("NoOp", "VariableInserter", "VariableReplacer")
"""Operators that change nothing, or need names to put in."""
IDENTITY = ("Eq_Is", "NotEq_IsNot", "Is_Eq", "IsNot_NotEq", "UAdd_Nothing")
"""Changes that Python's small numbers and single objects make none."""


@dataclass(frozen=True)
class Mutant:
    """One change of one module."""

    path: str
    """Of the module, relative to the root."""
    name: str
    """Module, symbol, old and new line."""
    text: str
    """The changed source."""
    lines: range
    """Of the changed statement."""


@dataclass(frozen=True)
class Site:
    """A piece of a module's text that one kind of operator changes."""

    path: Path
    line: int
    name: str
    """Module, symbol, line and kind of operator."""
    variants: tuple[tuple[str, int], ...]
    """Operators that change it, each with the number of this place among its own."""


def sample() -> list[Mutant]:
    """The mutants of all packages, each module in proportion to its sites."""
    modules = sorted(path for package in PACKAGES for path in (ROOT / "labkit" / package).rglob("*.py"))
    found = {path: sites(path) for path in modules}
    total, taken, drawn = sum(map(len, found.values())), 0, []
    for of_module in found.values():
        before, taken = taken, taken + len(of_module)
        count = SIZE * taken // total - SIZE * before // total
        made = filter(None, map(mutant_at, sorted(of_module, key=lambda site: digest(site.name))))
        drawn += islice(made, count)
    return drawn


def digest(name: str) -> str:
    """A number that looks like chance."""
    return hashlib.sha256(f"{SEED} {name}".encode()).hexdigest()


def sites(path: Path) -> list[Site]:
    """All places of a module where an operator has a change."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    source = path.read_text(encoding="utf-8")
    lines, tree, nodes = source.splitlines(), ast.parse(source), list(ast_nodes(get_ast(source)))
    untouched, found, seen = list(untouched_places(tree)), {}, Counter[str]()
    for operator in operator_names():
        kind = operator.split("/")[-1].split("_")[0]
        if kind in LEFT_OUT or operator.endswith(IDENTITY):
            continue
        made = get_operator(operator)()
        positions = [place for node in nodes for place in made.mutation_positions(node)]
        for occurrence, (start, end) in enumerate(positions):
            mark = lines[start[0] - 1][start[1] :].startswith(("*,", "/,"))  # of a function's arguments
            if not mark and not any(first <= start and end <= last for first, last in untouched):
                found.setdefault((start, kind), []).append((operator, occurrence))
    made_sites = []
    for ((line, _), kind), variants in found.items():
        name = f"{path.relative_to(ROOT)}: {symbol_at(tree, line)}: {lines[line - 1].strip()} {kind}"
        seen[name] += 1
        made_sites.append(Site(path, line, f"{name} {seen[name]}", tuple(variants)))
    return made_sites


def mutant_at(site: Site) -> Mutant | None:
    """One of the changes of a place; None where Python can read none."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    source = site.path.read_text(encoding="utf-8")
    for operator, occurrence in sorted(site.variants, key=lambda variant: digest(f"{site.name} {variant[0]}")):
        with suppress(AttributeError):  # cosmic-ray's operator of exceptions knows no dotted names
            text = mutate_code(source, get_operator(operator)(), occurrence)
            if text is not None and compiles(text):
                tree, relative = ast.parse(source), str(site.path.relative_to(ROOT))
                name = f"{relative}: {symbol_at(tree, site.line)}: {difference(source, text)}"
                return Mutant(relative, name, text, statement_at(tree, site.line))
    return None


def compiles(text: str) -> bool:
    """Whether Python reads it without a warning."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compile(text, "mutant", "exec", dont_inherit=True)
    except (SyntaxError, SyntaxWarning, ValueError):
        return False
    return True


Place = tuple[int, int]


def untouched_places(tree: ast.Module) -> Iterator[tuple[Place, Place]]:
    """Begin and end of annotations, raised errors, f-strings, `TYPE_CHECKING` and decorators of dataclasses."""
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, (ast.Raise, ast.JoinedStr)):
            parts = [node]
        elif isinstance(node, (ast.AnnAssign, ast.arg)):
            parts = [node.annotation]
        elif isinstance(node, ast.FunctionDef):
            parts = [node.returns]
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            parts = [node]
        elif isinstance(node, ast.ClassDef):
            for decorator in node.decorator_list:
                yield (decorator.lineno, 0), ((decorator.end_lineno or 0) + 1, 0)
        for part in parts:
            if isinstance(part, (ast.expr, ast.stmt)):
                yield (part.lineno, part.col_offset), (part.end_lineno or 0, part.end_col_offset or 0)


def statement_at(tree: ast.Module, line: int) -> range:
    """Lines of the smallest statement around a line; of one with a body its head."""
    inner = range(0)
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            body = getattr(node, "body", None)
            inner = range(node.lineno, body[0].lineno if body else (node.end_lineno or 0) + 1)
    return inner


def symbol_at(tree: ast.AST, line: int) -> str:
    """Dotted name of the function or class around a line."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first <= line <= (node.end_lineno or 0):
                return f"{node.name}.{symbol_at(node, line)}".rstrip(".")
        elif isinstance(node, ast.stmt) and (inner := symbol_at(node, line)):
            return inner
    return ""


def difference(old: str, new: str) -> str:
    """`old line` -> `new line`."""
    lines = [line for line in difflib.ndiff(old.splitlines(), new.splitlines()) if line[:2] in ("- ", "+ ")]
    gone, came = (" ".join(line[2:].strip() for line in lines if line[0] == sign) for sign in "-+")
    return f"`{gone}` -> `{' '.join(came.split())}`"
