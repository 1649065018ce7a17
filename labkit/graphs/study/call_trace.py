"""A record of the calls between a few objects, while code runs unchanged.

Chapters draw sequence diagrams of capture and replay from it. Only the named methods are watched; the source of a call
is the watched call around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A call of a method, or with `raised` an exception, from the raising participant to its caller."""

    source: str
    """The participant that calls; `caller` outside all watched calls."""
    target: str
    """The participant whose method is called."""
    message: str
    """Name of the method; with `raised` that of the exception."""
    raised: bool = False


OUTSIDE = "caller"


@contextmanager
def calls_between(watched: Mapping[str, tuple[Any, Sequence[str]]]) -> Iterator[list[Call]]:
    """Record calls of these methods inside the block; the list that it yields has them in the order of their begin.

    watched: name of a participant -> the object and its methods to watch (`__call__` of a module calls `forward`).
    Several participants may be parts of one object.

    Raises:
        AttributeError: an object has no such method.
    """
    calls: list[Call] = []
    within = [OUTSIDE]
    replaced: list[tuple[Any, str, Any]] = []
    try:
        for name, (owner, methods) in watched.items():
            for method in methods:
                recorded = _recorded(getattr(owner, method), name, calls, within)
                replaced.append((owner, method, vars(owner).get(method)))
                setattr(owner, method, recorded)
        yield calls
    finally:
        for owner, method, before in reversed(replaced):
            if before is None:
                delattr(owner, method)  # the class's own again
            else:
                setattr(owner, method, before)


def _recorded(method: Callable[..., Any], name: str, calls: list[Call], within: list[str]) -> Callable[..., Any]:
    @wraps(method)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        calls.append(Call(within[-1], name, method.__name__))
        within.append(name)
        try:
            return method(*args, **kwargs)
        except Exception as error:
            calls.append(Call(name, within[-2], type(error).__name__, raised=True))
            raise
        finally:
            within.pop()

    return recorded
