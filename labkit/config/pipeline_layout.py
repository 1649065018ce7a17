"""The text that says what each pipeline stage holds: `Ettt|tttt|tttt|tttL`.

Megatron's `pipeline_model_parallel_layout`: E is the embedding, t a transformer layer, L the final norm with the loss,
and `|` separates stages. `t*3` and `(tt|)*2` repeat what is before the star; spaces and commas have no meaning. Stages
are numbered from the left. A stage of only E or only L is a standalone embedding or loss stage. Nothing between two `|`
is an empty stage, which passes on what it receives: `Et||tt|L` has four stages, and the second one is empty.
"""

from __future__ import annotations

import re

MOST_SIGNS = 100_000
"""Longest text that is read, with its repetitions written out."""

_TIMES = re.compile(r"[\s,]*\*[\s,]*([0-9]{1,9})")
_FORM = "write E (embedding), t (a layer), L (loss) and | between stages, as in Ettt|tttt|tttL"


class LayoutError(ValueError):
    """A text that is not a layout; the message is the rule that it breaks, with the position if there is one."""


def parse_layout(text: str) -> list[str]:
    """Return the stages of `text` with repetitions written out: `Et*2|(t|)*2L` gives `Ett`, `t`, `t`, `L`.

    Raises LayoutError for another letter, for brackets that do not match, and for a misplaced embedding or loss.
    Megatron accepts `|Ett|L` and embeds in stage 0 anyway; labkit rejects it.
    """
    signs = _written_out(text, 0, len(text))
    for letter, part, where, place in (
        ("E", "embedding", "first", text.rfind("E")),
        ("L", "loss", "last", text.find("L")),
    ):
        if letter not in signs:
            raise LayoutError(f"has no {letter}: the {part} comes {where}, as in Ettt|tttt|tttL")
        if signs.count(letter) > 1 or signs.replace("|", "")[0 if letter == "E" else -1] != letter:
            raise LayoutError(f"the {letter} at position {place} is out of place: one {part}, and it comes {where}")
    stages = signs.split("|")
    last = len(stages) - 1
    if not stages[0]:
        raise LayoutError(f"stage 0 of {last + 1} is empty: the first stage embeds the tokens, so write E before any |")
    if not stages[-1]:
        raise LayoutError(f"stage {last} of {last + 1} is empty: the last stage has the loss; end with L")
    return stages


def _written_out(text: str, start: int, end: int) -> str:
    """Return `text[start:end]` with repetitions written out, without spaces and commas."""
    found, position = "", start
    while position < end:
        letter, here = text[position], position
        position += 1
        if letter.isspace() or letter == ",":
            continue
        if letter in "EtL|":
            unit = letter
        elif letter != "(":
            raise LayoutError(f"{letter!r} at position {here} is not a part of a stage; {_FORM}")
        elif (close := text.find(")", here, end)) < 0:
            raise LayoutError(f"the bracket at position {here} is not closed; write ) after what is repeated")
        else:
            unit, position = _written_out(text, here + 1, close), close + 1
        star = _TIMES.match(text, position, end)
        times = int(star[1]) if star else 1
        if times == 0:
            raise LayoutError(f"what is repeated 0 times at position {position} has no effect; leave it out")
        if len(found) + len(unit) * times > MOST_SIGNS:
            raise LayoutError(f"is longer than {MOST_SIGNS:,} signs at position {position}; no pipeline is that long")
        position = star.end() if star else position
        found += unit * times
    return found
