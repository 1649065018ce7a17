"""Exercises of chapter 12: what a row keeps, a schedule of the reader's own, messages that meet the wrong receive.

Wrong answers are compared with those of known misunderstandings. The score distinguishes a table that cannot run from
one that runs and misses a target, and for the latter names the longest wait inside a row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.check.bets import ask
from labkit.check.scoring import (
    ONLY_FIRST,
    Diagnosis,
    Finding,
    Misreadings,
    Outcome,
    exercise,
    holds,
    plain,
    raised,
    shown,
    without_grid,
)
from labkit.schedules.builders import gpipe, interleaved, one_f_one_b
from labkit.schedules.ir import Action, Schedule, ScheduleError
from labkit.schedules.simulator import Costs, Timeline, simulate
from labkit.schedules.verifier import verify
from labkit.schedules.zero_bubble import split_backward, zbv, zero_bubble_h1

if TYPE_CHECKING:
    from labkit.viz.figure import Figure

Rows = list[list[str]]


def _texts(schedule: Schedule) -> Rows:
    return [[str(action) for action in schedule.actions(rank)] for rank in range(schedule.pp)]


def _row(text: str) -> list[str]:
    return text.split()


# ---- who waits for whom, and how long a batch takes ----


def _pairs(p: int) -> dict[str, str]:
    """Return each pair of neighbours with the reason why they wait for each other, or do not."""
    tempting = (
        "Later ranks wait as well, but for a message of rank 1: they wait for somebody who waits, and nobody waits for "
        "them."
    )
    first = (
        "Rank 1 gives out a gradient only after its second forward, whose input rank 0 sends only after that gradient."
    )
    return {f"ranks {rank} and {rank + 1}": tempting if rank else first for rank in range(p - 1)}


ask(
    "12.worth",
    "512 H100s train a GPT of 8.3 billion parameters in pipelines of four stages, with 512 sequences per step. By how "
    "many percent does a step get shorter if the best table of this chapter takes 1F1B's place?",
    unit="%",
    misread=lambda: {
        "That is the difference of our two tables, 25.5 steps instead of 33. But with 128 pipelines, each of them gets "
        "4 of the 512 sequences, not 8.": 100 * (1 - 25.5 / 33),
        "That is 1F1B's whole bubble with 4 microbatches, 3/7 of the pipeline's time. Some of it is left.": 300 / 7,
        "That is 1F1B's whole bubble with 8 microbatches, 3/11.": 300 / 11,
    },
    because="The batch is the same on more GPUs, so each pipeline gets fewer microbatches, and the bubble is a larger "
    "share of the step.",
)
ask(
    "12.waits",
    "Rank r runs r forwards, then a forward and a backward by turns. Who waits for each other?",
    choices=_pairs,
)
ask(
    "12.one",
    "How long does a batch take if each rank keeps one microbatch?",
    unit="steps",
    misread=lambda p, m: {
        "That is 1F1B's time, in which a rank keeps up to p microbatches.": 3 * (m + p - 1),
        "That is the work of one rank. With one microbatch kept, ranks work one after another.": 3 * m,
        "That counts forwards alone, one rank after another.": p * m,
    },
    because="A rank cannot take the next microbatch before the backward of this one, so microbatches pass all p ranks "
    "one after another: 3 p m steps.",
)
ask(
    "12.rows",
    "How many microbatches does a rank keep at most in 0F0 0I0 0F1 0I1 0W0 0W1, and in 0F0 0I0 0W0 0F1 0I1 0W1?",
    choices={
        "2 and 2": "That counts forwards. But a W gives the memory of its microbatch back.",
        "2 and 1": "W still reads x, so a microbatch is kept until its W: in the first row both wait for theirs.",
        "1 and 1": "That frees at I. But W needs the input x as well, and it comes later.",
    },
)
ask(
    "12.weights",
    "Each B becomes an I and a W. Which table is quicker: the one with W right after I, or the one with all W at the "
    "end of the row?",
    choices={
        "right after I": "Each W then holds up the next I of its rank, for which the rank before waits.",
        "at the end": "Gradients do leave earlier. But the rank that they reach still waits in between, and all that "
        "could have filled its waits comes afterwards.",
        "equally quick": "Right after I, a W holds up the next I. At the end, it comes too late to fill a wait. Both "
        "cost the same number of steps.",
    },
)
ask(
    "12.pairs",
    "Rank 1 of two runs its backwards in the order 1B1, 1B0, 1B2, and rank 0 waits for 0B0, 0B1, 0B2. How many of the "
    "three gradients meet the receive of another one?",
    choices={
        "none": "Each receive says from which rank it wants a message, but not which message. The first one takes what "
        "comes first.",
        "two": "The first message meets the first receive, the second one the second: both are wrong, and no shape "
        "tells. The third one is in its place.",
        "all three": "A message in the wrong place doesn't shift the ones after it: the third meets the third receive.",
    },
)
ask(
    "12.losses",
    "1F1B, ZB-H1, ZB-V and your table train the same GPT. Do their losses agree?",
    choices={
        "bit for bit": "All tables add up the same gradients. But not all add them in the same order, and sums in "
        "floating point depend on it.",
        "up to rounding": "The same gradients are added up in different orders.",
        "no": "A table decides when a gradient is computed, not what it is.",
    },
)


# ---- what a row keeps ----

_ROWS: dict[str, list[str]] = {
    "the row 0F0 0F1 0B0 0F2 0B1 0B2": _row("0F0 0F1 0B0 0F2 0B1 0B2"),
    "the row 0F0 0B0 0F1 0F2 0B1 0B2": _row("0F0 0B0 0F1 0F2 0B1 0B2"),
    "the row 0F0 0I0 0W0 0F1 0F2 0I1 0I2 0W1 0W2": _row("0F0 0I0 0W0 0F1 0F2 0I1 0I2 0W1 0W2"),
    "the row 0F0 0I0 0F1 0I1 0W0 0F2 0I2 0W1 0W2": _row("0F0 0I0 0F1 0I1 0W0 0F2 0I2 0W1 0W2"),
    "the row 0F0 0F1 3F0 3B0 0B0 3F1 3B1 0B1 of a rank with two stages": _row("0F0 0F1 3F0 3B0 0B0 3F1 3B1 0B1"),
    "rank 2 of GPipe, 4 ranks, 8 microbatches": _texts(gpipe(4, 8))[2],
    "rank 0 of interleaved 1F1B, 4 ranks, 2 stages per rank, 8 microbatches": _texts(interleaved(4, 2, 8))[0],
    "rank 3 of 1F1B with all W at the end, 4 ranks, 8 microbatches": _texts(
        split_backward(one_f_one_b(4, 8), weight="end")
    )[3],
}


CHANGES = {"F": 1, "B": -1, "W": -1}
"""How an action of each kind changes the number of activations that are kept."""


@exercise("12.kept", "Write kept(row) -> the most (stage, microbatch) pairs whose activations the rank keeps at once.")
def kept(answer: Any) -> Iterator[Outcome]:
    """Judge five short rows and three long ones."""
    diagnosis = Diagnosis()
    for given, row in _ROWS.items():
        right = most(row, CHANGES)
        yield diagnosis.outcome(given, right, lambda r=row: answer(list(r)), _misread_kept(row))


def most(row: Sequence[str], changes: dict[str, int]) -> int:
    """Return the largest running sum of the changes that the kinds of actions make."""
    return max(np.cumsum([changes.get(Action.parse(text).kind, 0) for text in row]).tolist())


def _misread_kept(row: Sequence[str]) -> Misreadings:
    actions = [Action.parse(text) for text in row]
    forwards = [action.kind == "F" for action in actions]
    by_stage = [
        most([str(action) for action in actions if action.stage == stage], CHANGES)
        for stage in {action.stage for action in actions}
    ]
    return {
        "this frees at I; W still reads the activations, so they live until W": most(row, {"F": 1, "B": -1, "I": -1}),
        "this frees nothing at W; a split backward frees at W": most(row, {"F": 1, "B": -1}),
        "this counts all forwards; B or W gives the memory of one back": sum(forwards),
        "this takes the fullest stage; the stages of a rank keep theirs at the same time": max(by_stage),
        "this frees a microbatch twice, at I and at W; W alone frees it": most(
            row, {"F": 1, "B": -1, "I": -1, "W": -1}
        ),
        "this stops at the first backward; later more can be kept": forwards.index(False),
        "this is what is left at the end of the row; we want the most at any time": 0,
    }


# ---- a schedule of the reader's own ----


def draw_schedule(answer: Any) -> Figure | None:
    """Draw the answer's table for 4 ranks and 8 microbatches, with two of the targets as lines."""
    pp, count = 4, 8
    targets = {"bound, two stages per rank ": _least(pp, count, 2), "1F1B": 3 * (count + pp - 1)}
    return _drawn(answer(pp, count) if callable(answer) else answer, targets)


def _drawn(table: Any, targets: dict[str, float]) -> Figure | None:
    """Draw a table as far as it runs. What is no table, or has an action twice, has no drawing."""
    from labkit.viz.pipeline.played_table import PlayedTable, draw_played  # matplotlib, which a score does without

    rows = _parsed_rows(table)
    actions = [action for row in rows for action in row]
    if isinstance(rows, str) or not actions or len(set(actions)) < len(actions):
        return None
    return draw_played(PlayedTable(rows), targets)


@exercise(
    "12.schedule",
    "Write schedule(pp, microbatches) -> one row of actions per rank, as texts such as '0F0'.",
    draw=draw_schedule,
    ladder=True,
)
def schedule(answer: Any) -> Iterator[Outcome]:
    """Judge five targets at p = 4, m = 8, each harder than the one before; then the last two at other sizes, m >= p.

    A rank's whole share of the model costs F = I = W = 1 per microbatch (B = 2). Stages of one rank divide the share
    equally, so an answer with several stages per rank meets the same targets. Each target is a closed form:

    One stage per rank: the last rank starts after p - 1 forwards and has 3m units of work. The least is 3m + p - 1.

    Two stages per rank: p ranks share 2p stages, so some rank has no stage before stage p - 1. This rank starts after
    p - 1 forwards of half a unit. The least is 3m + (p - 1)/2.

    A target at another size is scored only if the answer meets the same target at p = 4, m = 8.
    """
    pp, count = 4, 8
    found = _attempt(answer, pp, count)
    said: set[str] = set()
    yield _runs(found, pp, count)
    whole, right_after = 3 * (count + pp - 1), 3 * count + 2 * (pp - 1)
    least = {stages: _least(pp, count, stages) for stages in (1, 2)}
    ladder = (
        (whole, "1F1B: 3(m + p - 1) and p"),
        (right_after - 1, "better than each W right after its I: 3m + 2(p - 1)"),
        (least[1], "the least with one stage per rank, 3m + p - 1, in 1F1B's memory"),
        (least[2], "the least with two stages per rank, 3m + (p - 1)/2, in the same"),
    )
    for steps, why in ladder:
        yield _target(found, pp, count, steps, why, said)
    others = {1: ((2, 4), (6, 6)), 2: ((3, 7), (5, 12))}
    words = {1: "3m + p - 1 and p", 2: "3m + (p - 1)/2 and p"}
    for stages, sizes in others.items():
        known = not _meets(found, least[stages], pp)
        for size in sizes:
            other = _attempt(answer, *size) if isinstance(found, _Judged) else found
            outcome = _target(other, *size, _least(*size, stages), words[stages], said)
            yield replace(outcome, reason=ONLY_FIRST) if known else outcome


def draw_few(answer: Any) -> Figure | None:
    """Draw the answer's table for 4 ranks and 4 microbatches, with ZB-V and the bound as lines."""
    return _drawn(answer(), {"bound ": _least(4, 4, 2), "ZB-V": 15})


@exercise(
    "12.few",
    "Write few() -> the rows of 4 ranks for 4 microbatches, each a list of texts such as '0F0'.",
    draw=draw_few,
)
def few(answer: Any) -> Iterator[Outcome]:
    """Judge the table that has as many microbatches as ranks, where ZB-V and ZB-H1 take 15 steps.

    The bound for two stages per rank is 3m + (p - 1)/2 = 13.5 for p = m = 4.
    """
    pp, said = 4, set[str]()
    found = _attempt((lambda _, __: answer()) if callable(answer) else answer, pp, pp)
    yield _runs(found, pp, pp)
    for steps, why in ((14.5, "better than ZB-V's 15"), (_least(pp, pp, 2), "the bound: 3m + (p - 1)/2")):
        yield _target(found, pp, pp, steps, why, said)


@dataclass(frozen=True)
class _Judged:
    """A table that runs: its timeline in shares of a rank, and the misunderstanding that its rows show."""

    timeline: Timeline
    reading: str

    @property
    def numbers(self) -> str:
        return f"{self.timeline.makespan:g} steps with {max(self.timeline.peak_memory):g} in flight"


def _runs(found: _Judged | str, pp: int, count: int) -> Outcome:
    claim = "a list of rows (lists of texts such as 0F0) that runs"
    return holds(f"pp {pp}, {count} microbatches", claim, lambda: (found, found) if isinstance(found, str) else True)


def _least(pp: int, count: int, stages: int) -> float:
    """Return the least number of steps of any schedule with this many stages per rank."""
    return 3 * count + (pp - 1) / stages


def _meets(found: _Judged | str, steps: float, most: int) -> bool:
    if isinstance(found, str):
        return False
    timeline = found.timeline
    return timeline.makespan <= steps + 1e-9 and max(timeline.peak_memory) <= most + 1e-9


def _target(found: _Judged | str, pp: int, count: int, steps: float, why: str, said: set[str]) -> Outcome:
    """Judge one target; the wait and the misunderstanding behind a time are named only once."""

    def test() -> Finding:
        if isinstance(found, str):
            return found, found
        if _meets(found, steps, pp):
            return True
        reasons = [words for words in (found.reading, _longest_wait(found.timeline)) if words and words not in said]
        said.update(reasons)
        return "; ".join([found.numbers, *reasons])

    return holds(f"pp {pp}, {count} microbatches", f"at most {steps:g} steps with at most {pp} in flight ({why})", test)


def _longest_wait(timeline: Timeline) -> str:
    """Name the longest wait of a rank after its first gradient: its rank, its length, and the action that ends it."""
    longest, words = 1e-9, ""
    for rank in range(timeline.schedule.pp):
        row = timeline.schedule.span(rank)
        waits = timeline.start[row][1:] - timeline.end[row][:-1]
        actions = timeline.schedule.actions(rank)
        first = next((place for place, action in enumerate(actions) if action.kind in "BI"), len(waits))
        waits[:first] = 0.0  # a rank has no W yet that could fill these
        if len(waits) and waits.max() > longest:
            longest, position = waits.max(), int(waits.argmax()) + 1
            action = actions[position]
            unit = "step" if longest == 1 else "steps"
            when = f"rank {rank} idles {longest:g} {unit} before {action}, position {position}"
            words = f"the longest wait after a first gradient: {when}"
    return words


def _attempt(answer: Any, pp: int, count: int) -> _Judged | str:
    """Verify and time the answer; return what was found, or the error as words of a sentence."""
    try:
        rows = _parsed_rows(answer(pp, count) if callable(answer) else answer)
        if isinstance(rows, str):
            return rows
        if len(rows) != pp:
            return f"{len(rows)} rows for {pp} ranks"
        stages = 1 + max((action.stage for row in rows for action in row), default=0)
        own = Schedule("the answer", stages, count, rows)
        if own.forward_only:
            return "no backward in any row"
        if missing := _missing(rows, stages, count):
            return missing
        try:
            verify(own)
        except ScheduleError as problem:
            reading = _reading_of_refused(rows)
            return without_grid(str(problem)) + (f": {reading}" if reading else "")
        return _Judged(_timed(own), _reading(rows, own))
    except ScheduleError as problem:
        return without_grid(str(problem))
    except (Exception, SystemExit) as error:
        return raised(error)


def _missing(rows: list[list[Action]], stages: int, count: int) -> str:
    """Name actions that are in no row; empty if there are none."""
    kinds = "FIW" if any(action.kind in "IW" for row in rows for action in row) else "FB"
    whole = {(action.stage, action.microbatch) for row in rows for action in row if action.kind == "B"}
    found = {action for row in rows for action in row}
    absent = [
        action
        for action in (Action(s, kind, i) for s in range(stages) for kind in kinds for i in range(count))
        if action not in found and not (action.kind in "IW" and (action.stage, action.microbatch) in whole)
    ]
    if not absent:
        return ""
    number = "1 action is" if len(absent) == 1 else f"{len(absent)} actions are"
    return f"{number} missing, first {absent[0]}: each stage runs F, and B or both I and W, of each microbatch"


def _reading_of_refused(rows: list[list[Action]]) -> str:
    """Name the misunderstanding behind rows that wait for each other; empty if they show none."""
    ahead = [next((i for i, action in enumerate(row) if action.kind != "F"), len(row)) for row in rows]
    longer = next((rank for rank in range(1, len(rows)) if ahead[rank] > ahead[rank - 1]), None)
    if longer is None or any(len({action.stage for action in row}) > 1 for row in rows):
        return ""
    return (
        f"rank {longer} runs {ahead[longer]} forwards before its first backward, rank {longer - 1} only "
        f"{ahead[longer - 1]}; no rank may warm up longer than the one before it"
    )


def _reading(rows: list[list[Action]], own: Schedule) -> str:
    """Name the misunderstanding that rows which run show; empty if they show none."""
    forwards_first = all(row[i].kind == "F" or row[i + 1].kind != "F" for row in rows for i in range(len(row) - 1))
    if forwards_first and own.num_microbatches > own.pp:
        return "all forwards come before the first backward, so every rank keeps the whole batch"
    split = [(row, i) for row in rows for i, action in enumerate(row) if action.kind == "I"]
    if split and all(_is_weight_of(row[i + 1 : i + 2], row[i]) for row, i in split):
        return "each W comes right after its I, where it holds up the next I; a W can fill a later wait"
    forwards_and_inputs = [sum(action.kind != "W" for action in row) for row in rows]
    if split and all(action.kind != "W" for row, n in zip(rows, forwards_and_inputs) for action in row[:n]):
        return "every W is at the end of its row, so activations pile up, and waits before the end stay empty"
    if own.num_stages == own.pp and split:
        return f"with one stage per rank no table takes fewer than {_least(own.pp, own.num_microbatches, 1):g} steps"
    return ""


def _is_weight_of(after: list[Action], action: Action) -> bool:
    return after == [Action(action.stage, "W", action.microbatch)]


def _parsed_rows(rows: Any) -> list[list[Action]] | str:
    """Parse an answer; return its rows of actions, or words for a value that is no list of rows."""
    if isinstance(rows, Schedule):
        return "a Schedule: give its rows, [[str(action) for action in s.actions(rank)] for rank in range(s.pp)]"
    if not isinstance(rows, (list, tuple)):
        return f"{type(rows).__name__} {shown(rows)}, which is not a list of rows" if rows is not None else "None"
    for rank, row in enumerate(rows):
        if not isinstance(row, (list, tuple)):
            return f"{shown(row)} as the row of rank {rank}, which is not a list of texts"
    return [[Action.parse(str(cell)) for cell in row] for row in rows]


def _timed(own: Schedule) -> Timeline:
    held = [len(own.stages_of(rank)) for rank in range(own.pp)]
    if len(set(held)) != 1:
        raise ValueError(f"{held} stages by rank: all ranks must hold equally many, or their times cannot be compared")
    share = 1 / held[0]
    return simulate(own, Costs(forward=share, input_grad=share, weight_grad=share, activation=share))


# ---- messages that meet the wrong receive ----

_CROSSINGS: dict[str, Rows] = {
    "two ranks, gradients in another order": [_row("0F0 0F1 0B0 0B1"), _row("1F0 1F1 1B1 1B0")],
    "1F1B, 2 ranks, 3 microbatches": _texts(one_f_one_b(2, 3)),
    "a forward that overtakes": [
        _row("0F0 0F1 0B1 0B0"),
        _row("1F1 1F0 1B0 1B1"),
        _row("2F0 2F1 2B0 2B1"),
    ],
    "a split backward": [_row("0F0 0F1 0I0 0W0 0I1 0W1"), _row("1F0 1F1 1I1 1W1 1I0 1W0")],
    "a V whose forwards and gradients travel between the same two ranks": [
        _row("0F0 0F1 3F0 3B0 0B0 3F1 3B1 0B1"),
        _row("1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1"),
    ],
    "a V that turns in another order": [
        _row("0F0 0F1 3F1 3B1 3F0 3B0 0B1 0B0"),
        _row("1F0 1F1 2F1 2F0 2B1 1B1 2B0 1B0"),
    ],
    "ZB-H1, 3 ranks, 4 microbatches": _texts(zero_bubble_h1(3, 4)),
    "ZB-V, 2 ranks, 4 microbatches": _texts(zbv(2, 4)),
}
Pairs = list[tuple[str, str]]


@exercise(
    "12.crossed",
    "Write crossed(rows) -> the (sender, receiver) actions of every message that meets the receive of another one.",
)
def crossed(answer: Any) -> Iterator[Outcome]:
    """Judge eight tables, two of them with a message that stays on its rank."""
    diagnosis = Diagnosis(_same_pairs)
    for given, rows in _CROSSINGS.items():
        copied = [list(row) for row in rows]
        outcome = diagnosis.outcome(given, crossed_pairs(rows), lambda r=copied: answer(r), _misread_crossed(rows))
        yield outcome if outcome.passed else replace(outcome, got=f"{outcome.got} ({_consequence(rows)})")


def _same_pairs(value: Any, other: Any) -> bool:
    """Return True for the same pairs in any order."""
    if not isinstance(value, (list, tuple, set)):
        return False
    return sorted(plain(list(map(list, value)))) == sorted(plain(list(map(list, other))))


def _receiver(action: Action, rank_of: dict[str, int], last: int) -> str | None:
    """Return the action that reads the result of `action` on another stage; None if there is none."""
    if action.kind == "F" and action.stage < last:
        return f"{action.stage + 1}F{action.microbatch}"
    if action.kind in "BI" and action.stage > 0:
        texts = (f"{action.stage - 1}{kind}{action.microbatch}" for kind in "BI")
        return next((text for text in texts if text in rank_of), None)
    return None


def crossed_pairs(
    rows: Rows,
    channel: Callable[[int, int, Action], Any] = lambda a, b, action: (a, b),
    *,
    own: bool = False,
    ascending: bool = False,
) -> Pairs:
    """Return pairs of actions whose message and receive meet although they do not belong together.

    channel: the key of the messages whose order pairs them. own: count a message to the same rank, too.
    ascending: receives are posted in the order of their microbatches.
    """
    rank_of = {text: rank for rank, row in enumerate(rows) for text in row}
    last = max(Action.parse(text).stage for text in rank_of)
    sent: dict[Any, list[str]] = defaultdict(list)
    reader: dict[str, str] = {}
    received: dict[Any, list[tuple[int, int, str]]] = defaultdict(list)
    for a, row in enumerate(rows):
        for text in row:
            action = Action.parse(text)
            wanted = _receiver(action, rank_of, last)
            if wanted is None or (rank_of[wanted] == a and not own):
                continue
            key, b = channel(a, rank_of[wanted], action), rank_of[wanted]
            sent[key].append(text)
            reader[text] = wanted
            place = Action.parse(wanted).microbatch if ascending else rows[b].index(wanted)
            received[key].append((place, rows[b].index(wanted), wanted))
    met = [(made, used) for key in sent for made, (_, _, used) in zip(sent[key], sorted(received[key]))]
    return [(made, used) for made, used in met if reader[made] != used]


def _misread_crossed(rows: Rows) -> Misreadings:
    right = crossed_pairs(rows)
    return {
        "this pairs forwards and gradients separately; between two ranks one order pairs all messages": crossed_pairs(
            rows, lambda a, b, action: (a, b, action.kind == "F")
        ),
        "this finds no crossing; the k-th message from a rank to another meets its k-th receive": [],
        "this counts results that stay on their rank; they are not sent": crossed_pairs(rows, own=True),
        "this receives in the order of microbatches; a rank receives in the order of its row": crossed_pairs(
            rows, ascending=True
        ),
        "these pairs are (receiver, sender); the action that sends comes first": [(used, made) for made, used in right],
        "this stops at the first crossing; we want all of them": right[:1],
    }


def _consequence(rows: Rows) -> str:
    pairs = crossed_pairs(rows)
    if not pairs:
        return "here every message meets its own receive"
    made, used = pairs[0]
    return f"here {used} computes with the message of {made}, and no rank notices"
