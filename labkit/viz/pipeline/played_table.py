"""A reader's table of actions, played as far as it runs: the longest wait, or where its ranks wait for each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from matplotlib.patches import Rectangle

from labkit.events import Event
from labkit.schedules.ir import EVENT_KINDS, Action, Schedule
from labkit.viz.figure import Figure
from labkit.viz.pipeline.timeline_bars import WIDTH, Style, draw_rows, finish, legend, row_height
from labkit.viz.pipeline.timeline_rows import Rows
from labkit.viz.style import ALERT, new_figure, styled

_EDGE = {"fill": False, "edgecolor": ALERT, "linewidth": 2.5, "zorder": 5, "clip_on": False}


class PlayedTable:
    """A table whose ranks run their rows in order, until all are done or none can go on.

    Its F, I and W take one step for a rank's whole share of the model, and B two; messages take no time.
    """

    def __init__(self, rows: Sequence[Sequence[Action]]) -> None:
        self.rows = rows
        self.kinds = {(action.stage, action.kind) for row in rows for action in row}
        self.last = max(action.stage for row in rows for action in row)
        self.done: dict[Action, Event] = {}
        self.heads = [0] * len(rows)
        """By rank, how many actions of its row have run."""
        while sum(self._run(rank) for rank in range(len(rows))):
            pass

    def _run(self, rank: int) -> bool:
        """Run the actions of a row that can run now; return True if there was one."""
        row, before = self.rows[rank], self.heads[rank]
        chunks = {stage: chunk for chunk, stage in enumerate(sorted({action.stage for action in row}))}
        while self.heads[rank] < len(row) and not self.missing(row[self.heads[rank]]):
            at = self.heads[rank]
            action = row[at]
            free = self.done[row[at - 1]].end if at else 0.0
            start = max([free, *(self.done[each].end for each in self.needs(action))])
            end = start + (2 if action.kind == "B" else 1) / len(chunks)
            kind = EVENT_KINDS[action.kind]
            self.done[action] = Event(rank, str(action), kind, start, end, action.microbatch, chunks[action.stage])
            self.heads[rank] += 1
        return self.heads[rank] > before

    def needs(self, action: Action) -> list[Action]:
        """Return the actions that must have ended before this one starts."""
        stage, kind, i = action.stage, action.kind, action.microbatch
        if kind == "F":
            return [Action(stage - 1, "F", i)] if stage else []
        if kind == "W":
            return [Action(stage, "I", i)]
        after = "B" if (stage + 1, "B") in self.kinds else "I"
        return [Action(stage, "F", i), *([Action(stage + 1, after, i)] if stage < self.last else [])]

    def missing(self, action: Action) -> list[Action]:
        """Return what an action needs and what has not run."""
        return [each for each in self.needs(action) if each not in self.done]

    @property
    def stopped(self) -> dict[int, Action]:
        """Rank -> the action that it cannot run, for each rank that does not come to the end of its row."""
        return {rank: self.rows[rank][head] for rank, head in enumerate(self.heads) if head < len(self.rows[rank])}

    @property
    def steps(self) -> float:
        """End of the last action that ran."""
        return max((event.end for event in self.done.values()), default=0.0)

    @property
    def longest_wait(self) -> tuple[int, float, Event] | None:
        """(rank, start, the action that ends it) of the first longest wait that a W could have filled, or None.

        Before its first B or I a rank has no W, so these waits do not count.
        """
        waits = [
            (rank, self.done[before].end, self.done[after])
            for rank, row in enumerate(self.rows)
            for before, after in pairwise(since_first_gradient(row))
            if self._waits_between(before, after)
        ]
        return max(waits, key=lambda wait: round(wait[2].start - wait[1], 9), default=None)

    @property
    def is_idle_inside(self) -> bool:
        """True if some rank waits once it has begun."""
        pairs = (pair for rank, row in enumerate(self.rows) for pair in pairwise(row[: self.heads[rank]]))
        return any(self._waits_between(*pair) for pair in pairs)

    def _waits_between(self, before: Action, after: Action) -> bool:
        ran = before in self.done and after in self.done
        return ran and self.done[after].start > self.done[before].end + 1e-9


def since_first_gradient(row: Sequence[Action]) -> Sequence[Action]:
    """Return a row from its first B or I on; empty for a row that has none."""
    first = next((place for place, action in enumerate(row) if action.kind in "BI"), len(row))
    return row[first:]


def play_table(schedule: Schedule, targets: Mapping[str, float] | None = None) -> Figure:
    """Draw the timeline of any table, also of one that cannot run: its ranks then stop at the actions in red.

    A rank's whole share of the model takes one step in F, I and W each, and two in B. The longest wait after a rank's
    first gradient is red. targets: words -> steps, each a line to compare with.
    """
    rows = [schedule.actions(rank) for rank in range(schedule.pp)]
    return draw_played(PlayedTable(rows), targets or {}, schedule.name)


def draw_played(table: PlayedTable, targets: Mapping[str, float], name: str = "Your table") -> Figure:
    """Draw the timeline of a table, its longest wait or the actions at which its ranks stop in red.

    targets: words -> steps, each a line to compare with. name: the first words of the sentence.
    """
    end = 1.02 * max([table.steps + 3.0 * bool(table.stopped), *targets.values()])
    inches, ranks = row_height(len(table.rows)), list(range(len(table.rows)))
    rows = Rows(list(table.done.values()), ranks)
    with styled():
        fig = new_figure(WIDTH, len(ranks) * inches + 1.1)
        axes = fig.subplots()
        draw_rows(axes, rows, Style(1.0, end, inches))
        finish(axes, [f"rank {rank}" for rank in ranks], end, inches)
        for place, (words, steps) in enumerate(targets.items()):
            axes.axvline(steps, color="#000000", linestyle=":", linewidth=1.2)
            axes.text(steps, -0.08 - 0.32 * place, words, ha="right", va="bottom", fontsize=7.5)
        axes.set_xlabel("time (steps)")
        (_mark_stops if table.stopped else _mark_wait)(axes, table)
        legend(fig, rows, False)
    return Figure(fig, _sentence(table, name))


def _mark_wait(axes: Any, table: PlayedTable) -> None:
    if wait := table.longest_wait:
        rank, start, action = wait
        axes.add_patch(Rectangle((start, rank + 0.07), action.start - start, 0.86, **_EDGE))
        middle, length = (start + action.start) / 2, action.start - start
        words = f"{length:g} steps" if length > table.steps / 15 else f"{length:g}" if length > table.steps / 40 else ""
        axes.text(middle, rank + 0.5, words, ha="center", va="center", fontsize=8, color=ALERT, zorder=6)


def _mark_stops(axes: Any, table: PlayedTable) -> None:
    """Draw an empty red bar for the action at which each rank stops, with what it waits for."""
    for rank, action in table.stopped.items():
        ran = table.rows[rank][: table.heads[rank]]
        start = table.done[ran[-1]].end if ran else 0.0
        axes.add_patch(Rectangle((start, rank + 0.07), 1.0, 0.86, **_EDGE))
        words = f"{action} waits for {table.missing(action)[0]}"
        axes.text(start + 1.2, rank + 0.5, words, va="center", fontsize=8, color=ALERT)


def _sentence(table: PlayedTable, name: str) -> str:
    if table.stopped:
        stops = [f"rank {r} at {action}, which needs {table.missing(action)[0]}" for r, action in table.stopped.items()]
        return f"{name} stops after {len(table.done)} actions: {'; '.join(stops)}."
    text = f"{name} takes {table.steps:g} steps"
    if wait := table.longest_wait:
        rank, start, action = wait
        idle = action.start - start
        when = f"rank {rank} idles {idle:g} {'step' if idle == 1 else 'steps'} before {action.name}"
        return f"{text}; its longest wait after a first gradient: {when}."
    if table.is_idle_inside:
        return f"{text}, and no rank waits after its first gradient."
    return f"{text}, and no rank waits once it has begun."
