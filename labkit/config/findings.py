"""Problems of a configuration as they are found, and words that several rules share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit.config.errors import shown


class Findings:
    """Problems so far, and which fields are known to be bad."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.problems: list[str] = []
        self._bad: set[str] = set()

    def add(self, name: str, rule: str, *, value: Any = ...) -> None:
        """Note that `name` breaks `rule`; `value` where it is no field of the configuration."""
        given = self.values[name] if value is ... else value
        self.problems.append(f"{name} = {shown(given)}: {rule}")
        self._bad.add(name)

    def get(self, *names: str) -> list[Any] | None:
        """The values of `names`, or None where one of them is bad."""
        return [self.values[n] for n in names] if self._bad.isdisjoint(names) else None

    def sound(self, name: str) -> bool:
        """Whether nothing is known against `name`."""
        return name not in self._bad


def divisors(number: int) -> str:
    """Divisors up to 64 as words, for advice: `1, 2 or 4`."""
    found = [str(d) for d in range(1, min(number, 64) + 1) if number % d == 0]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"


def up(value: int, multiple: int) -> int:
    """The next multiple that is not below `value`."""
    return -(-value // multiple) * multiple
