"""A score as the reader sees it: wrapped text in a terminal, HTML in a notebook."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from html import escape

from labkit.check.boxed import boxed, paragraph, wrapped
from labkit.check.scoring import Outcome, Score
from labkit.check.watched import NOT_TRIED

_WHERE = "Your code was here:"


@dataclass(frozen=True)
class ScorePage:
    """What `check` shows of a score. `repr` is the text, and `_repr_html_` what Jupyter shows."""

    score: Score
    attempted: bool
    """False for the body with which the chapter starts."""
    solved_for_you: bool
    """True if later cells use labkit's solution."""
    remark: str = ""
    """A last sentence, such as why progress could not be kept."""

    @property
    def headline(self) -> str:
        """The score in one line."""
        passed, total = self.score.passed, self.score.total
        if not self.attempted:
            return "Not attempted yet: this is the body that you start from."
        said = "Right. From here on the chapter uses your function." if self.score.ok else f"{total - passed} to go."
        return f"{passed}/{total}. {said}"

    @property
    def cases(self) -> list[Outcome]:
        """The cases that are told: of those that got None the first one, and none that was not tried.

        An untouched body has none, because its reader has not tried yet, and a reason would give the idea away.
        """
        if not self.attempted:
            return []
        nothing = [outcome for outcome in self.score.told if outcome.got == "None"]
        return [outcome for outcome in self.score.told if outcome not in nothing[1:] and NOT_TRIED not in outcome.got]

    @property
    def closing(self) -> list[str]:
        """The sentences below the cases."""
        said = "Until it is right, the next cells use labkit's solution." if self.solved_for_you else ""
        advice = self.score.advice if self.attempted else ""
        return [sentence for sentence in (advice, said, self.remark) if sentence]

    @property
    def frames(self) -> tuple[str, ...]:
        """The reader's own lines in which the answer raised an error."""
        return tuple(self.score.frames) if self.attempted else ()

    def __repr__(self) -> str:
        cases = [wrapped(str(outcome), "  - ") for outcome in self.cases]
        frames = [textwrap.indent(frame, "    ") for frame in self.frames]
        where = [f"  {_WHERE}", *frames] if frames else []
        closing = [wrapped(sentence, "  ") for sentence in self.closing]
        return "\n".join([wrapped(f"{self.score.exercise}: {self.headline}"), *cases, *where, *closing])

    def _repr_html_(self) -> str:
        kind = "right" if self.score.ok else "wrong" if self.attempted else "open"
        code = escape("\n".join(self.frames))
        frames = f"{paragraph(_WHERE)}<pre style='margin:2px 0 2px 1.5em'>{code}</pre>" if code else ""
        parts = (*map(_case, self.cases), frames, *map(paragraph, self.closing))
        return boxed(kind, self.score.exercise, self.headline, *parts)


def _case(outcome: Outcome) -> str:
    """Return a failed case: what was given, and below it what was expected and what came."""
    rows = (("given", outcome.given), ("expected", outcome.expected), ("got", outcome.got))
    cells = "".join(
        f"<span style='opacity:.65'>{name}</span><span style='overflow-wrap:anywhere'>{escape(text)}</span>"
        for name, text in rows
    )
    grid = "display:grid;grid-template-columns:max-content 1fr;column-gap:10px;margin:5px 0 5px 1.5em"
    return f"<div style='{grid}'>{cells}</div>"
