"""Exercises and bets of chapter 10: how many microbatches are enough, a warm-up for late messages, a row with messages.

Wrong answers are compared with those of known misunderstandings. The score names the one that gives the same answer, or
else the first place that differs, with its consequence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from labkit.check.bets import ask
from labkit.check.scoring import (
    Finding,
    Misreadings,
    Outcome,
    asked,
    exercise,
    holds,
    plain,
    shown,
)
from labkit.schedules.builders import one_f_one_b
from labkit.schedules.ir import Action, Schedule, ScheduleError
from labkit.schedules.simulator import Costs, simulate

if TYPE_CHECKING:
    from labkit.viz.figure import Figure

# ---- the bets ----

ask(
    "10.gigabytes",
    "GPT-3 on 512 H100s, in 8 stages with 96 microbatches. With all forwards first the fullest GPU needs 689 GB, of "
    "which 21 are weights, gradients and optimizer. How many GB does it need with 1F1B, by the plan?",
    misread=lambda: {
        "That divides everything by 12. Weights, gradients and optimizer stay as they are.": 57.4,
        "That divides by the 8 stages. What counts is microbatches in flight: at most 8 instead of 96.": 86.1,
        "That is the activations of 8 microbatches alone. Weights, gradients and optimizer come on top.": 55.7,
        "That is a single microbatch. 1F1B's first rank keeps one for each stage, 8.": 28.0,
        "The order doesn't change what a microbatch needs. But it does change how many are kept at once.": 689.0,
    },
    unit="GB",
    because="A rank keeps at most 8 microbatches in flight instead of 96, and their activations shrink with that. The "
    "21 GB of weights, gradients and optimizer stay.",
)
ask(
    "10.bubble",
    "1F1B starts its backwards as early as it can, GPipe only after all forwards. How long does a step take under "
    "1F1B, compared with GPipe, if messages take no time?",
    choices={
        "shorter": "Backwards start earlier on the last rank. But a step ends with rank 0's last backward, and that "
        "one waits for the same chain: the last rank's work, without a pause, and then p - 1 backwards.",
        "the same": "The last rank starts after p - 1 forwards, never pauses, and after it p - 1 backwards follow. "
        "That is true for both orders.",
        "longer": "Switching between F and B costs nothing here. The last rank never pauses in either order.",
    },
)
ask(
    "10.hang",
    "The same loop runs both tables: receive, compute, send, and each send waits until the other side receives. "
    "Which of the two tables comes to its end?",
    choices={
        "both": "A table that can run on paper can still hang, because a send that waits is a step of the row as well. "
        "(With a single microbatch nothing ever meets, and both do.)",
        "only GPipe": "In GPipe all messages of a phase go the same way, so somebody at the end of the line always "
        "receives. In 1F1B an activation meets a gradient: both ranks send, and nobody receives.",
        "only 1F1B": "It's the other way round: 1F1B mixes the two directions, and GPipe doesn't.",
        "neither": "In GPipe all messages of a phase go the same way, so the last rank receives, and then the one "
        "before it, and so on.",
    },
)
ask(
    "10.four",
    "The ninth function sends an activation and a gradient in one call. On which ranks of a pipeline with one stage "
    "per rank does your program need it?",
    choices={
        "on all ranks": "The first rank has nobody to send a gradient to, and the last one nobody for an activation.",
        "on the middle ranks": "They send both kinds, but never at the same moment: between a forward and a backward "
        "the result of only one of them is waiting.",
        "nowhere": "A rank sends what it has just computed, and with one stage that is either an activation or a "
        "gradient.",
    },
)

# ---- a warm-up for late messages ----

_LATE = (
    (4, 0, 32, 5.0), (2, 0, 32, 0.5), (4, 0, 32, 0.0), (4, 0, 32, 0.5), (4, 1, 32, 1.5), (4, 0, 32, 2.0),
    (3, 1, 32, 2.0), (4, 3, 32, 1.0), (4, 0, 4, 1.0), (8, 0, 64, 1.0),
)  # fmt: skip
"""(pp, rank, microbatches, latency), for F = 1 and B = 2; in one there are fewer microbatches than stages need.

The first comes first because each misunderstanding gives another number there."""
_PAIR = 3
"""Time of a forward and a backward."""


def draw_warm_up(answer: Any) -> Figure | None:
    """Draw the answer for 4 ranks, 12 microbatches and messages of 1, above the aim; None for what cannot run."""
    from labkit.viz.pipeline.timeline import compare_timelines  # matplotlib, which a score does without

    yours = [plain(answer(4, rank, 12, 1.0)) for rank in range(4)]
    if not all(isinstance(each, int) and 0 <= each <= 12 for each in yours):
        return None
    costs, found = Costs(forward=[1.0] * 4, backward=[2.0] * 4, latency=1.0), []
    for name, counts in ((f"yours {yours}", yours), ("the aim", [_warm_up(4, rank, 12, 1.0) for rank in range(4)])):
        rows = [[Action.parse(text) for text in _row(rank, count, 12)] for rank, count in enumerate(counts)]
        try:
            found.append(simulate(Schedule(name, 4, 12, rows), costs))
        except ScheduleError:
            return None
    return compare_timelines(found, unit="forwards")


def _row(rank: int, warm_up: int, count: int) -> list[str]:
    """Return `wF (m-w)(FB) wB` as texts."""
    pairs = [f"{rank}{kind}{m}" for i in range(count - warm_up) for kind, m in (("F", warm_up + i), ("B", i))]
    return [f"{rank}F{m}" for m in range(warm_up)] + pairs + [f"{rank}B{m}" for m in range(count - warm_up, count)]


def _warm_up(pp: int, rank: int, count: int, latency: float) -> int:
    stages = pp - 1 - rank
    return min(count, stages + stages * math.ceil(2 * latency / _PAIR))


@exercise(
    "10.warm_up",
    "Write warm_up(pp, rank, microbatches, latency) -> the fewest forwards before the first pair with which no step of "
    "many microbatches waits for a message.",
    draw=draw_warm_up,
)
def warm_up(answer: Any) -> Iterator[Outcome]:
    """Judge ten ranks of pipelines with two to eight stages."""
    return asked(
        _LATE,
        given="{} stages, rank {}, {} microbatches and messages of {}".format,
        right=_warm_up,
        tried=answer,
        misread=_misread_warm_up,
    )


def _misread_warm_up(pp: int, rank: int, count: int, latency: float) -> Misreadings:
    stages, late = pp - 1 - rank, 2 * latency / _PAIR
    return {
        "this is 1F1B's warm-up: right if messages take no time": min(count, stages),
        "a gradient has to come back, too: a border costs two messages": min(
            count, stages + stages * math.ceil(latency / _PAIR)
        ),
        "each of the stages after this rank adds as much: one border's worth isn't enough": min(
            count, stages + (math.ceil(late) if stages else 0)
        ),
        "a rank has only whole pairs to fill the time with, so every border is rounded up by itself": min(
            count, stages + math.ceil(stages * late)
        ),
        "what is left of a pair is waited for in every round; round up": min(count, stages + stages * math.floor(late)),
        "a warm-up has at most all forwards that there are": stages + stages * math.ceil(late),
        "one forward fewer is enough": min(count, stages + stages * math.ceil(late) + 1),
        "all forwards first is GPipe; far fewer fill the time": count,
    }


# ---- how many microbatches are enough ----

_SHARES = ((5, 0.25), (4, 0.5), (8, 0.125), (8, 0.3), (2, 0.4), (4, 0.9), (1, 0.25))
"""(stages, largest share of the step that may be bubble). Three shares are met exactly; one stage has no bubble at all.

The first pair comes first because each misunderstanding of an exact share gives another number there."""


@exercise("10.enough", "Write enough(p, share) -> the fewest microbatches with which at most `share` is bubble.")
def enough(answer: Any) -> Iterator[Outcome]:
    """Judge seven pipelines, of one to eight stages."""
    return asked(
        _SHARES,
        given="{} stages and a share of {}".format,
        right=lambda p, share: max(1, math.ceil((p - 1) / share) - (p - 1)),
        tried=answer,
        misread=_misread_shares,
    )


def _misread_shares(p: int, share: float) -> Misreadings:
    least = (p - 1) * (1 - share) / share
    return {
        "a step has at least one microbatch": 0,
        "this compares the bubble with the work, (p - 1)/m; the exercise asks for its share of the step": max(
            1, math.ceil((p - 1) / share)
        ),
        "this rounds down, and then the bubble is larger than the share": math.floor(least),
        "p - 1 stages wait for the first microbatch, not p": max(1, math.ceil(p * (1 - share) / share)),
        "the bubble may be exactly the share; one fewer is enough": math.floor(least) + 1,
        "this compares the work, m/(m + p - 1), with the share; the exercise asks for the bubble": max(
            1, math.ceil((p - 1) * share / (1 - share))
        ),
        "this many would do on a larger pipeline, too; fewer are enough here": math.ceil(p / share),
    }


# ---- a row with its messages ----


def _first_difference(row: Sequence[str], right: Sequence[str]) -> str:
    """Name the first position at which a row differs, and what follows from that."""
    place = next((i for i, (a, b) in enumerate(zip(row, right)) if a != b), min(len(row), len(right)))
    if place == len(row):
        return f"the row ends where {right[place]} should follow"
    if place == len(right):
        return f"{row[place]} at position {place} is one action too many"
    given, wanted = row[place], right[place]
    if "F" in given and "B" in wanted:
        return f"position {place} has {given} instead of {wanted}, so the rank keeps one microbatch more"
    if "B" in given and "F" in wanted:
        return f"position {place} has {given} instead of {wanted}, so the rank waits for a gradient and could work"
    return f"position {place} has {given} instead of {wanted}: microbatches come in order"


_PIPELINES = ((2, 4), (4, 6), (4, 8), (3, 1), (4, 2), (1, 3))
"""(pp, microbatches)."""
_STEP = re.compile(r"(?:(send|recv) )?([FB])(\d+)")

Op = tuple[str, str, int]
"""(`send`, `recv` or empty for an action; F or B; microbatch)."""
Post = list[Op]
"""Messages that start together, or a single action."""


@exercise(
    "10.messages",
    "Write program(pp, rank, microbatches) -> the row of that rank with its sends and receives, as texts.",
)
def messages(answer: Any) -> Iterator[Outcome]:
    """Judge six pipelines: the programs of all ranks are run together, and every send waits for its receive."""
    for pp, count in _PIPELINES:
        yield holds(
            f"{pp} stages and {count} microbatches",
            "programs that run to their end, in the order of 1F1B",
            lambda p=pp, m=count: _run_programs(answer, p, m),
        )


def _run_programs(answer: Any, pp: int, count: int) -> Finding:
    """Return the kind of the first fault, and its sentence; both are empty if there is none."""
    programs: list[list[Post]] = []
    for rank in range(pp):
        found = _parsed_program(answer(pp, rank, count), rank)
        kind, words = ("form", found) if isinstance(found, str) else _fault_of_one(found, pp, rank, count)
        if kind:
            return kind, words
        programs.append(found)  # type: ignore[arg-type]
    return _meet(programs)


def _parsed_program(given: Any, rank: int) -> list[Post] | str:
    form = "a program is a list of texts such as 'F0', 'recv F0' and 'send F1 + recv B0'"
    if isinstance(given, str) or not isinstance(given, Iterable):
        return f"{shown(given)} for rank {rank}: {form}"
    posts: list[Post] = []
    for text in given:
        found = [_STEP.fullmatch(part.strip()) for part in str(text).split("+")]
        ops = [(each[1] or "", each[2], int(each[3])) for each in found if each]
        if len(ops) < len(found) or (len(ops) > 1 and any(not way for way, _, _ in ops)):
            return f"{shown(text)} on rank {rank}: {form}"
        posts.append(ops)
    return posts


def _text(op: Op) -> str:
    way, kind, microbatch = op
    return f"{way} {kind}{microbatch}".strip()


def _post(post: Post) -> str:
    return " + ".join(map(_text, post))


def _peer(op: Op, rank: int) -> int:
    """Return the rank at the other end of a message: the next one for activations, the one before for gradients."""
    way, kind, _ = op
    return rank + (1 if (way == "send") == (kind == "F") else -1)


def _fault_of_one(program: Sequence[Post], pp: int, rank: int, count: int) -> tuple[str, str]:
    """Return (kind, words) of the first fault of a program by itself; both are empty if there is none."""
    right = [(action.kind, action.microbatch) for action in one_f_one_b(pp, count).actions(rank)]
    row = [(kind, m) for ((way, kind, m), *_) in program if not way]
    if row != right:
        texts, rights = ([f"{kind}{m}" for kind, m in each] for each in (row, right))
        return "row", f"other actions than 1F1B's on rank {rank}: {_first_difference(texts, rights)}"
    ran: set[tuple[str, int]] = set()
    came: set[tuple[str, int]] = set()
    sent: set[tuple[str, int]] = set()
    for post in program:
        ways = [way for way, _, _ in post]
        if max(ways.count("send"), ways.count("recv")) > 1:
            words = "a stage has one result to send at a time, so join at most one send and one receive"
            return "joined", f"'{_post(post)}' on rank {rank} needs a function that isn't there: {words}"
        for op in post:
            way, kind, m = op
            at_end = not 0 <= _peer(op, rank) < pp
            if way and at_end:
                return "ends", f"'{_text(op)}' on rank {rank}, which has no neighbour on that side"
            if way == "send" and (kind, m) not in ran:
                return "early", f"rank {rank} sends {kind}{m} before it has run {kind}{m}"
            if way == "send" and (kind, m) in sent:
                return "twice", f"rank {rank} sends {kind}{m} twice; a message is sent once"
            reads = 0 <= _peer(("recv", kind, m), rank) < pp
            if not way and reads and (kind, m) not in came:
                late = f"rank {rank} runs {kind}{m} before it has received the message of a neighbour"
                return "unread", f"{late}: 'recv {kind}{m}' must come first"
            {"": ran, "send": sent, "recv": came}[way].add((kind, m))
    owed = [f"{kind}{m}" for kind, m in right if 0 <= _peer(("send", kind, m), rank) < pp and (kind, m) not in sent]
    if owed:
        return "owed", f"rank {rank} never sends {owed[0]}, and a neighbour hangs waiting for it"
    return "", ""


def _meet(programs: Sequence[Sequence[Post]]) -> tuple[str, str]:
    """Let sends meet receives in the order of posting. Return (kind, words) of a stall; both empty if there is none."""
    left = [[list(post) for post in program] for program in programs]
    moved = True
    while moved:
        moved = False
        for program in left:
            while program and (not program[0] or not program[0][0][0]):
                program.pop(0)
                moved = True
        for rank, program in enumerate(left):
            for op in [each for each in (program[0] if program else []) if each[0] == "send"]:
                peer = _peer(op, rank)
                waiting = [o for o in (left[peer][0] if left[peer] else []) if o[:2] == ("recv", op[1])]
                if waiting and waiting[0][2] != op[2]:
                    arrives = f"messages carry no name, so {op[1]}{op[2]} of rank {rank} arrives on rank {peer}"
                    return "crossed", f"{arrives} as {op[1]}{waiting[0][2]}"
                if waiting:
                    program[0].remove(op)
                    left[peer][0].remove(waiting[0])
                    moved = True
    return _stall(programs, left)


def _stall(programs: Sequence[Sequence[Post]], left: Sequence[Sequence[Post]]) -> tuple[str, str]:
    """Name the circle in which ranks wait for each other, beginning with the first rank that stalls."""
    rank = next((r for r, program in enumerate(left) if program), None)
    if rank is None:
        return "", ""
    circle: list[int] = []
    while rank not in circle and left[rank]:
        circle.append(rank)
        rank = _peer(left[rank][0][0], rank)
    if rank not in circle:
        op = left[circle[-1]][0][0]
        return "over", f"rank {circle[-1]} stalls at '{_text(op)}': rank {rank} has ended without that message"
    circle = circle[circle.index(rank) :]
    stood = [programs[r][len(programs[r]) - len(left[r])] for r in circle]
    stalls = [f"rank {r} stalls at '{_post(post)}'" for r, post in zip(circle, stood)]
    if all(len(post) == 1 and post[0][0] == "send" for post in stood):
        return "sends", f"{' and '.join(stalls)}: each waits until the other receives; send and receive in one post"
    for post in stood:
        back = next((m for way, kind, m in post if kind == "B" and way == "recv" and ("send", "F", m) in post), None)
        if back is not None:
            late = f"B{back} does not come back at once; receive it right before its backward"
            return "at once", f"{' and '.join(stalls)}: {late}"
    return "circle", f"{' and '.join(stalls)}: they wait for each other, for messages that are made later"
