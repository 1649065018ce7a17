"""Exercises of chapter 11: where a layer is, the signed order of a rank, an entry that comes too early.

Wrong orders are compared with those of known misunderstandings. The score names the first position that differs, and
distinguishes an order that cannot run from a slower one. Times are in forwards of a rank's whole share of the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from labkit.check.scoring import (
    Diagnosis,
    Finding,
    Misreadings,
    Outcome,
    exercise,
    fitting,
    holds,
    raised,
    shown,
    without_grid,
)
from labkit.schedules.ir import Schedule, ScheduleError
from labkit.schedules.simulator import Costs, simulate
from labkit.schedules.tables import convert_schedule_table_to_order


def _fitting(answer: Callable[..., Any], misread: dict[tuple[Any, ...], Misreadings]) -> dict[Any, Misreadings]:
    """Return by case the misunderstanding that gives the answer's value in every case; all if there is none."""
    try:
        values = [answer(*case) for case in misread]
    except (Exception, SystemExit):
        return misread
    return dict(zip(misread, fitting(values, list(misread.values())), strict=True))


# ---- the place of a layer ----

_PLACES = ((6, 16, 4, 2), (5, 8, 2, 2), (13, 16, 4, 2), (10, 24, 2, 3), (23, 24, 4, 3), (6, 8, 4, 1))
"""(layer, layers, pp, vpp)."""


@exercise("11.place", "Write place(layer, layers, pp, vpp) -> (rank, chunk), where interleaving puts the layer.")
def places(answer: Any) -> Iterator[Outcome]:
    """Judge six layers, the last one in a model without interleaving."""
    diagnosis = Diagnosis()
    misread = _fitting(answer, {case: _misread_places(*case) for case in _PLACES})
    for layer, layers, pp, vpp in _PLACES:
        stage = layer * pp * vpp // layers
        yield diagnosis.outcome(
            f"layer {layer} of {layers}, pp {pp}, vpp {vpp}",
            (stage % pp, stage // pp),
            lambda a=(layer, layers, pp, vpp): answer(*a),
            misread[layer, layers, pp, vpp],
        )


def _misread_places(layer: int, layers: int, pp: int, vpp: int) -> Misreadings:
    stage, wide, few = layer * pp * vpp // layers, layer * pp // layers, layer // (pp * vpp)
    rank, chunk = stage % pp, stage // pp
    return {
        "rank and chunk are swapped": (chunk, rank),
        "this gives a rank neighbouring stages; the rank of stage s is s mod pp": (stage // vpp, stage % vpp),
        "this deals out single layers; deal out stages of layers / (pp vpp) layers": (layer % pp, layer // pp),
        "this stage has layers / pp layers; with vpp stages per rank it has layers / (pp vpp)": (wide, 0),
        "this chunk goes back from the last rank to the first; each chunk begins at rank 0": (pp - 1 - rank, chunk),
        "this is the rank and the number of the stage; a rank counts its own chunks": (rank, stage),
        "this is the number of the stage; the exercise asks for its rank and chunk": stage,
        "this chunk divides by vpp; a round has pp stages, one for each rank": (rank, stage // vpp),
        "this chunk is a remainder; it is the number of full rounds before the stage": (rank, stage % vpp),
        "this rank is right; this chunk is still 0, it is the number of full rounds before the stage": (rank, 0),
        "this chunk is right; this rank is that of a stage of layers / pp layers, a stage has layers / (pp vpp)": (
            wide,
            chunk,
        ),
        "a round has pp stages, one for each rank, not vpp": (stage % vpp, stage // vpp),
        "this divides by the number of stages; divide by the layers of a stage, layers / (pp vpp)": (
            few % pp,
            few // pp,
        ),
    }


# ---- the order of a rank ----


class _Case(NamedTuple):
    """A pipeline: its ranks, the chunks of each, and the sizes of the groups of microbatches."""

    pp: int
    vpp: int
    groups: tuple[int, ...]

    def __str__(self) -> str:
        return f"pp {self.pp}, vpp {self.vpp} and groups {list(self.groups)}"

    def chunks(self, groups: Sequence[int] | None = None) -> list[int]:
        """Return the chunk of each forward."""
        return [chunk for size in groups or self.groups for chunk in range(self.vpp) for _ in range(size)]

    def order(self, rank: int, *, each: int = 2, size: int | None = None, groups: Sequence[int] | None = None,
              before: int | None = None, more: int = 0) -> list[int]:  # fmt: skip
        """Return the right order of a rank, or the order of a misunderstanding.

        each: forwards of the warm-up for each rank after this one.
        size, before: the warm-up has a group of `size` microbatches for each of `before` chunks.
        groups: groups of the forwards.
        more: additional forwards of the warm-up.
        """
        chunks = self.chunks(groups)
        size, before = max(self.groups) if size is None else size, self.vpp - 1 if before is None else before
        warmup = max(0, min(each * (self.pp - rank - 1) + before * size + more, len(chunks)))
        return convert_schedule_table_to_order(warmup, self.vpp, [(0, chunk) for chunk in chunks])

    def schedule(self, order: Callable[[int], Iterable[int]]) -> Schedule:
        """Return the schedule of all ranks with their orders."""
        rows = [_actions(order(rank), rank, self.pp) for rank in range(self.pp)]
        return Schedule("the answer", self.pp * self.vpp, sum(self.groups), rows)


def _actions(order: Iterable[int], rank: int, pp: int) -> list[str]:
    """Return the actions of a signed order: each chunk sees the microbatches in ascending order."""
    seen: Counter[int] = Counter()
    row = []
    for signed in order:
        row.append(f"{(abs(signed) - 1) * pp + rank}{'F' if signed > 0 else 'B'}{seen[signed]}")
        seen[signed] += 1
    return row


_ROWS = (
    (_Case(4, 2, (4, 4)), 0),
    (_Case(4, 2, (4, 4)), 3),
    (_Case(4, 2, (4,)), 0),
    (_Case(2, 2, (3, 2)), 0),
    (_Case(2, 3, (2, 2)), 1),
    (_Case(3, 2, (3, 5, 4)), 2),
)
"""(pipeline, rank), among them a short last group, a long middle one, and a warm-up of all forwards."""
_PIPELINES = (_Case(4, 2, (4, 4)), _Case(3, 4, (3, 3)), _Case(3, 2, (3, 5, 4)))


@exercise("11.order", "Write order(pp, vpp, groups, rank) -> the signed numbers of that rank's row.")
def orders(answer: Any) -> Iterator[Outcome]:
    """Judge six rows, then three whole pipelines that must run as fast as interleaved 1F1B and in its memory."""

    def of(case: _Case, rank: int) -> Any:
        return answer(case.pp, case.vpp, list(case.groups), rank)

    misread = _fitting(of, {row: _misread_orders(*row) for row in _ROWS})
    for case, rank in _ROWS:
        yield _judged_row(partial(of, case), case, rank, misread[case, rank])
    for case in _PIPELINES:
        yield _judged_pipeline(partial(of, case), case)


def _judged_row(answer: Callable[[int], Any], case: _Case, rank: int, misread: Misreadings) -> Outcome:
    """Judge one row."""
    given, right = f"{case}, rank {rank}", case.order(rank)
    claim = f"{len(right)} signed numbers"
    try:
        value = _numbers(answer(rank), rank)
    except (Exception, SystemExit) as error:
        return Outcome(given, claim, raised(error), False, raised(error))
    if isinstance(value, str):
        return Outcome(given, claim, value, False, "form")
    if value == right:
        return Outcome(given, claim, claim, True)
    here = next(i for i, (a, b) in enumerate(zip([*value, 0], [*right, 0])) if a != b)
    reason = next((words for words, other in misread.items() if value == other), "")
    due = str(right[here]) if here < len(right) else "no entry"
    seen = str(value[here]) if here < len(value) else "no entry"
    reason = reason or _difference(value, right, here)
    return Outcome(given, f"{due} at position {here}", f"{seen} there: {reason}", False, reason)


def _numbers(order: Any, rank: int) -> list[int] | str:
    """Read an answer's order; return its numbers, or their fault as words of a sentence."""
    form = "an order is a list of whole numbers, 1 for a forward of the first chunk, -1 for its backward"
    if isinstance(order, str) or not isinstance(order, Iterable):
        return f"{shown(order)} for rank {rank}: {form}"
    numbers = list(order)
    for number in numbers:
        if not isinstance(number, int | np.integer) or isinstance(number, bool) or number == 0:
            return f"{shown(number)} in the order of rank {rank}: {form}"
    return [int(number) for number in numbers]


def _difference(value: list[int], right: list[int], here: int) -> str:
    """Describe an order that no known misunderstanding gives."""
    if here >= min(len(value), len(right)):
        return f"the row has {len(value)} entries; all forwards and backwards are {len(right)}"
    if value[here] * right[here] > 0:
        return f"chunk {abs(value[here]) - 1} where chunk {abs(right[here]) - 1} is due"
    return "a backward where a forward is due" if value[here] < 0 else "a forward where a backward is due"


def _misread_orders(case: _Case, rank: int) -> dict[str, list[int]]:
    right, count, first = case.order(rank), sum(case.groups), case.groups[0]
    forwards = [signed for signed in right if signed > 0]
    same = iter([-signed for signed in forwards])
    of_first = "the warm-up is for the first group; the largest group decides"
    once = "the warm-up has p - r - 1 once; twice leaves the messages time"
    return {
        "there is no backward": forwards,
        once: case.order(rank, each=1),
        of_first: case.order(rank, size=first),
        "the warm-up has pp microbatches for each earlier chunk; the largest group decides": case.order(
            rank, size=case.pp
        ),
        "the warm-up is for the last group; the largest group decides": case.order(rank, size=case.groups[-1]),
        "this is 1F1B's warm-up; a group also passes each earlier chunk": case.order(rank, each=1, before=0),
        "the warm-up lacks (vpp - 1) groups: the first backward is of the last chunk": case.order(rank, before=0),
        "the warm-up counts the last chunk's group, too; its first backward needs one microbatch": case.order(
            rank, before=case.vpp
        ),
        "the forward of the first pair is counted as warm-up": case.order(rank, more=1),
        "the first backward is one forward early: the warm-up is short by one, or pairs begin with the backward": (
            case.order(rank, more=-1)
        ),
        "all forwards come first: this is GPipe with chunks, and everything is in flight": case.order(
            rank, more=len(forwards)
        ),
        "groups are ignored: all microbatches pass a chunk before the next": case.order(rank, groups=[count]),
        "groups are ignored, in the warm-up, too: all microbatches pass a chunk before the next": case.order(
            rank, groups=[count], size=count
        ),
        "each microbatch passes all chunks at once; a group passes a chunk before the next": case.order(
            rank, groups=[1] * count
        ),
        "backwards take the chunks in the forwards' order; gradients reach the last chunk first": [
            signed if signed > 0 else next(same) for signed in right
        ],
    }


def _judged_pipeline(answer: Callable[[int], Any], case: _Case) -> Outcome:
    """Judge all ranks together."""
    expected = _times(case.schedule(case.order), case.vpp)

    def test() -> Finding:
        rows: list[list[int]] = []
        for rank in range(case.pp):
            row = _numbers(answer(rank), rank)
            if isinstance(row, str):
                return "form", row
            rows.append(row)
        if fault := _uncounted(rows, case):
            return "counts", fault
        try:
            found = _times(case.schedule(lambda rank: rows[rank]), case.vpp)
        except ScheduleError as problem:
            return "it cannot run", f"no pipeline: {without_grid(str(problem))}"
        if found == expected:
            return True
        why = _verdict(found, expected)
        return why, f"{_words(*found)}: {why}"

    return holds(f"{case}, all ranks", _words(*expected), test)


def _uncounted(rows: Sequence[Sequence[int]], case: _Case) -> str | None:
    """Name a chunk that lacks forwards or backwards; None if all counts are right."""
    count = sum(case.groups)
    for rank, row in enumerate(rows):
        counts = Counter(row)
        for signed in (step for chunk in range(1, case.vpp + 1) for step in (chunk, -chunk)):
            if counts[signed] != count:
                return f"{counts[signed]} times {signed} on rank {rank}; each chunk runs {count} microbatches each way"
        if len(row) != 2 * case.vpp * count:
            return f"chunks on rank {rank} that the rank does not hold; it has 1 to {case.vpp}"
    return None


def _times(schedule: Schedule, vpp: int) -> tuple[float, float, float]:
    """Return two times, with free messages and with messages of half a chunk's forward, and a rank's largest memory.

    All three are in whole shares.
    """
    work = {"forward": 1 / vpp, "input_grad": 1 / vpp, "weight_grad": 1 / vpp, "activation": 1 / vpp}
    free, slow = (simulate(schedule, Costs(**work, latency=latency)) for latency in (0.0, 0.5 / vpp))
    return round(free.makespan, 6), round(slow.makespan, 6), round(max(free.peak_memory), 6)


def _words(free: float, slow: float, memory: float) -> str:
    return (
        f"{free:.4g} forwards of a whole share if messages are free, {slow:.4g} if one takes half a chunk's forward, "
        f"and at most {memory:.4g} shares in flight"
    )


def _verdict(found: Sequence[float], expected: Sequence[float]) -> str:
    """Describe a pipeline that runs in another time or memory."""
    (free, slow, memory), (least, usual, kept) = found, expected
    if free == least and slow > usual and memory > kept:
        return "it keeps more, and takes longer with slow messages"
    if free == least and slow > usual and memory == kept:
        return "it takes longer with slow messages"
    if free == least and slow > usual:
        return "it looks better while messages are free, but no message has time to travel, so each one delays the next"
    if free > least:
        return "it runs, and ranks wait even for free messages"
    return "it runs as fast, and keeps more" if memory > kept else "it runs, in another order"


# ---- an entry that comes too early ----

_EARLY: tuple[tuple[str, tuple[int, ...], int], ...] = (
    ("interleaved 1F1B, rank 1 of 2", tuple(_Case(2, 2, (2, 2)).order(1)), 2),
    ("all forwards first", (1, 1, 2, 2, -2, -2, -1, -1), 2),
    ("one microbatch after the other", (1, 2, -2, -1, 1, 2, -2, -1), 2),
    ("a backward before every forward", (1, -2, 2, -1), 2),
    ("the backward of chunk 0 first", (1, 1, 2, 2, -1, -2, -1, -2), 2),
    ("the second forward of chunk 1 too soon", (1, 2, 2, -2, 1, -2, -1, -1), 2),
    ("the backward of the middle chunk first", (1, 1, 2, 3, -2, -3, -2, 2, 3, -3, -1, -1), 3),
    ("three chunks", (1, 2, 3, -3, -2, -1), 3),
    ("three chunks, two swapped", (1, 1, 2, 2, 3, 3, -3, -3, -2, -1, -1, -2), 3),
)
"""(words, order, chunks)."""


@exercise("11.early", "Write too_early(order, vpp) -> position of the first entry that comes too early, or None.")
def early(answer: Any) -> Iterator[Outcome]:
    """Judge nine orders with right counts; five of them cannot run."""
    diagnosis = Diagnosis()
    misread = _fitting(
        lambda order, vpp: answer(list(order), vpp), {(o, v): _misread_early(o, v) for _, o, v in _EARLY}
    )
    for words, order, vpp in _EARLY:
        outcome = diagnosis.outcome(
            f"order {' '.join(map(str, order))}, vpp {vpp} ({words})",
            _first_early(order, vpp),
            lambda o=order, v=vpp: answer(list(o), v),
            misread[order, vpp],
        )
        yield outcome if outcome.passed else replace(outcome, got=f"{outcome.got} ({_why(order, vpp)})")


def _waits_for(signed: int, vpp: int) -> int:
    """Return the rank's entry that must come before, once for each time; 0 for a forward of the first chunk."""
    if signed > 0:
        return signed - 1
    return vpp if signed == -vpp else signed - 1


def _first_early(order: Sequence[int], vpp: int, waits_for: Callable[[int, int], int] = _waits_for) -> int | None:
    counts: Counter[int] = Counter()
    for position, signed in enumerate(order):
        counts[signed] += 1
        other = waits_for(signed, vpp)
        if other and counts[signed] > counts[other]:
            return position
    return None


def _why(order: Sequence[int], vpp: int) -> str:
    """Name the entry that the first early one waits for, and its position."""
    here = _first_early(order, vpp)
    if here is None:
        return "every entry finds on this rank what it needs; another order is not a wrong one"
    signed = order[here]
    other, times = _waits_for(signed, vpp), order[: here + 1].count(signed)
    place = [position for position, step in enumerate(order) if step == other][times - 1]
    return f"the {signed} at position {here} waits for the {other} at position {place}, and the rank waits for itself"


def _misread_early(order: Sequence[int], vpp: int) -> Misreadings:
    right = _first_early(order, vpp)
    late = None if right is None else order.index(_waits_for(order[right], vpp), right)
    chunkwise = lambda signed, _: 0 if signed > 0 else -signed  # noqa: E731
    upwards = lambda signed, _: signed - 1 if signed > 0 else signed + 1 or 1  # noqa: E731
    forwards = lambda signed, _: signed - 1 if signed > 0 else 0  # noqa: E731
    backwards = lambda signed, vpp: 0 if signed > 0 else _waits_for(signed, vpp)  # noqa: E731
    no_turn = lambda signed, _: signed - 1  # noqa: E731
    free_turn = lambda signed, vpp: 0 if signed == -vpp else signed - 1  # noqa: E731
    absent = [i for i, signed in enumerate(order) if (other := _waits_for(signed, vpp)) and other not in order[:i]]
    unseen = [i for i, signed in enumerate(order) if signed < 0 and -signed not in order[:i]]
    return {
        "this only compares a backward with its own forward; chunks wait for each other, too": _first_early(
            order, vpp, chunkwise
        ),
        "this lets gradients reach the first chunk first; they come from the last chunk": _first_early(
            order, vpp, upwards
        ),
        "this looks at forwards alone": _first_early(order, vpp, forwards),
        "this asks if a forward came at all; each backward needs one of its own, and chunks wait for each other": next(
            iter(unseen), None
        ),
        "this finds nothing: right counts do not make an order that runs": None,
        "positions count from 0": None if right is None else right + 1,
        "this is the entry that is waited for; the exercise asks for the early one": late,
        "this is the early number itself; the exercise asks for its position": None if right is None else order[right],
        "this asks if the needed number came at all; each entry needs one of its own": next(iter(absent), None),
        "this looks at backwards alone; a forward waits for the chunk before, too": _first_early(order, vpp, backwards),
        "no chunk comes after the last one; its backward needs its own forward": _first_early(order, vpp, no_turn),
        "the backward of the last chunk waits, too, for its own forward": _first_early(order, vpp, free_turn),
    }
