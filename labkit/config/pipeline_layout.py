"""The text that says what each pipeline stage holds: `Ettt|tttt|tttt|tttL`.

Megatron's `pipeline_model_parallel_layout`: E is the embedding, t a transformer layer, L the final norm with the loss,
`|` stands between stages. `t*3` and `(tt|)*2` repeat what is before the star; spaces and commas mean nothing. Stages
are numbered from the left. A stage of E or of L alone is a standalone embedding or loss stage. Nothing between two `|`
is an empty stage, which hands on what it is given: `Et||tt|L` has four stages, and the second is empty.
"""

from __future__ import annotations

import re

MOST_SIGNS = 100_000
"""Longest text, with its repetitions written out, that is read."""

_TIMES = re.compile(r"[\s,]*\*[\s,]*([0-9]{1,9})")
_FORM = "write E (embedding), t (a layer), L (loss) and | between stages, as in Ettt|tttt|tttL"

Sign = tuple[str, int]
"""A letter and its position in the text."""


class LayoutError(ValueError):
    """A text that is no layout; the message is the rule, with the position where there is one."""


def parse_layout(text: str) -> list[str]:
    """The stages of `text`, repetitions written out: `Et*2|(t|)*2L` gives `Ett`, `t`, `t`, `L`.

    Raises LayoutError for a letter that is none, brackets that do not match, and an embedding or loss that is not where
    the model begins or ends. Megatron reads `|Ett|L` and embeds in stage 0 all the same; here it is refused.
    """
    signs = _written_out(text, 0, len(text))
    stages: list[list[Sign]] = [[]]
    for sign in signs:
        if sign[0] == "|":
            stages.append([])
        else:
            stages[-1].append(sign)
    _check_ends([sign for stage in stages for sign in stage])
    if not stages[0]:
        raise LayoutError(
            f"stage 0 of {len(stages)} is empty: the first stage embeds the tokens, so write E before any |"
        )
    if not stages[-1]:
        last = len(stages) - 1
        raise LayoutError(f"stage {last} of {last + 1} is empty: the last stage has the loss; end with L")
    return ["".join(letter for letter, _ in stage) for stage in stages]


def _written_out(text: str, start: int, end: int) -> list[Sign]:
    """The signs of `text[start:end]` without repetitions, spaces and commas."""
    found: list[Sign] = []
    position = start
    while position < end:
        letter = text[position]
        if letter.isspace() or letter == ",":
            position += 1
            continue
        if letter == "(":
            close = text.find(")", position, end)
            if close < 0:
                raise LayoutError(f"the bracket at position {position} is not closed; write ) after what is repeated")
            unit = _written_out(text, position + 1, close)
            position = close + 1
        elif letter in "EtL|":
            unit = [(letter, position)]
            position += 1
        else:
            raise LayoutError(f"{letter!r} at position {position} is no part of a stage; {_FORM}")
        if times := _TIMES.match(text, position, end):
            unit = _repeated(unit, int(times[1]), position)
            position = times.end()
        found += unit
        if len(found) > MOST_SIGNS:
            raise LayoutError(f"is longer than {MOST_SIGNS:,} signs at position {position}; no pipeline is")
    return found


def _repeated(unit: list[Sign], times: int, position: int) -> list[Sign]:
    if times < 1:
        raise LayoutError(f"nothing is left of what is repeated {times} times at position {position}; leave it out")
    if len(unit) * times > MOST_SIGNS:
        raise LayoutError(f"is longer than {MOST_SIGNS:,} signs at position {position}; no pipeline is")
    return unit * times


def _check_ends(signs: list[Sign]) -> None:
    """One embedding, first; one loss, last."""
    for letter, what, place, where in (("E", "embedding", 0, "first"), ("L", "loss", len(signs) - 1, "last")):
        at = [number for number, sign in enumerate(signs) if sign[0] == letter]
        if not at:
            raise LayoutError(f"has no {letter}: the {what} comes {where}, as in Ettt|tttt|tttL")
        if at != [place]:
            wrong = next(signs[number][1] for number in at if number != place)
            raise LayoutError(f"the {letter} at position {wrong} is out of place: one {what}, and it comes {where}")
