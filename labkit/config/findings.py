"""Problems of a configuration as they are found, and words that several rules share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from labkit.config.errors import shown
from labkit.config.fields import SPECS


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

    def no_effect(self, names: Iterable[str], why: str) -> None:
        """Refuse fields that nothing reads and that are set all the same: somebody has misunderstood something.

        why: when that is, and what else to set, as in `with optim.fp8 = none; set that to e4m3`.
        """
        for name in names:
            if self.sound(name) and self.values[name] != SPECS[name].default:
                self.add(name, f"has no effect {why}, or leave this out")

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
