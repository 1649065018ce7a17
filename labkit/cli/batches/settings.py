"""The settings of a batch: each chapter with every combination of the values that its parameters are given.

`-p world_size=2,4 -p tp=1,2` are four settings of a chapter that has both parameters, two of one that has the first,
and one of a chapter that has neither. A combination that breaks a rule of the chapter is left out and told. But a value
that no combination can have is a mistake, and so is a parameter that no chapter has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from labkit.check.parameters import SIMPLE, Parameter, declared
from labkit.cli.chapter_parameters import check_parameters, parameter_cell

Given = Sequence[tuple[str, str]]
"""Names and texts of -p."""


class Setting(NamedTuple):
    """A chapter with one value for each parameter that was given."""

    source: Path
    given: dict[str, str]
    """Parameter -> value as text."""
    parameters: dict[str, Any]
    """The same with their types."""

    @property
    def words(self) -> str:
        """The given values in one word."""
        return ",".join(f"{name}={value}" for name, value in self.given.items()) or "defaults"

    @property
    def folder(self) -> str:
        """The folder of this setting, inside that of the batch."""
        return f"{self.source.stem}/{re.sub(r'[^A-Za-z0-9_.=,-]', '_', self.words)}"

    @property
    def ranks(self) -> int:
        """Processes that the chapter starts at a time."""
        default = declared(parameter_cell(self.source)).get("world_size")
        return int(self.parameters.get("world_size", default.default if default else 1))


class Settings(NamedTuple):
    """What a command line asks for."""

    run: list[Setting]
    left_out: list[str]
    """A sentence for each combination that breaks a rule, and for each parameter that a chapter doesn't have."""
    problems: list[str]
    """What is wrong with the request; nothing runs then."""


def is_batch(given: Mapping[Path, Given]) -> bool:
    """Return True if a parameter has several values."""
    return any(len(values) > 1 for source, pairs in given.items() for values in _lists(source, pairs).values())


def settings_of(given: Mapping[Path, Given], out: Path) -> Settings:
    """Return every setting of the chapters, in the order of the command line."""
    found = Settings([], [], [])
    declared_by_one = {name for source in given for name in _known(source)}
    given_to_all = set.intersection(*({name for name, _ in pairs} for pairs in given.values()))
    for source, pairs in given.items():
        known = _known(source)
        absent = [name for name, _ in pairs if name not in known and name in declared_by_one & given_to_all]
        if absent:
            found.left_out.append(f"{source.stem} has no {' and no '.join(absent)}")
        lists = _lists(source, [pair for pair in pairs if pair[0] not in absent])
        broken: dict[tuple[str, ...], list[str]] = {}
        able: set[tuple[str, str]] = set()
        for values in product(*lists.values()):
            setting = dict(zip(lists, values))
            parameters, problems = check_parameters(source, list(setting.items()), out, alone=len(given) == 1)
            if problems:
                broken[values] = problems
                continue
            able |= set(setting.items())
            found.run.append(Setting(source, setting, parameters))
        for values, problems in broken.items():
            impossible = set(zip(lists, values)) - able
            if impossible:
                found.problems.extend(problem for problem in problems if problem not in found.problems)
            else:
                found.left_out.append(f"{Setting(source, dict(zip(lists, values)), {}).words}: {'; '.join(problems)}")
    return found


def _known(source: Path) -> dict[str, Parameter]:
    try:
        return declared(parameter_cell(source))
    except (ValueError, SyntaxError):  # `check_parameters` says so
        return {}


def _lists(source: Path, pairs: Given) -> dict[str, list[str]]:
    """Return the values of each parameter: words between commas; one value for a type that is written as JSON."""
    known = _known(source)
    plain = {name for name, parameter in known.items() if parameter.kind in SIMPLE}
    return {name: list(dict.fromkeys(text.split(","))) if name in plain else [text] for name, text in pairs}
