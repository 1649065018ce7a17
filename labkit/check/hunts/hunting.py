"""`suspect = hunt("06")`: a fault that no cell shows, and a verdict that is scored.

The reader runs code with the fault by `suspect.around(function)`, in this process or on ranks, looks at the ledger, the
microscope, timelines and memory, and then says what is wrong by `suspect.verdict(...)`. A hunt has several faults. A
reader gets them in an order of their own, and none twice before all have been found.
"""

from __future__ import annotations

import getpass
import importlib
import random
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from html import escape
from pkgutil import iter_modules
from re import IGNORECASE, search
from typing import Any

from labkit.check import hunts, progress
from labkit.check.boxed import WIDTH, boxed, paragraph

FAMILIES = {
    "missing communication": "a message or a sum of a healthy run is left out",
    "extra communication": "a message or a sum too many",
    "wrong data": "an operation reads other numbers than it should: another sample's or rank's, old or rounded ones",
    "wrong scale": "the right numbers, times a wrong factor",
    "wrong order": "the right numbers, at the wrong time or in the wrong place",
    "random numbers": "ranks draw the same ones and shouldn't, or the other way round",
    "reused memory": "a buffer is overwritten while somebody still needs it",
    "kept memory": "something stays in memory that nobody needs any more",
    "slow work": "every number is right, and it takes longer than it must",
    "not captured": "work that a CUDA graph doesn't replay",
}
"""What a fault of any hunt can be, and what that means; a hunt has only some of them."""
MESSAGES_AND_NUMBERS = tuple(FAMILIES)[:5]
"""The families of hunts in what ranks send each other: missing and extra communication, wrong data, scale and order."""
FIRST_TENSOR = "Which tensor differs first from one process, as the microscope names it? Or none."
"""The question whose answer the microscope prints."""
NUMBERS_AGREE = "Loss, gradients and parameters agree with one process to 1e-10, so no tensor is wrong: say 'none'."
"""Says that a tensor is not the answer to FIRST_TENSOR."""


@dataclass(frozen=True)
class Fault:
    """One fault of a hunt."""

    name: str
    """For the record of progress."""
    plant: Callable[[], AbstractContextManager[Any]]
    """Makes the context in which this process, a rank or not, has the fault."""
    answers: Mapping[str, str]
    """Question -> pattern of a right answer; a choice is the pattern of itself."""
    astray: Mapping[str, Mapping[str, str]]
    """Question -> pattern of a wrong answer -> why it is wrong. The pattern "" is every other answer."""
    story: str
    """What was wrong, and how the evidence says so."""


@dataclass(frozen=True)
class Hunt:
    """The faults of a chapter, and what a verdict on each of them says."""

    chapter: str
    scene: str
    """What to run, and what is at hand."""
    questions: Mapping[str, str]
    """Argument of `verdict` -> the question."""
    faults: Sequence[Fault]
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Question -> allowed answers, where they are not free; a `family` is one of FAMILIES in any case."""
    families: Sequence[str] = ()
    """The families to choose from, each of which is then explained; all of FAMILIES if there are none."""


@dataclass(frozen=True)
class Planted:
    """A function with a fault around each of its calls."""

    chapter: str = field(repr=False)
    number: int = field(repr=False)
    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with the fault, which is undone afterwards, also after an error."""
        with hunt_of(self.chapter).faults[self.number].plant():
            return self.function(*args, **kwargs)


@dataclass(frozen=True)
class Verdict:
    """Score of a verdict: what is right, and for each wrong answer why. It has a text, and HTML for Jupyter."""

    right: int
    asked: int
    answers: tuple[str, ...]
    """A sentence on each answer; none if all are right."""
    closing: tuple[str, ...]
    """What was wrong, and what is left to find."""

    @property
    def ok(self) -> bool:
        """True if every answer is right."""
        return self.right == self.asked

    @property
    def headline(self) -> str:
        """The score in one line."""
        return f"{self.right} of {self.asked} right."

    def __repr__(self) -> str:
        closing = (line for text in self.closing for line in _wrapped(text))
        return "\n".join([self.headline, *map(_item, self.answers), *closing])

    def _repr_html_(self) -> str:
        kind = "right" if self.ok else "near" if self.right else "wrong"
        return boxed(kind, "verdict", self.headline, *map(paragraph, self.answers + self.closing))


class Suspect:
    """A planted fault. `around` runs code with it, `verdict` says what it is, `give_up` tells."""

    def __init__(self, hunt: Hunt, number: int) -> None:
        self._hunt, self._number = hunt, number

    def __repr__(self) -> str:
        return "\n".join([*_wrapped(self._said), self._call, *map(_item, self._questions)])

    def _repr_html_(self) -> str:
        call = f"<pre style='margin:2px 0 2px 1.5em'>{escape(self._call)}</pre>"
        return boxed("open", "hunt", self._said, call, *map(paragraph, self._questions))

    @property
    def _said(self) -> str:
        return f"One fault is in everything that runs under suspect.around(...). {self._hunt.scene}"

    @property
    def _call(self) -> str:
        return f"suspect.verdict({', '.join(f'{name}=...' for name in self._hunt.questions)})"

    @property
    def _questions(self) -> list[str]:
        choices = {name: f" One of: {', '.join(each)}." for name, each in self._choices().items()}
        if self._hunt.families:
            choices["family"] = (
                " One of: " + "; ".join(f"{each} ({FAMILIES[each]})" for each in self._hunt.families) + "."
            )
        return [f"{name}: {question}{choices.get(name, '')}" for name, question in self._hunt.questions.items()]

    def around(self, function: Callable[..., Any]) -> Planted:
        """Return `function` with the fault in it: `ranks.run(suspect.around(train))` or `suspect.around(train)()`."""
        return Planted(self._hunt.chapter, self._number, function)

    def verdict(self, **answers: str) -> Verdict:
        """Score the answers to the questions, each by itself.

        Raises ValueError for a question that is not asked or not answered, and for an answer that is not a choice.
        """
        self._check(answers)
        fault = self._hunt.faults[self._number]
        wrong = {name: said for name, said in answers.items() if not search(fault.answers[name], said, IGNORECASE)}
        right = len(answers) - len(wrong)
        if not wrong:
            return Verdict(right, len(answers), (), tuple(filter(None, (fault.story, self._keep("")))))
        told = [f"{name}: {_why(fault, name, said)}" for name, said in wrong.items()]
        told += [f"{name}: right." for name in answers if name not in wrong]
        return Verdict(right, len(answers), tuple(told), ())

    def give_up(self) -> str:
        """Say what the fault was. It does not come again, but it does not count as found either."""
        told = _wrapped(self._hunt.faults[self._number].story) + _wrapped(self._keep(" (shown)"))
        print("\n".join(told))
        return self._hunt.faults[self._number].name

    def _choices(self) -> dict[str, Sequence[str]]:
        known = {"family": self._hunt.families or tuple(FAMILIES), **self._hunt.choices}
        return {name: choices for name, choices in known.items() if name in self._hunt.questions}

    def _check(self, answers: Mapping[str, str]) -> None:
        if set(answers) != set(self._hunt.questions):
            asked = ", ".join(f"{name}=..." for name in self._hunt.questions)
            raise ValueError(f"this hunt asks for {asked}; got {', '.join(answers) or 'nothing'}")
        for name, choices in self._choices().items():
            if answers[name] not in choices:
                raise ValueError(f"{name} = {answers[name]!r}: choose one of {', '.join(choices)}")

    def _keep(self, remark: str) -> str:
        """Write down that this fault is known, where progress is kept; say how many are."""
        if not progress.is_kept():
            return ""
        chapter, faults = self._hunt.chapter, self._hunt.faults
        known = _known(chapter)
        name = faults[self._number].name
        if not any(each.split(" (")[0] == name for each in known):
            known.append(name + remark)
        trouble = progress.kept("hunt", chapter, known)
        left = len(faults) - len(known)
        more = f'hunt("{chapter}") plants another one.' if left else "That was the last one of this hunt."
        found = sum("(" not in each for each in known)
        return trouble or f"Found: {found} of the {len(faults)} faults of this hunt. {more}"


def hunt(chapter: str, number: int = 0) -> Suspect:
    """Plant one of the chapter's faults in everything that runs under `around` of the result.

    number: which fault, counted from 1 and round again. 0 is one that this reader has not found; where no progress is
        kept, as under nbval and papermill, the first.

    Raises ValueError for a chapter without a hunt, and for a negative number.
    """
    found = hunt_of(chapter)
    if number < 0:
        raise ValueError(f"number = {number}: give 0 for a fault that you have not found, or 1, 2, ...")
    return Suspect(found, (number - 1) % len(found.faults) if number else _next(found))


def hunt_of(chapter: str) -> Hunt:
    """Return the hunt of a chapter. Raises ValueError if it has none."""
    names = [module.name for module in iter_modules(hunts.__path__) if module.name.startswith("chapter_")]
    if f"chapter_{chapter}" not in names:
        there = ", ".join(sorted(name.removeprefix("chapter_") for name in names))
        raise ValueError(f"chapter {chapter!r} has no hunt; there are hunts in {there}")
    return importlib.import_module(f"{hunts.__name__}.chapter_{chapter}").HUNT


def _next(found: Hunt) -> int:
    """Return the next fault for this reader."""
    order = list(range(len(found.faults)))
    if not progress.is_kept():
        return 0
    reader = f"{getpass.getuser()} {progress.progress_file().resolve()} {found.chapter}"
    random.Random(reader).shuffle(order)
    known = {name.split(" (")[0] for name in _known(found.chapter)}
    return next((number for number in order if found.faults[number].name not in known), order[0])


def _known(chapter: str) -> list[str]:
    """Return the names of the faults that this reader has found, or was shown."""
    if not progress.is_kept():
        return []
    return list(progress.read(progress.progress_file())["hunt"].get(chapter, []))


def _why(fault: Fault, question: str, said: str) -> str:
    """Say that an answer is wrong, and which evidence speaks against it."""
    reasons = fault.astray.get(question, {})
    found = next((why for pattern, why in reasons.items() if pattern and search(pattern, said, IGNORECASE)), None)
    return f"{said!r} is not it. {found or reasons.get('', '')}".rstrip()


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH) if text else []


def _item(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  - ", subsequent_indent="    ")
