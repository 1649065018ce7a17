"""A record of the calls between a few objects, while code runs unchanged.

For sequence diagrams of what a layer does at capture and at replay. Only the methods that are named are watched; a call
among them is booked from the watched call that it happens in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A method was called, or ended in an exception (`raised`, from the one who raised to its caller)."""

    source: str
    """Who calls; `caller` outside all watched calls."""
    target: str
    """Whose method it is."""
    message: str
    """Name of the method; of the exception where `raised`."""
    raised: bool = False


OUTSIDE = "caller"


@contextmanager
def calls_between(watched: Mapping[str, tuple[Any, Sequence[str]]]) -> Iterator[list[Call]]:
    """Inside the block calls of these methods are added to the list that it yields, in the order in which they begin.

    watched: name of a participant -> the object, and the methods of it to watch (`forward` of a module is called
    through its `__call__`). Several participants may be parts of one object.

    Raises:
        AttributeError: an object without such a method.
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
