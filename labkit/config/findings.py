"""The problems of a configuration as they are found, and the forms that many rules share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

from labkit.config.errors import nearest, shown
from labkit.config.fields import SPECS
from labkit.config.sections import REASONS, SECTIONS, Sections


class UnsoundError(Exception):
    """Raised when a rule reads a field that is known to be bad."""


class _Section:
    """A section as rules see it: reading a bad field raises UnsoundError, which ends the rule."""

    def __init__(self, found: Findings, name: str) -> None:
        self._found, self._name = found, name

    def __getattr__(self, field: str) -> Any:
        computed = getattr(SECTIONS[self._name], field, None)
        return computed.__get__(self) if isinstance(computed, property) else self._found.value(f"{self._name}.{field}")


class Findings:
    """The problems so far, and the fields that are known to be bad. Each field is checked on its own first.

    A rule that reads a bad field ends there, so one mistake is reported only once. The forms that rules share, from
    `multiple` to `excludes`, skip bad fields as well.
    """

    def __init__(self, config: Sections, world_size: int | None = None) -> None:
        self.specs = SPECS | config.extra_specs
        self.values = {name: getattr(getattr(config, spec.section), spec.name) for name, spec in self.specs.items()}
        self.values["world_size"] = world_size
        self.config = cast(Sections, SimpleNamespace(**{name: _Section(self, name) for name in SECTIONS}))
        self.microbatches: int | None = None
        """Microbatches of one step on one data-parallel rank; None if no world size is given, or a bad one."""
        self.problems: list[str] = []
        self._bad: set[str] = set()
        for name, spec in self.specs.items():
            if rule := spec.broken(self.values[name]):
                self.add(name, rule)
        for name, value in vars(config.extra).items() if config.extra_specs else ():
            if (dotted := f"extra.{name}") not in self.specs:
                self.add(dotted, f"unknown field{nearest(dotted, config.extra_specs)}", value=value)
        if self.values["model.model_type"] is None:  # rules ask for the type that None means
            self.values["model.model_type"] = f"encoder_{'and' if config.model.has_two_halves else 'or'}_decoder"
        for name in filter(self.changed, self.specs):
            with suppress(UnsoundError):
                self._refuse_unread(name)

    def check(self, *rules: Callable[[Findings], None]) -> None:
        """Apply `rules` one after another; each ends where it reads a bad field."""
        for rule in rules:
            with suppress(UnsoundError):
                rule(self)

    def add(self, name: str, rule: str, *, value: Any = ...) -> None:
        """Note that `name` breaks `rule`. Give `value` if it is not the field's own value that breaks the rule."""
        self.problems.append(f"{name} = {shown(self.values[name] if value is ... else value)}: {rule}")
        self._bad.add(name)

    def value(self, name: str) -> Any:
        """Return the value of the field, or of `world_size`. Raises UnsoundError if it is known to be bad."""
        if name in self._bad:
            raise UnsoundError
        return self.values[name]

    def sound(self, *names: str) -> bool:
        """Return True if nothing is known against any of `names`."""
        return self._bad.isdisjoint(names)

    def changed(self, name: str) -> bool:
        """Return True if the field is sound and does not have its default."""
        return self.sound(name) and self.values[name] != self.specs[name].default

    def multiple(self, name: str, of: int, words: str, *, why: str = "", advice: str = "try {up}") -> None:
        """Reject a size that is given, sound and no multiple of `of`; `{up}` in the advice is the next multiple."""
        size = self.values[name]
        if self.sound(name) and size is not None and size % of:
            self.add(name, f"must be a multiple of {words} = {of}{why}; {advice.format(up=up(size, of))}")

    def multiple_of(self, name: str, other: str, why: str = "") -> None:
        """Reject a size that is not a multiple of another field."""
        if self.sound(name, other) and self.values[name]:
            choice = f"{other.partition('.')[2]} from {divisors(self.values[name])}"
            self.multiple(name, self.values[other], other, why=why, advice=f"choose {choice}, or {name} = {{up}}")

    def divisor(self, name: str, of: int, words: str, *, why: str = "") -> None:
        """Reject a size that is given, sound and does not divide `of`."""
        size = self.values[name]
        if self.sound(name) and size is not None and of % size:
            self.add(name, f"must divide {words} = {of}{why}; choose {divisors(of)}")

    def at_most(self, name: str, other: str, advice: str = "") -> None:
        """Reject a number above that of another field, if both are given."""
        value, limit = self.values[name], self.values[other]
        if self.sound(name, other) and None not in (value, limit) and value > limit:
            self.add(name, f"must be at most {other} = {limit:g}{advice}")

    def excludes(self, condition: str, others: str, rule: str) -> None:
        """Reject the field of `condition` if all conditions hold; `others` are written with spaces between them."""
        with suppress(UnsoundError):
            if all(map(self._holds, [condition, *others.split()])):
                self.add(condition.partition("=")[0], rule)

    def _holds(self, condition: str) -> bool:
        """Return True if a condition holds.

        `optim.fp8=e4m3|hybrid` holds for these values, `train.output_dir` for any value but the default; of
        `checkpoint.dir|train.output_dir` one has to have another value than its default.
        """
        name, _, words = condition.partition("=")
        if words:
            return as_yaml(self.value(name)) in words.split("|")
        return any(self.value(other) != self.specs[other].default for other in name.split("|"))

    def _refuse_unread(self, name: str) -> None:
        """Reject a field that nothing reads, because somebody set it and expects an effect.

        The sentence names the first of its `needs` that does not hold.
        """
        for need in self.specs[name].needs:
            if self._holds(need):
                continue
            names, _, words = need.partition("=")
            reason = f", {REASONS[need]}" if need in REASONS else ""
            first, *more = names.split("|")
            wanted = f"to {words.replace('|', ' or ')}" if words else f"above {self.specs[first].default}"
            why = f"with {first} = {as_yaml(self.values[first])}{reason}; set that {wanted}"
            if not words and self.values[first] is None:
                why = f"without {' or '.join([first, *more])}{reason}; set {'one' if more else 'that'}"
            self.add(name, f"has no effect {why}, or leave this out")
            return


def as_yaml(value: object) -> str:
    """Return a field's value as YAML writes it: `null`, `true`, `[1, 0]`."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value) if isinstance(value, tuple) else value)


def divisors(number: int) -> str:
    """Return the divisors up to 64 in words, for advice: `1, 2 or 4`."""
    found = [str(d) for d in range(1, min(number, 64) + 1) if number % d == 0]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"


def up(value: int, multiple: int) -> int:
    """Return the smallest multiple that is not below `value`."""
    return -(-value // multiple) * multiple
