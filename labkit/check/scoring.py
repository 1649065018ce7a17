"""Exercises and their scores, which name what an answer got wrong.

The exercises of chapter 15 are in `chapter_15.py`. An exercise is a generator that tries the learner's answer on cases:

    @exercise("02.groups", "Write groups_of(order, sizes, token).")
    def groups(answer: Any) -> Iterator[Outcome]:
        yield compare("tp 2, dp 2, token dp", [[0, 2], [1, 3]], lambda: answer("tp-dp", {"tp": 2, "dp": 2}, "dp"))

A wrong answer never raises, because an exception of the learner's code becomes part of the score. An outcome may name
its reason, such as a misunderstanding, and the score shows each reason only once. `asked` judges cases by known
misunderstandings.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.check.chapter_modules import load_chapters
from labkit.check.rounding import ROUNDED, rounding
from labkit.check.solution_source import solution_of
from labkit.check.watched import Watch, raised

if TYPE_CHECKING:
    from labkit.viz.figure import Figure

MAX_SHOWN = 100
"""Most characters of a value that a sentence shows."""
ONLY_FIRST = "only the first failed case"
"""Reason of a case that adds nothing once another case has failed."""


@dataclass(frozen=True)
class Outcome:
    """One case of an exercise."""

    given: str
    """Input on which the answer was tried."""
    expected: str
    """Result that the answer should give."""
    got: str
    """Result that the answer gave, or the exception that it raised."""
    passed: bool
    """True if the expected and the given result agree."""
    reason: str = ""
    """What the answer got wrong. The score shows one sentence for each reason; cases without a reason are all shown."""

    def __str__(self) -> str:
        return f"Given {self.given}, expected {self.expected}, got {self.got}."


@dataclass(frozen=True)
class Score:
    """Result of an answer. It prints as `passed/total` and one sentence for each failed case with a new reason."""

    exercise: str
    """Name of the exercise, such as `02.groups`."""
    outcomes: tuple[Outcome, ...]
    """All cases, in order."""
    advice: str = ""
    """What the calls of a wrong answer have in common, such as a forgotten `return`."""
    frames: tuple[str, ...] = ()
    """Where the first error arose: the reader's own frames, each as its place and its line."""

    @property
    def passed(self) -> int:
        """Number of cases that passed."""
        return sum(outcome.passed for outcome in self.outcomes)

    @property
    def total(self) -> int:
        """Number of cases."""
        return len(self.outcomes)

    @property
    def ok(self) -> bool:
        """True if every case passed and there was at least one case."""
        return self.passed == self.total > 0

    @property
    def told(self) -> list[Outcome]:
        """The failed cases that the score shows: the first one of each reason."""
        told: list[Outcome] = []
        for outcome in self.outcomes:
            known = bool(outcome.reason) and outcome.reason in {other.reason for other in told}
            if not (outcome.passed or known or (told and outcome.reason == ONLY_FIRST)):
                told.append(outcome)
        return told

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        return "\n".join([f"{self.exercise}: {self.passed}/{self.total}", *(f"  - {outcome}" for outcome in self.told)])


Judge = Callable[[Any], Iterator[Outcome]]
Drawing = Callable[[Any], "Figure | None"]
"""Draws what an answer makes; None where it makes nothing that could be drawn."""


@dataclass(frozen=True)
class Exercise:
    """A task and the generator of outcomes that judges an answer to it."""

    name: str
    """Chapter, dot, short name."""
    task: str
    """The task in one sentence."""
    judge: Judge
    """Yields one outcome for each case."""
    draw: Drawing | None = None
    """Draws what the reader's answer makes, next to what it should be; None for most exercises."""
    ladder: bool = False
    """True where an answer that passes the first case is good enough for later cells, and the others are targets."""

    @property
    def solution(self) -> Callable[..., Any] | None:
        """The function that solves it (`labkit/check/solutions`); None where the chapter itself still has it."""
        return solution_of(self.name)


_registry: dict[str, Exercise] = {}


def exercise(name: str, task: str, draw: Drawing | None = None, *, ladder: bool = False) -> Callable[[Judge], Judge]:
    """Register the decorated generator as the judge of exercise `name`. Raises ValueError where the name is taken."""

    def register(judge: Judge) -> Judge:
        known = _registry.get(name)
        if known is not None and known.judge.__module__ != judge.__module__:
            raise ValueError(
                f"exercise {name!r} is registered by {known.judge.__module__} already; choose another name"
            )
        _registry[name] = Exercise(name, task, judge, draw, ladder)
        return judge

    return register


def compare(
    given: str, expected: Any, got: Callable[[], Any], *, equal: Callable[[Any, Any], bool] | None = None
) -> Outcome:
    """Call `got` and compare its value with `expected`; an exception of the learner's code is a failed case.

    Tuples, arrays and tensors count as lists. `equal(got, expected)` replaces that comparison, for tolerances.
    """
    try:
        value = got()
        passed = bool(equal(value, expected) if equal else plain(value) == plain(expected))
        why = "" if passed else rounding(plain(value), plain(expected))
        return Outcome(
            given, shown(expected), f"{shown(value)}: {why}" if why else shown(value), passed, why and ROUNDED
        )
    except (Exception, SystemExit) as error:
        return Outcome(given, shown(expected), raised(error), False, raised(error))


Finding = bool | str | tuple[str, str]
"""True for a right answer. For a wrong one it is False, a sentence about it, or (reason, sentence).

For a right answer the sentence of a pair is empty.
"""


def holds(given: str, claim: str, test: Callable[[], Finding]) -> Outcome:
    """Test a claim such as `no deadlock`; an exception of the learner's code is a failed case."""
    try:
        finding = test()
    except (Exception, SystemExit) as error:
        return Outcome(given, claim, raised(error), False, raised(error))
    reason = ""
    if isinstance(finding, tuple):
        reason, sentence = finding
        finding = sentence or True
    if finding is True:
        return Outcome(given, claim, claim, True)
    return Outcome(given, claim, finding if isinstance(finding, str) else "the opposite", False, reason)


Misreadings = Mapping[str, Any]
"""Words for a misunderstanding -> the answer that it gives in a case."""


def same(value: Any, other: Any) -> bool:
    """Return True for equal contents, whatever kind of sequence holds them."""
    return plain(value) == plain(other)


def fitting(values: Sequence[Any], misreadings: Sequence[Misreadings]) -> Sequence[Misreadings]:
    """Return the misreadings of each case; only the one that gives the answers to all cases, if there is one."""
    for words in misreadings[0]:
        if all(same(value, row[words]) for value, row in zip(values, misreadings, strict=True)):
            return [{words: row[words]} for row in misreadings]
    return misreadings


def close(*, rtol: float = 0.0, atol: float = 0.0) -> Callable[[Any, Any], bool]:
    """Return a comparison of numbers, lists or arrays: True for one shape and entries within these tolerances."""

    def equal(value: Any, other: Any) -> bool:
        mine, right = (np.asarray(plain(each), dtype=float) for each in (value, other))
        return mine.shape == right.shape and bool(np.allclose(mine, right, rtol, atol, equal_nan=True))

    return equal


class Diagnosis:
    """Compares the answers to one exercise with right ones, and names the misunderstandings behind wrong ones."""

    def __init__(self, equal: Callable[[Any, Any], bool] = same) -> None:
        """equal: (given answer, other answer) -> True if they are the same."""
        self._equal = equal
        self._named: set[str] = set()

    def outcome(self, given: str, right: Any, got: Callable[[], Any], misreadings: Misreadings) -> Outcome:
        """Judge one case. If a misunderstanding gives the same wrong answer, the outcome names it."""

        def test() -> Finding:
            value = got()
            if self._equal(value, right):
                return True
            fitting = [w for w, a in misreadings.items() if not self._equal(a, right) and self._equal(value, a)]
            reason = self.meant(fitting)
            if not reason and (why := rounding(plain(value), plain(right))):
                return ROUNDED, f"{shown(value)}: {why}"
            return (reason, f"{shown(value)}: {reason}") if reason else shown(value)

        return holds(given, shown(right), test)

    def meant(self, fitting: Sequence[str]) -> str:
        """Return the first misunderstanding that fits; one that was named before has precedence."""
        reason = next((words for words in fitting if words in self._named), next(iter(fitting), ""))
        self._named.add(reason)
        return reason


def asked(
    cases: Iterable[tuple[Any, ...]],
    *,
    given: Callable[..., str],
    right: Callable[..., Any],
    tried: Callable[..., Any],
    misread: Callable[..., Misreadings],
    equal: Callable[[Any, Any], bool] = same,
) -> Iterator[Outcome]:
    """Judge each case, and name the misunderstanding behind a wrong answer.

    All functions take the entries of a case. `given` puts them into words, `tried` calls the learner's answer, and
    `misread` gives the answer of each misunderstanding. `equal(given answer, other answer)` compares answers.
    """
    diagnosis = Diagnosis(equal)
    for case in cases:
        yield diagnosis.outcome(given(*case), right(*case), lambda case=case: tried(*case), misread(*case))


def plain(value: Any) -> Any:
    """Turn tuples, ranges, arrays and tensors into lists, so that `==` compares their numbers."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple, range)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def as_list(value: Any) -> Any:
    """Turn a generator into a list, because it is an answer like any other."""
    return list(value) if isinstance(value, Iterator) else value


def shown(value: Any) -> str:
    """Return `repr(plain(value))` on one line, cut in the middle to MAX_SHOWN characters; a list between its items."""
    value = plain(value)
    text = _one_line(value)
    if len(text) <= MAX_SHOWN:
        return text
    if isinstance(value, list) and (cut := _both_ends([_one_line(item) for item in value])):
        return cut
    half = (MAX_SHOWN - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def _one_line(value: Any) -> str:
    return " ".join(repr(value).split())


def _both_ends(items: list[str]) -> str | None:
    """Show as many items of both ends as fit, and the number between them; None where not even two fit."""
    for kept in range(min(len(items) - 1, MAX_SHOWN // 3), 1, -1):
        head, tail = items[: kept - kept // 2], items[len(items) - kept // 2 :]
        text = f"[{', '.join(head)}, ... {len(items) - kept} more ..., {', '.join(tail)}]"
        if len(text) <= MAX_SHOWN:
            return text
    return None


def listed(items: Sequence[str], most: int = 8, separator: str = ", ") -> str:
    """Join the items on one line; beyond `most` items, give the number of the others instead."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return separator.join(items[:most]) + more


def without_grid(message: str) -> str:
    """Drop the rows that a schedule's error draws, because a score has one line for each case."""
    lines = [line.strip() for line in message.splitlines()]
    first, *others = [line for line in lines if line and not (line.startswith("rank ") and "|" in line)] or [""]
    if not others:
        return first
    more = re.fullmatch(
        r"and (\d+) more", others[-1]
    )  # the refusal itself may be cut: one count for all sentences that are left out
    if more:
        others = others[:-1] + [""] * int(more[1])
    return f"{first}{' ' if first.endswith(':') else '; '}{listed(others, separator='; ')}"


def explained(given: str, claim: str, test: Callable[[], Finding]) -> Outcome:
    """Test a claim like `holds`; the reason of a failed case is what its sentence says after the first colon."""
    outcome = holds(given, claim, test)
    return replace(outcome, reason=reason_of(outcome.got))


def reason_of(sentence: str) -> str:
    """Return what follows the first colon of a sentence, which is why; the whole sentence where there is no colon."""
    return sentence.partition(": ")[2] or sentence


def exercises(chapter: str | None = None) -> dict[str, Exercise]:
    """Return all exercises by name, or those of one chapter (`02`); import only the modules that contain them."""
    load_chapters(chapter)
    return {name: item for name, item in sorted(_registry.items()) if chapter in (None, name.split(".")[0])}


def named(name: str) -> Exercise:
    """Return the exercise of this name. Raises ValueError, with the nearest name, if there is none."""
    known = exercises(str(name).split(".")[0])
    if name in known:
        return known[name]
    every = list(exercises())
    near = difflib.get_close_matches(str(name), every, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(every)}"
    raise ValueError(f"there is no exercise {name!r}; {hint}")


def score(name: str, answer: Any) -> Score:
    """Try `answer` on every case of exercise `name`. Raises ValueError only if there is no such exercise."""
    known, watch = named(name), Watch(answer)
    outcomes: list[Outcome] = []
    try:
        outcomes.extend(watch.limited(known.judge(watch.answer)))
    except (Exception, SystemExit) as error:
        outcomes.append(Outcome("the answer", known.task, raised(error), False))
    found = Score(name, tuple(outcomes))
    return found if found.ok else replace(found, advice=_advice(found, watch), frames=_frames(found, watch))


def _advice(found: Score, watch: Watch) -> str:
    if watch.nones == watch.calls > 0:
        return "Your function returned None each time. Did you forget `return`?"
    if watch.nones and all(outcome.expected != "None" for outcome in found.outcomes):
        return f"Your function returned None in {watch.nones} of {watch.calls} calls. Does a branch lack its `return`?"
    return ""


def _frames(found: Score, watch: Watch) -> tuple[str, ...]:
    """Return the reader's frames of the first error that the score tells."""
    words = [words for outcome in found.told for words in watch.frames if words in outcome.got]
    return watch.frames[words[0]] if words else ()
