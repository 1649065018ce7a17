"""Does the plan rank layouts as their published times do: rows of one run that differ in nothing but their layout."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from scale_page.belief import source_of
from scale_page.compared import Timed, percent, timed_rows
from site_pages.tables import table

from labkit.plan.layouts import neutral
from labkit.plan.workload import Workload

_TIE = 1e-3
"""Layouts whose published steps differ by less than this share are not ordered: tables round their numbers."""


@dataclass(frozen=True)
class Alternative:
    """One layout of a run, with the mean published step of the rows that have it."""

    name: str
    measured: float
    predicted: float
    fitted: bool

    @property
    def residual(self) -> float:
        """log(predicted / published)."""
        return math.log(self.predicted / self.measured)


@dataclass(frozen=True)
class Run:
    """Layouts of one run: the same source, GPUs, model, batch, precision and software."""

    source: str
    counts: bool
    """The source says enough for a comparison."""
    layouts: list[Alternative]

    @property
    def first(self) -> Alternative:
        """The layout that the plan ranks first."""
        return min(self.layouts, key=lambda each: each.predicted)

    @property
    def lost(self) -> float:
        """Published step of our first layout over the best published one, minus 1."""
        return self.first.measured / min(each.measured for each in self.layouts) - 1

    @property
    def pairs(self) -> list[tuple[Alternative, Alternative]]:
        """Pairs of layouts whose published steps differ, the faster one first."""
        found = [sorted(pair, key=lambda each: each.measured) for pair in combinations(self.layouts, 2)]
        return [(fast, slow) for fast, slow in found if slow.measured > (1 + _TIE) * fast.measured]


def runs() -> list[Run]:
    """Return every run of which the table has several layouts, those of well-specified sources first."""
    groups: defaultdict[tuple[object, ...], defaultdict[Workload, list[Timed]]] = defaultdict(lambda: defaultdict(list))
    for each in timed_rows().values():
        work = each.row.workload
        assert work is not None
        source, number = source_of(each.row.source), each.stated["precision"]
        run = source, each.row.specified, each.row.machine, work.world_size, work.software, number
        groups[*run, neutral(work.config)][work].append(each)
    found = [
        Run(str(source), bool(counts), [_alternative(rows) for rows in layouts.values()])
        for (source, counts, *_), layouts in groups.items()
        if len(layouts) > 1
    ]
    return sorted(found, key=lambda run: not run.counts)


def _alternative(rows: list[Timed]) -> Alternative:
    measured = statistics.fmean(row.measured for row in rows)
    return Alternative(rows[0].row.id, measured, rows[0].step.seconds, any(row.fitted for row in rows))


def kendall(found: Iterable[Run]) -> float:
    """Return Kendall's tau: pairs in the published order less those in the other, over all pairs of these runs."""
    signs = [math.copysign(1, slow.predicted - fast.predicted) for run in found for fast, slow in run.pairs]
    return statistics.fmean(signs) if signs else math.nan


def ranked() -> str:
    """Return for each source how well the plan orders the layouts of a run."""
    by_source: defaultdict[tuple[str, bool], list[Run]] = defaultdict(list)
    for run in runs():
        by_source[run.source, run.counts].append(run)
    head = ("source", "runs", "layouts", "fastest ranked first", "by chance", "Kendall tau", "lost: mean", "worst")
    lines = [_line(f"{name}{'' if counts else ', not counted'}", found) for (name, counts), found in by_source.items()]
    return table(head, [*lines, _line("all", runs())])


def _line(name: str, found: list[Run]) -> list[str]:
    right = sum(run.lost <= _TIE for run in found)
    chance = sum(1 / len(run.layouts) for run in found)
    lost = [run.lost for run in found]
    layouts = sum(len(run.layouts) for run in found)
    return [
        name, str(len(found)), str(layouts), f"{right}/{len(found)}", f"{chance:.1f}", f"{kendall(found):+.2f}",
        percent(statistics.fmean(lost)), percent(max(lost)),
    ]  # fmt: skip


def differences() -> list[float]:
    """Return for each pair of layouts of a run that gave no constant by how much their two errors differ."""
    return [
        abs(one.residual - other.residual)
        for run in runs()
        for one, other in combinations(run.layouts, 2)
        if not (one.fitted or other.fitted)
    ]


def single_errors() -> list[float]:
    """Return the errors of the same layouts, each on its own."""
    return [abs(each.residual) for run in runs() for each in run.layouts if not each.fitted]


def gaps() -> list[float]:
    """Return the published step of the slower layout of each pair over the faster one, minus 1."""
    return [slow.measured / fast.measured - 1 for run in runs() for fast, slow in run.pairs]


def share_of(values: list[float], share: float = 0.8) -> float:
    """Return the value that this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1]
