"""Cells of a notebook on a rank: the names that they share, and how one is executed."""

from __future__ import annotations

import ast
import builtins
from typing import Any

import cloudpickle

_of_notebook: dict[str, Any] = dict(vars(builtins))
"""Values of the notebook, by name, and Python's own names. Python looks here for what no cell of the ranks assigned."""
_names: dict[str, Any] = {"__name__": "__main__", "__builtins__": _of_notebook}
"""What the cells of this rank have assigned."""


class Unsendable:
    """What the notebook gets in place of a value that cannot leave its rank, such as a process group: its repr."""

    def __init__(self, value: Any) -> None:
        self.text = repr(value)

    def __repr__(self) -> str:
        return self.text


def execute(source: str, file: str, from_notebook: dict[str, Any]) -> Any:
    """Run a cell on this rank; return the value of its last line if that is an expression, else None.

    file: name of the source in tracebacks. from_notebook: values of the notebook that the cell may read.
    """
    _of_notebook.update(from_notebook)
    body = ast.parse(source, file)
    last = body.body[-1] if body.body else None
    if not isinstance(last, ast.Expr):
        exec(compile(body, file, "exec"), _names)
        return None
    body.body.pop()
    exec(compile(body, file, "exec"), _names)
    return _sendable(eval(compile(ast.Expression(last.value), file, "eval"), _names))


def pull(name: str) -> tuple[bool, Any]:
    """Return whether a cell of this rank has assigned the name, and its value."""
    return name in _names, _sendable(_names.get(name))


def reset() -> None:
    """Forget all names."""
    _of_notebook.clear()
    _of_notebook.update(vars(builtins))
    _names.clear()
    _names.update({"__name__": "__main__", "__builtins__": _of_notebook})


def _sendable(value: Any) -> Any:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return Unsendable(value)
    return value
