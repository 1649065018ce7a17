"""Exercises and bets of chapter 11: an entry that comes too early, two ranks by hand, the signed order of a rank.

Wrong orders are compared with those of known misunderstandings. The score names the first position that differs, and
distinguishes an order that cannot run from a slower one. Times are in forwards of a rank's whole share of the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from labkit.check.bets import ask
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
from labkit.schedules.ir import Action, Schedule, ScheduleError
from labkit.schedules.simulator import Costs, simulate
from labkit.schedules.tables import convert_schedule_table_to_order

if TYPE_CHECKING:
    from labkit.viz.figure import Figure


def _fitting(answer: Callable[..., Any], misread: dict[tuple[Any, ...], Misreadings]) -> dict[Any, Misreadings]:
    """Return by case the misunderstanding that gives the answer's value in every case; all if there is none."""
    try:
        values = [answer(*case) for case in misread]
    except (Exception, SystemExit):
        return misread
    return dict(zip(misread, fitting(values, list(misread.values())), strict=True))


# ---- the bets ----

ask(
    "11.remarks",
    "The remarks next to the article's numbers name the other chunk for every backward. Believe them: -1 becomes -2, "
    "and -2 becomes -1. The other three ranks run the right rows. What does the row of rank 0 do then?",
    choices={
        "hang": "An order in which a backward comes before what it needs would hang. Here each one finds its forward, "
        "and the gradient of the later chunk comes before that of the earlier one.",
        "as fast as the right row": "Its numbers are the right ones, and as many. But their order decides for whom "
        "rank 0 waits.",
        "between the right row and 1F1B": "Thinner stages help only as long as nobody waits. Here rank 0 wants "
        "gradients in groups of two, and the others make them in groups of four.",
        "slower than 1F1B": "Rank 0 wants gradients in groups of two, and the others make them in groups of four. So "
        "rank 0 waits in every group, and the others wait for rank 0.",
    },
)
ask(
    "11.three",
    "With factor 2 the batch takes 32 if a message takes 0.25, with factor 1 it takes 36. What about factor 3, for 4 "
    "ranks, 2 chunks per rank and 8 microbatches?",
    choices={
        "less than 32": "A longer warm-up buys time for messages, but with factor 2 these have all the time they need.",
        "32": "The messages would be hidden as well. But the longer warm-up needs microbatches that have come round.",
        "more than 32": "A longer warm-up puts the first backward off, and here it puts it off for good.",
        "a deadlock": "Rank 0's warm-up has 13 forwards, and one more comes before its first backward. That one "
        "needs rank 3's forward of microbatch 5, which rank 3 runs only after a backward whose gradient comes from "
        "rank 0.",
    },
)
ask(
    "11.memory",
    "From one chunk per rank to two and to four, the bubble shrinks. What do the activations do that the fullest rank "
    "keeps?",
    choices={
        "stay the same": "A rank has the same layers, but it warms up longer: a microbatch has to pass all ranks v "
        "times before its first backward.",
        "shrink": "Each piece is smaller, but more of them are in flight.",
        "grow": "The first step costs memory. But with more chunks each of the additional forwards is "
        "a smaller piece of the model.",
        "grow and then shrink": "With two chunks or more, rank 0 keeps p - 1 pieces more than 1F1B's p shares, and a "
        "piece is 1/v of a share. So two chunks are the worst case.",
    },
)
ask(
    "11.chunks",
    "A GPT of 8.3 billion parameters in pipelines of four ranks, with 18 layers each, so up to 18 chunks per rank. How "
    "many give the shortest training step on 8 H100s, and how many on 512, by the plan?",
    choices={
        "18 on both": "A layer is the thinnest stage and has the smallest bubble. But every further boundary is a "
        "message, and the first microbatch passes all of them. Between nodes that costs more than the bubble.",
        "fewer than 18 on both": "Every further boundary is a message, but within a node they cost less than the "
        "bubble that they save.",
        "18 on 8 and fewer on 512": "Every further boundary is a message that the first microbatch waits for. Over "
        "NVLink these cost less than the bubble that they save, over InfiniBand they cost more.",
        "fewer on 8 and 18 on 512": "On 512 GPUs there is more bubble to save. But there messages go over InfiniBand, "
        "and the first microbatch waits for each of them.",
    },
)

# ---- two ranks by hand ----


@exercise(
    "11.two",
    "Write two() -> the orders of 2 ranks with 2 chunks each, for 2 microbatches: two lists of 8 signed numbers.",
    draw=lambda answer: _drawn(list(answer()), {"1F1B": 9, "the aim ": 7.5}),
)
def two(answer: Any) -> Iterator[Outcome]:
    """Judge the orders: they run, they beat 1F1B's 9, and they reach 7.5.

    No order does better: rank 1 begins after a chunk's forward (1/2), works for 6, and its last backward, of stage 1,
    is followed by one of stage 0 (1).
    """
    case = _Case(2, 2, (2,))
    found = _timed_two(answer, case)
    told = set[str]()
    for claim, aim in (("orders that run", None), ("less than 1F1B's 9", 8.999), ("7.5, the least", 7.5)):

        def test(aim: float | None = aim) -> Finding:
            if isinstance(found, str):
                return found, found
            makespan, why = found
            if aim is None or makespan <= aim + 1e-9:
                return True
            words = "" if why in told else why
            told.add(why)
            return f"orders that take {makespan:g}" + (f": {words}" if words else "")

        yield holds("2 ranks, 2 chunks each, 2 microbatches", claim, test)


def _timed_two(answer: Any, case: _Case) -> tuple[float, str] | str:
    """Return the time of the answer's orders and why it is long, or what is wrong with them."""
    try:
        given = answer()
        if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != case.pp:
            return f"{shown(given)}: give a list of two orders, of rank 0 and of rank 1"
        rows = [_numbers(order, rank) for rank, order in enumerate(given)]
    except (Exception, SystemExit) as error:
        return raised(error)
    for row in rows:
        if isinstance(row, str):
            return row
    orders = [row for row in rows if not isinstance(row, str)]
    if fault := _uncounted(orders, case):
        return fault
    for rank, order in enumerate(orders):
        if _first_early(order, case.vpp) is not None:
            return f"no pipeline: on rank {rank} {_why(order, case.vpp)}"
    try:
        makespan = _times(case.schedule(lambda rank: orders[rank]), case.vpp)[0]
    except ScheduleError as problem:
        return f"no pipeline: {without_grid(str(problem))}"
    first = orders[0]
    if first.index(2) < [i for i, signed in enumerate(first) if signed == 1][1]:
        return makespan, "rank 0 waits for microbatch 0, which is on rank 1, instead of starting microbatch 1"
    if first.index(-2) < max(i for i, signed in enumerate(first) if signed == 2):
        return makespan, "rank 0 waits for a gradient before its last forward, which rank 1 needs"
    if [i for i, signed in enumerate(first) if signed == -2][1] > first.index(-1):
        return makespan, "rank 0 waits for a gradient of chunk 0 while the other one of chunk 1 would be ready"
    return makespan, "rank 1 comes late with what rank 0 waits for"


def _drawn(orders: Sequence[Any], targets: dict[str, float]) -> Figure | None:
    """Draw the orders of all ranks as far as they run; what is no order has no drawing."""
    from labkit.viz.pipeline.played_table import PlayedTable, draw_played  # matplotlib, which a score does without

    rows = [_numbers(order, rank) for rank, order in enumerate(orders)]
    if not rows or any(isinstance(row, str) or not row for row in rows):
        return None
    actions = [[Action.parse(text) for text in _actions(row, rank, len(rows))] for rank, row in enumerate(rows)]  # type: ignore[arg-type]
    return draw_played(PlayedTable(actions), targets)


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


@exercise(
    "11.order",
    "Write order(pp, vpp, groups, rank) -> the signed numbers of that rank's row.",
    draw=lambda answer: _drawn([answer(4, 2, [4, 4], rank) for rank in range(4)], {"1F1B": 33, "the aim ": 28.5}),
)
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
    work: dict[str, Any] = {"forward": 1 / vpp, "input_grad": 1 / vpp, "weight_grad": 1 / vpp, "activation": 1 / vpp}
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
