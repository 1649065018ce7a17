"""Check the values of a chapter's parameters: the chapter states a rule after each parameter.

A line of the cell tagged `parameters` reads `name: type = value  # help (rule)`. The rule is one of

    (2, 4 or 8)                              one of these
    (1 to 64)                                a number, both ends included
    (a multiple of 2 world_size)             or `a divisor of`; the names are other parameters
    (1 to 64, a multiple of world_size)      all of these
    (tp-cp-ep-dp-pp in any order, pp last)   the same words, joined in another order
    (a folder)                               one that exists or can be made, and can be written

An amount is a number, a parameter, or a product of both with at most one division: `64`, `4 tp pp`, `world_size / 2`.
`labkit run` reads the rules before it starts a kernel. Otherwise the chapter itself reads them by `check_parameters`.
"""

from __future__ import annotations

import ast
import contextlib
import io
import linecache
import math
import os
import re
import tokenize
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from labkit.config.errors import shown
from labkit.config.field_spec import BadValueError, FieldSpec
from labkit.launch import forkserver

SIMPLE = ("int", "float", "bool", "str")
"""Types that the command line reads from a plain word; for other types it reads JSON."""
_RULE = re.compile(r"\(([^()]+)\)$")
_RANKS_IMPORT = ("labkit.train.pretraining", "labkit.train.parity.comparison")
"""Modules that most chapters' ranks need; each rank would take half a second to import them."""


class Parameter(NamedTuple):
    """One line of a chapter's parameters."""

    name: str
    kind: str
    """The type as written, or the type of the value if the line gives no type."""
    default: Any
    rule: str
    """The rule; empty if the line has none."""


def declared(source: str) -> dict[str, Parameter]:
    """Return the parameters that a cell declares, by name.

    Raises SyntaxError if the cell is not Python.
    """
    comments = {
        token.start[0]: token.string.lstrip("# ").rstrip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found = {}
    for line in ast.parse(source).body:
        if not isinstance(line, ast.AnnAssign | ast.Assign) or line.value is None:
            continue
        target = line.target if isinstance(line, ast.AnnAssign) else line.targets[0]
        if not isinstance(target, ast.Name):
            continue
        default = ast.literal_eval(line.value)
        kind = ast.unparse(line.annotation) if isinstance(line, ast.AnnAssign) else type(default).__name__
        comment = _RULE.search(comments.get(line.end_lineno or 0, ""))
        rule = comment[1] if comment and is_rule(comment[1]) else ""
        found[target.id] = Parameter(target.id, kind, default, rule)
    return found


def broken_rules(parameters: Iterable[Parameter], values: Mapping[str, Any]) -> dict[str, str]:
    """Return the rule that each bad value breaks, by the parameter's name.

    The function looks at all values together. It skips a rule that names another bad parameter.
    """
    found: dict[str, str] = {}
    relations: dict[str, list[str]] = {}
    for name, kind, _, rule in parameters:
        try:
            if kind in SIMPLE:
                FieldSpec(name, kind).convert(values[name])
        except BadValueError as problem:
            found[name] = str(problem)
            continue
        if rule and not _holds(rule, values[name], values):
            others = [word for word in dict.fromkeys(re.findall(r"[a-z_]\w*", rule)) if _is_number(values.get(word))]
            relations[name] = others
            where = " and ".join(f"{other} is {shown(values[other])}" for other in others)
            found[name] = f"must be {rule}{f' ({where})' if where else ''}"
    found = {name: said for name, said in found.items() if not set(relations.get(name, ())) & set(found)}
    asked = {values.get("device"), values.get("backend")}
    return found or (_hardware(values) if asked & {"cuda", "nccl"} else {})


def _hardware(values: Mapping[str, Any]) -> dict[str, str]:
    """Say which of the wanted GPUs this machine lacks, in the words of the launch that would reject them."""
    from labkit.launch.info import choose_backend, choose_device

    try:
        device = choose_device(values.get("device", "auto"), 0, 0)
        choose_backend(values.get("backend", "auto"), device, values.get("world_size", 1))
    except ValueError as problem:  # `device = cuda: torch sees no GPU ...`
        given, _, rule = str(problem).partition(": ")
        return {given.partition(" = ")[0]: rule}
    return {}


def check_parameters(namespace: Mapping[str, Any]) -> None:
    """Reject a chapter's parameters that break the rule after them: `check_parameters(globals())`.

    The rules are read in the cell that declared the parameters, as this kernel ran it, or in the script. In a notebook
    it also starts the server from which ranks are forked, so that torch and what trains are imported once, while you
    read the first cells, and not by every rank.
    Raises ValueError with a sentence for each bad value.
    """
    parameters = declared(_source(namespace))
    found = broken_rules(parameters.values(), namespace)
    if found:
        raise ValueError("; ".join(f"{name} = {shown(namespace[name])}: {rule}" for name, rule in found.items()))
    if "get_ipython" in namespace:
        with contextlib.suppress(RuntimeError):  # the server runs: this cell has run before
            forkserver.preload(*_RANKS_IMPORT)
        forkserver.ensure_running()


def _source(namespace: Mapping[str, Any]) -> str:
    """Return the cell of parameters that ran last, or the file that runs.

    A kernel that keeps no history (as nbval asks) still has its cells in linecache, for tracebacks.
    """
    cached = ("".join(entry[2]) for name, entry in linecache.cache.items() if "ipykernel" in name and len(entry) > 2)
    for cell in (*reversed(namespace.get("In", [])), *reversed(list(cached))):
        if re.search(r"^world_size: int = ", cell, re.MULTILINE):
            return cell
    if "__file__" in namespace:
        return Path(namespace["__file__"]).read_text(encoding="utf-8")
    raise ValueError("no cell that declares world_size has run: run the cell of parameters first")


# ---- rules ----


def is_rule(text: str) -> bool:
    """Return True if the text in parentheses is a rule, False if it is a remark."""
    return bool(_choices(text) or text == "a folder" or _ORDER.fullmatch(text)) or all(
        _clause(part) for part in text.split(", ")
    )


_AMOUNT = r"[\w.-]+(?: [\w.-]+)*(?: / [\w.-]+)?"
_RANGE = re.compile(rf"({_AMOUNT}) to ({_AMOUNT})")
_MULTIPLE = re.compile(rf"a (multiple|divisor) of ({_AMOUNT})")
_ORDER = re.compile(r"(\w+(?:-\w+)+) in any order, (\w+) last")


def _clause(text: str) -> re.Match[str] | None:
    return _RANGE.fullmatch(text) or _MULTIPLE.fullmatch(text)


def _choices(text: str) -> list[str]:
    rest, separator, last = text.rpartition(" or ")
    return [*rest.split(", "), last] if separator else []


def _holds(rule: str, value: Any, values: Mapping[str, Any]) -> bool:
    if choices := _choices(rule):
        return str(value) in choices
    if rule == "a folder":
        return can_be_written(Path(value))
    if order := _ORDER.fullmatch(rule):
        words = str(value).split("-")
        return sorted(words) == sorted(order[1].split("-")) and words[-1] == order[2]
    return all(_clause_holds(part, value, values) for part in rule.split(", "))


def _clause_holds(text: str, value: float, values: Mapping[str, Any]) -> bool:
    if both := _RANGE.fullmatch(text):
        low, high = (_amount(each, values) for each in both.groups())
        return low is None or high is None or low <= value <= high
    clause = _MULTIPLE.fullmatch(text)
    assert clause is not None, "is_rule has seen it"
    amount = _amount(clause[2], values)
    if amount is None:
        return True
    whole, part = (value, amount) if clause[1] == "multiple" else (amount, value)
    return part > 0 and whole % part == 0


def _amount(text: str, values: Mapping[str, Any]) -> float | None:
    """Return the number of an amount; None if a parameter is no number, or 0 as a divisor: its own rule rejects it."""
    above, _, below = text.partition(" / ")
    factors = [_number(word, values) for word in above.split()]
    divisor = _number(below or "1", values)
    return math.prod(factors) / divisor if divisor and not any(map(math.isnan, (*factors, divisor))) else None


def _number(word: str, values: Mapping[str, Any]) -> float:
    """Return the number that a word names or spells, or nan if it does neither."""
    value = values.get(word, word)
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return math.nan


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def can_be_written(folder: Path) -> bool:
    """Return True if the folder, or the nearest folder above it that exists, can be written."""
    nearest = next((each for each in (folder, *folder.absolute().parents) if os.path.exists(each)), Path("/"))
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
