"""Exercises and bets of chapter 25: two lanes, the order of a merged pair, weight gradients, warm-up.

An order is a list of words. `a`, `e` and `c` are attention, experts and combine of a forward, and with a prime of a
backward. `We` and `Wa` are weight gradients. Of several layers the forward runs the first one first, the backward the
last one, so the words need no number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from labkit.check.bets import ask
from labkit.check.scoring import Finding, Misreadings, Outcome, asked, exercise, holds
from labkit.events import Event
from labkit.schedules.ir import Schedule, ScheduleError
from labkit.schedules.verifier import verify

if TYPE_CHECKING:
    from labkit.viz.figure import Figure

FORWARD, BACKWARD = ("a", "e", "c"), ("c'", "e'", "a'")
"""Parts of a layer in the order in which they depend on each other."""
WEIGHTS = {"We": "e'", "Wa": "a'"}
"""Weight gradients -> the part of the backward that has to come before."""
STARTS = {"a": "dispatch", "e": "combine", "c'": "combine'", "e'": "dispatch'"}
"""Part -> the all-to-all that it starts at its end."""
AWAITS = {"e": "dispatch", "c": "combine", "e'": "combine'", "a'": "dispatch'"}
"""Part -> the all-to-all that has to have arrived before it."""
TIMES = {"a": 2, "e": 2, "c": 1, "c'": 1, "e'": 4, "a'": 4}
"""Units that each part computes; e' and a' with their weight gradients."""
SPLIT = TIMES | {"e'": 2, "a'": 2, "We": 2, "Wa": 2}
"""The same with weight gradients apart."""
MESSAGE = 3
"""Units of an all-to-all."""

Order = Sequence[str]
Times = Mapping[str, float]


def bars(order: Order, times: Times, message: float, unit: float = 1e-3) -> list[Event]:
    """Return what both lanes of a rank do, as Events of one rank: computations, and all-to-alls of kind `collective`.

    times: units of each part. message: units of an all-to-all. unit: seconds of a unit.

    A part starts when the one before it has ended and the message that it awaits is there. At its end it starts its
    own message, which begins when all earlier ones have arrived.
    """
    kinds = {"'": "backward", "W": "weight_grad"}
    events: list[Event] = []
    now = free = 0.0
    arrives: dict[str, float] = {}
    for part in order:
        now = max(now, arrives.pop(AWAITS.get(part, ""), 0.0))
        kind = next((kind for mark, kind in kinds.items() if mark in part), "forward")
        events.append(Event(0, part, kind, now * unit, (now + times[part]) * unit))
        now += times[part]
        if part in STARTS:
            begins = max(now, free)
            free = arrives[STARTS[part]] = begins + message
            events.append(Event(0, STARTS[part], "collective", begins * unit, free * unit))
    return events


def length(order: Order, times: Times, message: float) -> float:
    """Return the units until the last part has ended."""
    return max(event.end for event in bars(order, times, message, 1.0) if event.kind != "collective")


def pair_bars(events: Sequence[Event], forward: int, backward: int) -> list[Event]:
    """Return what a rank did in the pair of two microbatches of its stage 0, its parts named as by `bars`.

    events: a recorded step of a run without a pipeline. A part is there without its wait, a message from where the lane
    is free. The weights that travel with rows at the same time are left out.
    """
    parts = [event for event in events if event.name.startswith((f"0F{forward} ", f"0B{backward} "))]
    start, end = min(event.start for event in parts), max(event.end for event in parts)
    waits = [event for event in events if event.kind == "wait"]
    sent = [event for event in events if event.name == "all_to_all ep" and start <= event.start < end]
    largest = max((event.bytes or 0 for event in sent), default=0)
    found, free = [], start
    for event in sorted([*parts, *sent], key=lambda event: event.start):
        if event.kind == "collective":
            if (event.bytes or 0) > largest / 8:
                found.append(replace(event, name="", start=max(event.start, free)))
                free = event.end
        else:
            inside = [wait.end for wait in waits if event.start <= wait.start < event.end]
            word = event.name.rpartition(" ")[2][0] + "'" * ("B" in event.name)
            found.append(replace(event, name=word, start=max([event.start, *inside])))
    return found


# ---- the clock of two lanes ----

_CLOCKS: tuple[tuple[str, dict[str, int], int], ...] = (
    ("a e c", TIMES, 3),
    ("a e c c' e' a'", TIMES, 3),
    ("c' a e' e c a'", TIMES, 3),
    ("a c' e' e a' c", TIMES, 4),
    ("c' a e' e a' c c' a e' e a' c", TIMES, 2),
    ("a c' e e' We a' c Wa", SPLIT, 5),
)
"""(order, times, units of a message)."""


@exercise("25.when", "Write when(order, times, message) -> the units until the last part has ended.")
def when(answer: Any) -> Iterator[Outcome]:
    """Judge one side alone, both one after the other, and mixed orders."""
    return asked(
        _CLOCKS,
        given=lambda words, times, message: f"the order {words}, messages of {message} units",
        right=lambda words, times, message: length(words.split(), times, message),
        tried=lambda words, times, message: answer(words.split(), dict(times), message),
        misread=_misread_clock,
    )


def _misread_clock(words: str, times: Times, message: int) -> Misreadings:
    order = words.split()
    return {
        "everything is on one lane; a message is under way while the next parts compute": _clock(
            order, times, message, blocks=True
        ),
        "messages don't wait for each other; they share one lane": _clock(order, times, message, shared=False),
        "nobody waits for a message": sum(times[part] for part in order),
        "a part waits for the other side's messages as well; it needs its own side's only": _clock(
            order, times, message, all_sides=True
        ),
        "a message leaves when its part starts; its rows are there at the part's end": _clock(
            order, times, message, early=True
        ),
        "the last message counts, though no part of the order waits for it": max(
            event.end for event in bars(order, times, message, 1.0)
        ),
    }


def _clock(
    order: Order, times: Times, message: float, *, blocks: bool = False, shared: bool = True,
    all_sides: bool = False, early: bool = False,
) -> float:  # fmt: skip
    """Return the end of the last part under a misunderstanding."""
    now = free = 0.0
    arrives: dict[str, float] = {}
    for part in order:
        awaited = AWAITS.get(part)
        if awaited is not None:
            now = max(now, free if all_sides else arrives.get(awaited, 0.0))
        leaves = now if early else now + times[part]
        now += times[part]
        if part in STARTS:
            free = (max(leaves, free) if shared else leaves) + message
            arrives[STARTS[part]] = free
            now = max(now, free) if blocks else now
    return now


# ---- an order to beat ----


def illegal(order: Any, layers: int, *, weights: bool = False) -> str:
    """Return why a pair of `layers` layers on each side can't run in this order; nothing if it can."""
    words = list(order)
    known = (*FORWARD, *BACKWARD, *(WEIGHTS if weights else ()))
    for word in dict.fromkeys([*words, *known]):
        if word not in known:
            return f"{word!r} is no part; they are {' '.join(known)}"
        if words.count(word) != layers:
            times = "once" if layers == 1 else f"{layers} times"
            return f"{word} is there {words.count(word)} times; each part has to run {times}"
    for chain in (FORWARD, BACKWARD):
        mine = [word for word in words if word in chain]
        for place, word in enumerate(mine):
            if word != chain[place % 3]:
                return f"{word} comes where {chain[place % 3]} has to; a side runs {' '.join(chain)}, layer by layer"
    for weight, part in WEIGHTS.items() if weights else ():
        for place, word in enumerate(words):
            if word == weight and words[:place].count(part) <= words[:place].count(weight):
                return f"{weight} comes before its {part}, which makes the gradient that it reads"
    return ""


def _runs(order: Any, layers: int, *, weights: bool = False) -> Finding:
    problem = illegal(order, layers, weights=weights)
    return ("it cannot run", problem) if problem else True


def _within(order: Any, layers: int, times: Times, most: float, *, weights: bool = False) -> Finding:
    """Say whether the order takes at most this long; otherwise which part waits longest, and for what."""
    problem = illegal(order, layers, weights=weights)
    if problem:
        return "it cannot run", problem
    found = length(list(order), times, MESSAGE)
    if found <= most:
        return True
    computes = [event for event in bars(order, times, MESSAGE, 1.0) if event.kind != "collective"]
    gaps = [(after.start - before.end, after.name) for before, after in pairwise(computes)]
    gap, part = max(gaps, key=lambda each: each[0])
    words = f"{found:g} units; the longest wait is {gap:g} unit{'s' * (gap != 1)} before {part}, for {AWAITS.get(part)}"
    return ("" if gap else "no gap"), words


def _targets(answer: Any, cases: Sequence[tuple[int, float]], times: Times, *, weights: bool) -> Iterator[Outcome]:
    """Judge that a pair of one layer runs, and then each (layers, most units)."""
    yield holds("a pair of one layer", "it can run", lambda: _runs(answer(1), 1, weights=weights))
    for layers, most in cases:
        given = f"a pair of {'one layer' if layers == 1 else f'{layers} layers'}"
        within = partial(_within, layers=layers, times=times, most=most, weights=weights)
        yield holds(given, f"at most {most:g} units", lambda within=within, layers=layers: within(answer(layers)))


def _drawn(answer: Any, layers: int, times: Times, *, weights: bool) -> Figure | None:
    from labkit.viz import layer_timelines

    order = list(answer(layers))
    if illegal(order, layers, weights=weights):
        return None
    return layer_timelines({f"yours, {layers} layer{'s' * (layers > 1)}": bars(order, times, MESSAGE)}, unit="units")


@exercise(
    "25.order",
    "Write order(layers) -> the parts of a merged pair, as words, in the order in which they run.",
    draw=lambda answer: _drawn(answer, 2, TIMES, weights=False),
    ladder=True,
)
def order(answer: Any) -> Iterator[Outcome]:
    """Judge that it runs, then one layer within 16 units, two within 32, as labkit's order, and within 31."""
    return _targets(answer, ((1, 16), (2, 32), (2, 31)), TIMES, weights=False)


@exercise(
    "25.weights",
    "Write with_weights(layers) -> the parts of a pair, We and Wa among them, in the order in which they run.",
    draw=lambda answer: _drawn(answer, 1, SPLIT, weights=True),
    ladder=True,
)
def weights(answer: Any) -> Iterator[Outcome]:
    """Judge that it runs, then one layer within 15 units, and two within 30 and 29."""
    return _targets(answer, ((1, 15), (2, 30), (2, 29)), SPLIT, weights=True)


# ---- warm-up ----


def merged(ahead: Sequence[int], microbatches: int, name: str = "merged") -> Schedule:
    """Return the table whose rank r runs ahead[r] forwards, then merged pairs, then the backwards that are left.

    Raises ValueError for a warm-up below 0 or above the microbatches.
    """
    rows = []
    for rank, first in enumerate(ahead):
        if not 0 <= first <= microbatches:
            raise ValueError(f"rank {rank} cannot begin with {first} of {microbatches} forwards")
        pairs = [f"{rank}F{i}&{rank}B{i - first}" for i in range(first, microbatches)]
        left = [f"{rank}B{i}" for i in range(microbatches - first, microbatches)]
        rows.append([*(f"{rank}F{i}" for i in range(first)), *pairs, *left])
    return Schedule(name, len(rows), microbatches, rows)


_PIPELINES = ((2, 8), (3, 12), (4, 12), (6, 24))
"""(ranks, microbatches)."""


def _of_rule(pp: int, rule: Any) -> list[int]:
    return [rule(rank, pp) for rank in range(pp)]


@exercise(
    "25.warmup", "Write warmup(rank, pp) -> forwards before the first pair: no stall, and no microbatch too many."
)
def warmup(answer: Any) -> Iterator[Outcome]:
    """Judge pipelines of 2 to 6 ranks."""
    for pp, microbatches in _PIPELINES:
        given = f"{pp} ranks, {microbatches} microbatches"
        yield holds(given, f"{_of_rule(pp, _least)}", lambda pp=pp, m=microbatches: _warm(_of_rule(pp, answer), pp, m))


def _least(rank: int, pp: int) -> int:
    return 2 * (pp - 1 - rank) + 1


def _warm(ahead: list[int], pp: int, microbatches: int) -> Finding:
    right = _of_rule(pp, _least)
    if ahead == right:
        return True
    if ahead == _of_rule(pp, lambda rank, pp: pp - 1 - rank):
        return "1F1B's", (
            f"{ahead}: that's 1F1B's; the last rank's first pair then has a forward and a backward of one microbatch"
        )
    if ahead == _of_rule(pp, lambda rank, pp: rank):
        return "turned round", f"{ahead}: later ranks warm up longer; it is the first rank that waits longest"
    try:
        timeline = verify(merged(ahead, microbatches))
    except (ScheduleError, ValueError) as error:
        return "it cannot run", f"{ahead}: {str(error).splitlines()[0]}"
    if timeline.makespan > 3 * (microbatches + pp - 1):
        return "stalls", (
            f"{ahead}: {timeline.makespan:g} units where 1F1B takes {3 * (microbatches + pp - 1)}; a rank waits "
            "between its pairs, since a result leaves only at the end of a pair"
        )
    return "too many", f"{ahead}: as quick as 1F1B, but ranks keep {timeline.peak_in_flight}; fewer are enough"


# ---- bets ----

ask(
    "25.left",
    "All-to-alls take longer than the rest of the step together. Suppose that everything is hidden that can be, "
    "and that hiding costs nothing. How long is the step then, at least?",
    choices=lambda messages, rest: {
        f"{rest} s (the rest)": "That would hide all messages behind computation. But there is less "
        "computation than there are messages.",
        f"{messages} s (the all-to-alls)": "Two lanes run side by side, so the longer one is left. Here that's the "
        "messages: it is the computation that gets hidden.",
        f"{(messages + rest) / 2:.1f} s (half of both)": "Lanes share no work, so it isn't the mean that is left but "
        "the longer lane.",
    },
)
ask(
    "25.async",
    "Forward of one layer: a, dispatch, e, combine, c takes 11 units with messages that block. Now each message is "
    "started asynchronously and awaited as late as possible. How many units are saved?",
    choices={
        "none": "The very next part needs the rows. Started and awaited in one breath, a message hides nothing.",
        "3": "That would hide one message. Which part could run while the rows are on their way?",
        "6": "That would hide both messages. But e can't begin without its rows, nor c without the results.",
    },
)
ask(
    "25.best",
    "Six parts can run in 20 orders, since each side keeps its own. How many of the 20 take as little time as the "
    "best?",
    choices={
        "1": "Each of the four messages needs one of the other side's long parts beside it: a, e', e and a'. Only one "
        "order gives each its own.",
        "2": "That would be one for each side that can begin. But the backward begins with c', which is short, and the "
        "forward with a, so it matters who begins.",
        "6": "Mixed isn't enough: most orders leave a message with nothing beside it, or with a part that's too short.",
    },
)
ask(
    "25.keeps",
    "Under 1F1B, rank 0 of a pipeline keeps as many microbatches as there are ranks. How many does it keep if all its "
    "pairs are merged and no rank stalls?",
    misread=lambda p: {
        "That is 1F1B's. A pair's forward must not be the one that its own backward needs.": p,
        "One more forward is enough for the last rank. But results leave only at the end of a pair, so each hop takes "
        "longer, there and back.": p + 1,
    },
    unit="microbatches",
    because="A result leaves only at the end of a pair. So each rank on the way costs one pair there and one back, two "
    "microbatches where 1F1B needs one.",
)
