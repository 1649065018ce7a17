"""Problems of a configuration as they are found. First each field by itself, then each field that nothing reads."""

from __future__ import annotations

from typing import Any

from labkit.config.errors import shown
from labkit.config.fields import SPECS, as_yaml
from labkit.config.sections import REASONS, Sections


class Findings:
    """Problems so far, and which fields are known to be bad.

    A rule between fields is skipped where one of its fields is bad already, so one mistake is reported once.
    """

    def __init__(self, config: Sections) -> None:
        self.config = config
        self.values = {name: getattr(getattr(config, spec.section), spec.name) for name, spec in SPECS.items()}
        self.microbatches: int | None = None
        """Microbatches of one step on one data-parallel rank; None where no world size is given or it is not sound."""
        self.problems: list[str] = []
        self._bad: set[str] = set()
        for name, spec in SPECS.items():
            if rule := spec.broken(self.values[name]):
                self.add(name, rule)
        for name in SPECS:
            if self.changed(name) and (why := self._unread(name)):
                self.no_effect(name, why)

    def add(self, name: str, rule: str, *, value: Any = ...) -> None:
        """Note that `name` breaks `rule`; `value` where it is no field of the configuration."""
        self.problems.append(f"{name} = {shown(self.values[name] if value is ... else value)}: {rule}")
        self._bad.add(name)

    def sound(self, *names: str) -> bool:
        """Nothing is known against any of `names`."""
        return self._bad.isdisjoint(names)

    def changed(self, name: str) -> bool:
        """The field is sound and does not hold its default."""
        return self.sound(name) and self.values[name] != SPECS[name].default

    def multiple(self, name: str, of: int, words: str, *, why: str = "", advice: str = "try {up}") -> None:
        """Refuse a size that is given, sound and no multiple of `of`; `{up}` in the advice is the next one."""
        size = self.values[name]
        if self.sound(name) and size is not None and size % of:
            self.add(name, f"must be a multiple of {words} = {of}{why}; {advice.format(up=up(size, of))}")

    def divisor(self, name: str, of: int, words: str, *, why: str = "") -> None:
        """Refuse a size that is given, sound and does not divide `of`."""
        size = self.values[name]
        if self.sound(name) and size is not None and of % size:
            self.add(name, f"must divide {words} = {of}{why}; choose {divisors(of)}")

    def at_most(self, name: str, other: str, advice: str = "") -> None:
        """Refuse a number above that of another field."""
        if self.sound(name, other) and self.values[name] > self.values[other]:
            self.add(name, f"must be at most {other} = {self.values[other]:g}{advice}")

    def no_effect(self, name: str, why: str) -> None:
        """Refuse a field that nothing reads: somebody set it and expects an effect.

        why: the reason and the way out, as in `with optim.fp8 = none; set that to e4m3`.
        """
        self.add(name, f"has no effect {why}, or leave this out")

    def _unread(self, name: str) -> str:
        """Why nothing reads the field: the first of its `needs` that does not hold."""
        for need in SPECS[name].needs:
            other, _, words = need.partition("=")
            value, wanted = as_yaml(self.values[other]), words.replace("|", " or ")
            reason = f", {REASONS[need]}" if need in REASONS else ""
            if not self.sound(other):
                return ""
            if value not in words.split("|") and (words or value in ("null", "0")):
                if value == "null" and not words:
                    return f"without {other}{reason}; set that"
                return f"with {other} = {value}{reason}; set that {f'to {wanted}' if words else 'above 0'}"
        return ""


def divisors(number: int) -> str:
    """Divisors up to 64 as words, for advice: `1, 2 or 4`."""
    found = [str(d) for d in range(1, min(number, 64) + 1) if number % d == 0]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"


def up(value: int, multiple: int) -> int:
    """The next multiple that is not below `value`."""
    return -(-value // multiple) * multiple
