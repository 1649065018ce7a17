"""Why layouts lose: the best of each family of layouts next to the winner, term by term. No torch.

A family has one value of one column, such as `tp` 16 or `schedule` zbv. The same search finds its best layout, but it
tries only the most promising ones, because a family that loses by much would cost more than the winner.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from labkit.plan.layout import layout_of
from labkit.plan.layouts import AXES, SCHEDULE_NAMES, SHOWN, WORDS, matching
from labkit.plan.search import DIFFERENCE, Ranked, Search
from labkit.plan.terms import KINDS

GB = 1e9
"""Bytes of a gigabyte, as data sheets count memory."""
_FAMILIES = tuple(name for name in AXES if name != "dp")
"""Columns whose values make a family; dp follows from the others."""
_FAR = 1.0
"""Families that are slower by more than this share of the winner's step are in one line."""
_TRIES = 24
"""Layouts of a family that are tried: those with the least bounds, of which the fastest is shown."""
_GROUPS = {"tp": "tp", "cp": "cp", "ep": "ep", "dp": "dp"}
"""Kind of a part of the step -> the group of ranks that communicates."""


@dataclass(frozen=True)
class Loser:
    """A family of layouts without the winner."""

    column: str
    values: str
    """Such as `16` or `16, 32`."""
    best: Ranked | None
    """Its fastest layout; None if none fits."""
    reason: str
    """Why it loses, in one line."""

    @property
    def family(self) -> str:
        """Such as `tp 16`."""
        return f"{SHOWN.get(self.column, self.column)} {self.values}"


def changes(winner: Ranked, other: Ranked, column: str) -> str:
    """Return in which other columns a layout differs from the winner, such as `pp 2, dp 256`.

    What follows from these is left out: etp that is tp, the schedule of a single stage, the chunks of a V.
    """
    row, follows = other.row, {"etp"} if other.row["etp"] == other.row["tp"] else set()
    if row["pp"] == 1:
        follows |= {"schedule", "vpp"}
    elif SCHEDULE_NAMES[row["schedule"]] != "interleaved":
        follows |= {"vpp"}
    names = (name for name in AXES if name not in {column} | follows and row[name] != winner.row[name])
    return ", ".join(f"{SHOWN.get(name, name)} {word(name, row[name])}" for name in names)


def losers(search: Search, winner: Ranked, within: np.ndarray, fixed: Collection[str] = ()) -> list[Loser]:
    """Return a line for each family; the values of a column with which nothing fits share one.

    within: a mask (N,) of the layouts that compete. fixed: columns that make no families, since all share one value.
    """
    families = [
        (name, [value for value in np.unique(search.rows[name][within]) if value != winner.row[name]])
        for name in _FAMILIES
        if name not in fixed and _is_own(search, name)
    ]
    for name, values in families:
        for value in values:
            search.best(1, within & matching(search.rows, {name: int(value)}), tries=_TRIES)
    # each family now has the fastest of all that were simulated, for whatever family
    return [line for name, values in families for line in _of_column(search, winner, name, values, within)]


def _is_own(search: Search, name: str) -> bool:
    """Return False for etp of a model without experts, which is tp."""
    return name != "etp" or search.base.config.moe.num_experts > 0


def _of_column(search: Search, winner: Ranked, name: str, values: list[Any], within: np.ndarray) -> list[Loser]:
    """Return the lines of one column: near families one each, those far away together, and those that do not fit."""
    near: list[Loser] = []
    far: list[tuple[str, Ranked]] = []
    too_large: list[tuple[str, float]] = []
    for value in values:
        only, text = within & matching(search.rows, {name: int(value)}), word(name, value)
        if text == "auto":  # the schedule of pp 1, which says the same
            continue
        if (best := search.fastest_simulated(only)) is None:
            too_large.append((text, float(search.memory_bound[only].min())))
        elif best.prediction.seconds > (1 + _FAR) * winner.prediction.seconds:
            far.append((text, best))
        elif text != "auto":  # pp 1 says the same
            near.append(Loser(name, text, best, compared(winner, best)))
    if far:
        best_of = min((each for _, each in far), key=lambda each: each.prediction.seconds)
        near.append(Loser(name, ", ".join(text for text, _ in far), best_of, compared(winner, best_of)))
    if too_large:
        least = no_fit(min(bound for _, bound in too_large), search.available)
        near.append(Loser(name, ", ".join(text for text, _ in too_large), None, least))
    return near


def word(column: str, value: Any) -> str:
    """Return a value of a column as text."""
    if column in ("sp", "sharded"):
        return str(bool(value)).lower()
    return WORDS[column][value] if column in WORDS else str(value)


def no_fit(least: float, available: float) -> str:
    """Return why nothing of a family fits; least: a lower bound of the bytes of its fullest ranks."""
    if least <= available:
        return f"no layout fits the {available / GB:.1f} GB of a GPU at its exact peak"
    return f"no layout fits: the fullest rank needs at least {least / GB:.1f} GB, a GPU has {available / GB:.1f} GB"


def compared(winner: Ranked, other: Ranked) -> str:
    """Return by how much a layout is slower than the winner, with its interval, and the part that grew most."""
    more = other.prediction.seconds - winner.prediction.seconds
    kinds = [kind for kind in KINDS if kind in winner.prediction.parts or kind in other.prediction.parts]
    grown = {
        kind: other.prediction.parts.get(kind, 0.0) - winner.prediction.parts.get(kind, 0.0) for kind in kinds
    }  # fmt: skip
    kind = max(grown, key=grown.__getitem__)
    if more < 0.0005 * winner.prediction.seconds:
        return f"as fast (+{milliseconds(max(0.0, more))})"
    margin = DIFFERENCE * other.prediction.seconds
    slower = f"+{milliseconds(more)} ± {milliseconds(margin)} (+{more / winner.prediction.seconds:.1%})"
    part = f"{KINDS[kind]} +{milliseconds(grown[kind])}{_leaves_node(kind, winner, other)}"
    return f"{slower}: {part}"


def _leaves_node(kind: str, winner: Ranked, other: Ranked) -> str:
    """Return a remark if the ranks that communicate are on several nodes, and the winner's are not."""
    if kind not in _GROUPS:
        return ""
    spans = [getattr(layout_of(each.workload), _GROUPS[kind]).nodes(each.machine) for each in (winner, other)]
    return f", as {kind} leaves the node" if spans[0] == 1 < spans[1] else ""


def milliseconds(seconds: float) -> str:
    """Return a difference of times in a readable unit."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2f} ms"


def pareto_front(search: Search, winner: Ranked, most: int = 12) -> list[Ranked]:
    """Return layouts that are the fastest for the memory they need, the fastest first, at most `most`.

    Each needs at least 5 % less memory than the one before it.
    """
    front = [winner]
    while len(front) < most:
        found = search.best(1, limit=0.95 * front[-1].memory.bytes)
        if not found:
            break
        front += found
    return front
