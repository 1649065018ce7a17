"""Solutions of exercises: functions of `labkit/check/solutions`, and their source for a chapter to show.

A solution is the function that the reader should write, under the reader's name for it:

    @solves("08.tokens")
    def mean_gradient(gradients, tokens): ...

What it needs besides stands above it in the same module, and is shown with it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from importlib.util import find_spec
from types import CodeType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
_solutions: dict[str, Callable[..., Any]] = {}


def solves(name: str) -> Callable[[Function], Function]:
    """Register the decorated function as the solution of exercise `name`."""

    def register(function: Function) -> Function:
        _solutions[name] = function
        return function

    return register


def solution_of(name: str) -> Callable[..., Any] | None:
    """Return the function that solves the exercise; None if there is none."""
    module = f"labkit.check.solutions.chapter_{name.partition('.')[0]}"
    if find_spec(module):
        importlib.import_module(module)
    return _solutions.get(name)


class Source(str):
    """Source of a solution. A notebook shows it in colours, also on a dark page."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_markdown_(self) -> str:
        return f"```python\n{self}\n```"


def solution(name: str) -> Source:
    """Return the source of the solution of an exercise, with the helpers that it calls.

    Raises ValueError if there is no such exercise, or none with a solution here.
    """
    found = solution_of(name)
    if found is None:
        raise ValueError(f"there is no solution of {name!r} in labkit; `labkit progress` lists the exercises")
    return Source("\n\n\n".join(_source(function) for function in _with_helpers(found)))


def _with_helpers(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return the functions of its module that a function calls, directly or through each other, and then itself."""
    found: list[Callable[..., Any]] = []
    for name in _names(function.__code__):
        other = function.__globals__.get(name)
        if inspect.isfunction(other) and other.__module__ == function.__module__ and other is not function:
            found += [each for each in _with_helpers(other) if each not in found]
    return [*found, function]


def _names(code: CodeType) -> list[str]:
    """Return the global names that a function reads, those of its inner functions included."""
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names(constant)]
    return [*code.co_names, *inner]


def _source(function: Callable[..., Any]) -> str:
    """Return the source of a function without its decorator."""
    lines = inspect.getsource(function).splitlines()
    return "\n".join(lines[1:] if lines[0].startswith("@solves") else lines)
