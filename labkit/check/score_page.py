"""A score as the reader sees it: wrapped text in a terminal, HTML in a notebook."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from html import escape

from labkit.check.scoring import Outcome, Score

WIDTH = 90
"""Columns of the text."""
_COLORS = {"right": "#1a7f37", "wrong": "#cf222e", "open": "#6e7781"}
"""Backgrounds of the white words of a headline, readable on a light and on a dark page, whose own colours stay."""


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
    def verdict(self) -> str:
        """The score in one sentence."""
        if self.score.ok:
            return "Right. From here on the chapter uses your function."
        if not self.attempted:
            return "Not attempted yet: this is the body that you start from."
        return f"{self.score.total - self.score.passed} of {self.score.total} cases are wrong."

    @property
    def closing(self) -> list[str]:
        """The sentences below the cases."""
        said = "Until it is right, the next cells use labkit's solution." if self.solved_for_you else ""
        return [sentence for sentence in (self.score.advice, said, self.remark) if sentence]

    def __repr__(self) -> str:
        head = f"{self.score.exercise}: {self._count()}{self.verdict}"
        cases = [_wrapped(str(outcome), "  - ") for outcome in self.score.told]
        frames = [textwrap.indent(frame, "    ") for frame in self.score.frames]
        where = ["  It was raised in your code:", *frames] if frames else []
        closing = [_wrapped(sentence, "  ") for sentence in self.closing]
        return "\n".join([_wrapped(head), *cases, *where, *closing])

    def _repr_html_(self) -> str:
        kind = "right" if self.score.ok else "wrong" if self.attempted else "open"
        color = _COLORS[kind]
        badge = f"background:{color};color:#fff;border-radius:3px;padding:1px 7px;font-weight:600"
        name = f"<span style='{badge}'>{escape(self.score.exercise)}</span>"
        parts = [f"<div>{name} {self._count()}{escape(self.verdict)}</div>", *map(_case, self.score.told)]
        if self.score.frames:
            code = escape("\n".join(self.score.frames))
            parts.append(f"<div>It was raised in your code:</div><pre style='margin:2px 0 2px 1.5em'>{code}</pre>")
        parts += [f"<div>{escape(sentence)}</div>" for sentence in self.closing]
        box = f"border-left:4px solid {color};padding:2px 0 2px 10px;max-width:60em;line-height:1.5"
        return f'<div style="{box}">{"".join(parts)}</div>'

    def _count(self) -> str:
        return f"{self.score.passed}/{self.score.total}. " if self.attempted else ""


def _wrapped(text: str, start: str = "") -> str:
    """Wrap a text; its later lines are indented as far as the first one, and a little where that is not at all."""
    return textwrap.fill(text, WIDTH, initial_indent=start, subsequent_indent=" " * (len(start) or 2))


def _case(outcome: Outcome) -> str:
    """Return a failed case: what was given, and below it what was expected and what came."""
    rows = (("given", outcome.given), ("expected", outcome.expected), ("got", outcome.got))
    cells = "".join(
        f"<span style='opacity:.65'>{name}</span><span style='overflow-wrap:anywhere'>{escape(text)}</span>"
        for name, text in rows
    )
    grid = "display:grid;grid-template-columns:max-content 1fr;column-gap:10px;margin:5px 0 5px 1.5em"
    return f"<div style='{grid}'>{cells}</div>"
