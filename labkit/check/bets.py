"""Predictions: a bet that the reader places before a cell shows what comes out.

A chapter's module asks the question and says why each answer tempts:

    ask("06.bytes", "How many more bytes ...?", choices={"none": "An all-reduce is ...", "25 %": "That is ..."})

The chapter places the bet in one cell and settles it in a later one:

    bet = predict("06.bytes")
    bet.settle("none" if sent_now == sent_before else "25 %")

With a person at the notebook `predict` shows a control. Elsewhere the bet is an argument, as in
`predict("06.bytes", "none")`; without it there is no bet, and nothing waits for an answer.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from labkit.check.boxed import boxed, paragraph, wrapped
from labkit.check.chapter_modules import load_chapters
from labkit.check.notebook_output import show
from labkit.check.progress import kept
from labkit.viz.live import is_live

EXACT, NEAR = 0.02, 0.25
"""Relative distances up to which a number that is not a count is right, and up to which any number is near."""


@dataclass(frozen=True)
class Prediction:
    """A question with choices, or one for a number."""

    name: str
    """Chapter, dot, short name."""
    question: str
    choices: Mapping[str, str] | Callable[..., Mapping[str, str]] | None = None
    """Each choice, with the reason why it is right or tempts; or a function of the bet's parameters that gives them."""
    misread: Callable[..., Mapping[str, float]] | None = None
    """For a number: parameters of the bet -> each misunderstanding in words, with the number that it gives."""
    unit: str = ""
    """Unit of the number."""
    because: str = ""
    """Why the number is what it is, for everybody who did not know."""


_predictions: dict[str, Prediction] = {}


def ask(
    name: str,
    question: str,
    *,
    choices: Mapping[str, str] | Callable[..., Mapping[str, str]] | None = None,
    misread: Callable[..., Mapping[str, float]] | None = None,
    unit: str = "",
    because: str = "",
) -> None:
    """Register a prediction of a chapter; `Prediction` says what each argument is."""
    _predictions[name] = Prediction(name, question, choices, misread, unit, because)


def predictions(chapter: str | None = None) -> dict[str, Prediction]:
    """Return all predictions by name, or those of one chapter (`06`)."""
    load_chapters(chapter)
    return {name: each for name, each in sorted(_predictions.items()) if chapter in (None, name.split(".")[0])}


def predict(name: str, answer: str | float | None = None, **parameters: Any) -> Bet:
    """Show a question, and take the reader's bet: `answer`, or the value of a control if a person is at the notebook.

    parameters: numbers of the run on which the answers depend, such as the ranks of which one can be chosen.

    Raises ValueError if there is no such prediction, or if `answer` is none of its choices or not a number.
    """
    known = predictions(str(name).split(".")[0])
    if name not in known:
        near = difflib.get_close_matches(str(name), predictions(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(predictions())}"
        raise ValueError(f"there is no prediction {name!r}; {hint}")
    bet = Bet(known[name], parameters)
    if answer is not None:
        bet.place(answer)
    if answer is None and is_live():
        from labkit.check.bet_control import bet_control  # ipywidgets, which a script does without

        show(bet_control(name, bet.prediction.question, list(bet.choices), bet.prediction.unit, bet.place))
    else:
        show(BetPage("open", name, bet.prediction.question, [bet.terms]))
    return bet


class Bet:
    """A prediction of one reader. `answer` is None until there is one."""

    def __init__(self, prediction: Prediction, parameters: Mapping[str, Any]) -> None:
        self.prediction, self.name = prediction, prediction.name
        choices = prediction.choices or {}
        self.choices = dict(choices(**parameters) if callable(choices) else choices)
        self.misread = dict(prediction.misread(**parameters)) if prediction.misread else {}
        self.answer: str | float | None = None
        self.settled = False

    def place(self, answer: str | float) -> str:
        """Commit an answer, and say which. Raises ValueError for one that is no choice, and if the bet is settled."""
        if self.settled:
            raise ValueError(f"{self.name} is settled already; run this cell again to bet anew")
        if self.choices and answer not in self.choices:
            raise ValueError(f"{self.name}: {answer!r} is not a choice; choose {self._listed()}")
        if not self.choices and (isinstance(answer, bool) or not isinstance(answer, int | float)):
            raise ValueError(f"{self.name}: {answer!r} is not a number")
        self.answer = answer
        return self.terms

    @property
    def terms(self) -> str:
        """Say what may be answered, or what was."""
        if self.answer is not None:
            return f"Your bet: {self._said(self.answer)}."
        unit = f" of {self.prediction.unit}" if self.prediction.unit else ""
        return f"Place your bet: {self._listed() if self.choices else f'a number{unit}'}."

    def settle(self, measured: str | float) -> None:
        """Show what came out, whether the bet is right, near or wrong, and the reasoning that led elsewhere.

        Raises ValueError if what came out is none of the choices: then the chapter's question is wrong, not the reader.
        """
        if self.choices and measured not in self.choices:
            raise ValueError(f"{self.name}: {measured!r} came out, which is not among the choices {self._listed()}")
        self.settled = True
        state = self.state(measured)
        remark = kept("predict", self.name, state) if self.answer is not None else ""
        verdict = {"right": "Right", "near": "Near", "wrong": "Not this time", "open": "No bet was placed"}[state]
        bet = f"you bet {self._said(self.answer)}, and " if state in ("near", "wrong") else ""
        reasons = [self._astray(measured), self._why(measured), remark]
        headline = f"{verdict}{':' if self.answer is not None else ';'} {bet}it is {self._said(measured)}."
        show(BetPage(state, self.name, headline, [reason for reason in reasons if reason]))

    def state(self, measured: str | float) -> str:
        """Return `right`, `near` or `wrong`; `open` without a bet. Counts must be equal to be right."""
        if self.answer is None:
            return "open"
        if isinstance(measured, str) or isinstance(self.answer, str):
            return "right" if self.answer == measured else "wrong"
        apart = abs(self.answer - measured)
        if apart <= (0 if float(measured).is_integer() else EXACT * abs(measured)):
            return "right"
        return "near" if apart <= NEAR * abs(measured) else "wrong"

    def _astray(self, measured: str | float) -> str:
        """Return the reasoning that leads to a wrong answer; empty for a right one, and where none is known."""
        if self.answer is None or self.state(measured) == "right":
            return ""
        if isinstance(self.answer, str):
            return f"{self.answer}? {self.choices[self.answer]}"
        meant = [words for words, number in self.misread.items() if abs(self.answer - number) <= EXACT * abs(number)]
        return f"{self._said(self.answer)}? {meant[0]}" if meant else ""

    def _why(self, measured: str | float) -> str:
        return self.choices[measured] if isinstance(measured, str) else self.prediction.because

    def _listed(self) -> str:
        *first, last = self.choices
        return f"{', '.join(first)} or {last}" if first else last

    def _said(self, answer: Any) -> str:
        return answer if isinstance(answer, str) else f"{answer:,.10g} {self.prediction.unit}".strip()


@dataclass(frozen=True)
class BetPage:
    """What is shown of a bet, before and after."""

    kind: str
    name: str
    headline: str
    sentences: list[str]

    def __repr__(self) -> str:
        return "\n".join([wrapped(f"{self.name}: {self.headline}"), *(wrapped(each, "  ") for each in self.sentences)])

    def _repr_html_(self) -> str:
        return boxed(self.kind, self.name, self.headline, *map(paragraph, self.sentences))
