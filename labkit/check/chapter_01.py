"""Exercises and bets of chapter 01: a ring the other way round, an order that does not hang, seconds.

Wrong answers are compared with those of known misunderstandings, and the score names the one that fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from labkit.check.bets import ask
from labkit.check.scoring import ONLY_FIRST, Diagnosis, Outcome, close, exercise, holds

if TYPE_CHECKING:
    from labkit.viz.figure import Figure

# ---- bets ----

ask(
    "01.bytes",
    "512 GPUs train a model of 8 billion parameters. Each has 16 GB of gradients, and all need the sum. How much must "
    "a GPU send, if all share the work as well as they can?",
    choices={
        "about 63 MB": "That would be two chunks of 16 GB / 512. Each GPU sends a chunk in each of 2 x 511 steps.",
        "about 32 GB": "A GPU sends nearly all of its gradients once, so that the sums can be made, and nearly as much "
        "again, so that all get the sums. The number of GPUs hardly matters.",
        "about 8 TB": "That is everything to everybody, 511 times 16 GB. Numbers that are added up on the way need "
        "not travel any further.",
    },
)
ask(
    "01.halves",
    "After a reduce-scatter each rank has one sum. What has to follow, so that the two together are an all-reduce?",
    choices={
        "a broadcast": "It sends what rank 0 has, and rank 0 has one sum of them.",
        "an all-to-all": "It needs a chunk for each rank and gives each rank another one. Here a rank has one sum, and "
        "all ranks need it.",
        "an all-gather": "Each rank brings the one sum that it has, and gets everybody's.",
    },
)
ask(
    "01.tenth",
    "At one size the two terms are equal. For a tensor of a tenth of that size, how many times faster is the ring?",
    misread=lambda: {
        "Only its bytes are a tenth. Each step still has its whole latency.": 10,
        "The latency is half of the time at that size, and stays. But the other half does not vanish, a tenth is "
        "left.": 2,
        "Half of the time were bytes, and of these a tenth is left.": 1,
    },
    unit="times",
    because="Count in units of the latency term: 1 + 1 becomes 1 + 0.1, and 2 / 1.1 is 1.8. That's our model; the "
    "picture has the measured times.",
)
ask(
    "01.doubling",
    "64 GPUs on eight nodes add up 64 kB, over InfiniBand: alpha is 9.6 us and B 47.5 GB/s. Which of the two is faster "
    "by our formula?",
    choices={
        "the ring": "It sends the fewest bytes, but in 126 steps, and each of them has a latency.",
        "doubling": "It sends three times the bytes of the ring, but in 6 steps instead of 126, and at 64 kB steps are "
        "what costs.",
    },
)
ask(
    "01.once",
    "Each of two ranks has the loss 31. If w on rank 0 grows by 1, both see 33, so the slope is 2. An all-reduce ran "
    "forward, and one runs backward. Which gradient does w get?",
    choices={
        "1": "An all-reduce adds; nothing here divides by the number of ranks.",
        "2": "That would be the slope of the loss. But the all-reduce adds up what came back on both ranks, and each "
        "sends the whole slope.",
        "4": "The all-reduce adds the 2 that comes back on rank 0 and the 2 that comes back on rank 1: the slope of "
        "31 + 31, where you want the slope of 31.",
    },
)


# ---- a ring to the previous rank ----

Rule = Callable[[int, int, int], tuple[int, int]]
"""(rank, step, g) -> (chunk to send, chunk to receive into), of g ranks."""


def _right_rule(rank: int, step: int, ranks: int) -> tuple[int, int]:
    return (rank + step + 1) % ranks, (rank + step + 2) % ranks


_RULES: dict[str, Rule] = {
    "this is the rule of the ring to the next rank; the direction is reversed, and so is the sign of the step": (
        lambda r, s, g: ((r - s - 1) % g, (r - s - 2) % g)
    ),
    "the first half must end with sum r on rank r; begin one chunk further": (
        lambda r, s, g: ((r + s) % g, (r + s + 1) % g)
    ),
    "every step sends the same chunk; a rank passes on the chunk that it received in the step before": (
        lambda r, s, g: ((r + 1) % g, (r + 2) % g)
    ),
    "the chunk that arrives is the chunk that rank r + 1 sends, one further than its own": (
        lambda r, s, g: ((r + s + 1) % g, (r + s) % g)
    ),
    "the second half begins anew; the step number runs on, so that it begins with the complete sum r": (
        lambda r, s, g: _right_rule(r, s % max(1, g - 1), g)
    ),
}


def draw_ring(answer: Any) -> Figure:
    """Draw the first four steps of the answer's ring over four ranks; a box names the ranks that are in a chunk."""
    from labkit.comm.motion import Held, Motion, Move  # torch and matplotlib, which a score does without
    from labkit.comm.motion_clock import movement
    from labkit.viz.motion import motion_frames

    ranks = 4
    held = [[[rank] for _ in range(ranks)] for rank in range(ranks)]  # by rank and chunk: ranks whose shares are in
    motions = [Motion() for _ in range(ranks)]

    def tell(title: str) -> None:
        for motion, chunks in zip(motions, held):
            slots = {f"chunk {c}": Held("+".join(map(str, who)), who) for c, who in enumerate(chunks)}
            motion.holds(slots, title)

    tell("start")
    for step in range(2 * ranks - 2):
        pairs = [_pair(answer(rank, step, ranks), rank, step, ranks) for rank in range(ranks)]
        before = [list(chunks) for chunks in held]
        for rank, (out, into) in enumerate(pairs):
            after_it, before_it = (rank + 1) % ranks, (rank - 1) % ranks
            arriving = before[after_it][pairs[after_it][0]]
            held[rank][into] = sorted(before[rank][into] + arriving) if step < ranks - 1 else arriving
            for is_sent, peer, chunk in ((True, before_it, out), (False, after_it, into)):
                motions[rank].entries.append(Move(is_sent, "message", "ring", peer, 1, (f"chunk {chunk}",)))
        tell("")
    return motion_frames(movement(motions), what="Your ring")


@exercise(
    "01.ring",
    "Write rule(rank, step, g) -> (chunk to send, chunk to receive) in a ring of g ranks to the previous rank.",
    draw=draw_ring,
)
def ring(answer: Any) -> Iterator[Outcome]:
    """Judge rings of two to eight ranks, simulated step by step; a failure names the first step that goes wrong."""
    for ranks in (4, 2, 3, 5, 8):
        outcome = holds(
            f"a ring of {ranks} ranks",
            f"after step {ranks - 2} sum r on rank r, and after step {2 * ranks - 3} all sums on all ranks",
            lambda g=ranks: _run_ring(answer, g),
        )
        yield replace(outcome, reason=ONLY_FIRST)


class _ProblemError(Exception):
    """The first step of a ring that goes wrong, as a sentence."""


def _run_ring(rule: Rule, ranks: int) -> bool | str:
    try:
        _pass_round(rule, ranks)
    except _ProblemError as problem:
        places = [(rank, step) for rank in range(ranks) for step in range(2 * ranks - 2)]
        given = [rule(rank, step, ranks) for rank, step in places]
        fitting = [words for words, wrong in _RULES.items() if given == [wrong(*place, ranks) for place in places]]
        return f"{problem}: {fitting[0]}" if fitting else str(problem)
    return True


def _pass_round(rule: Rule, ranks: int) -> None:
    """Pass chunks to the previous rank by the rule. Raises _ProblemError at the first thing that goes wrong."""
    held = [[[rank] for _ in range(ranks)] for rank in range(ranks)]  # by rank and chunk: ranks whose shares are in
    for step in range(2 * ranks - 2):
        pairs = [_pair(rule(rank, step, ranks), rank, step, ranks) for rank in range(ranks)]
        before = [[list(shares) for shares in chunks] for chunks in held]
        for rank, (_, into) in enumerate(pairs):
            sender = (rank + 1) % ranks
            sent = pairs[sender][0]
            where = f"at step {step} rank {sender} sends chunk {sent}"
            if sent != into:
                raise _ProblemError(f"{where}, which rank {rank} takes for its chunk {into}")
            held[rank][into] = _received(where, held[rank][into], before[sender][sent], step < ranks - 1, rank, ranks)
        if step == ranks - 2:
            _check_own_sums(held, step)
    for rank, chunks in enumerate(held):
        for chunk, shares in enumerate(chunks):
            if len(shares) < ranks:
                raise _ProblemError(f"at the end rank {rank} has no sum of chunk {chunk}")


def _received(where: str, own: list[int], arriving: list[int], adds: bool, rank: int, ranks: int) -> list[int]:
    """Return the shares in a chunk of `rank` after it has received: added in the first half, replaced in the second."""
    if not adds:
        if len(arriving) < ranks:
            raise _ProblemError(f"{where}, which has {len(arriving)} of {ranks} shares, to rank {rank}")
        return arriving
    if twice := sorted(set(own) & set(arriving)):
        raise _ProblemError(f"{where}, and the share of rank {twice[0]} is twice in that chunk of rank {rank}")
    return own + arriving


def _check_own_sums(held: list[list[list[int]]], step: int) -> None:
    """Raise _ProblemError unless each rank has the sum of its own chunk."""
    ranks = len(held)
    for rank, chunks in enumerate(held):
        if len(chunks[rank]) < ranks:
            full = [f"chunk {chunk}" for chunk, shares in enumerate(chunks) if len(shares) == ranks] or ["no chunk"]
            raise _ProblemError(f"after step {step} rank {rank} has the sum of {full[0]}")


def _pair(given: Any, rank: int, step: int, ranks: int) -> tuple[int, int]:
    """Return the two chunk numbers of a rank. Raises _ProblemError for anything else."""
    if not isinstance(given, (tuple, list)) or len(given) != 2 or not all(isinstance(c, int) for c in given):
        raise _ProblemError(f"{given!r} for rank {rank} at step {step}, which is not (chunk to send, chunk to receive)")
    for chunk in given:
        if not 0 <= chunk < ranks:
            raise _ProblemError(
                f"chunk {chunk} for rank {rank} at step {step}; chunks are 0 to {ranks - 1}, so count in a circle (%)"
            )
    return given[0], given[1]


# ---- an order that does not hang ----


@exercise("01.order", "Write order(rank, g) -> ['send', 'recv'] or ['recv', 'send'] for a ring of g ranks that block.")
def order(answer: Any) -> Iterator[Outcome]:
    """Judge rings of two to eight ranks; a failure shows the circle of waiting ranks, or how long a chain takes."""
    for ranks in (4, 2, 3, 5, 8):
        most = 2 + ranks % 2
        outcome = holds(
            f"a ring of {ranks} ranks",
            f"every message arrives, in at most {most} rounds",
            lambda g=ranks, m=most: _run_order([answer(rank, g) for rank in range(g)], m),
        )
        yield replace(outcome, reason=ONLY_FIRST)


def _run_order(orders: Sequence[Any], most: int) -> bool | str:
    ranks = len(orders)
    for rank, own in enumerate(orders):
        if not isinstance(own, (list, tuple)) or sorted(own) != ["recv", "send"]:
            return f"{own!r} for rank {rank}; give 'send' and 'recv', each once"
    done, rounds = [0] * ranks, 0
    while min(done) < 2:
        moving = [rank for rank in range(ranks) if _meets(orders, done, rank)]
        if not moving:
            return _circle(orders, done)
        for rank in moving:
            done[rank] += 1
            done[(rank + 1) % ranks] += 1
        rounds += 1
    if rounds <= most:
        return True
    return f"no hang, but {rounds} rounds: ranks wait in a chain, and only a few messages travel at a time"


def _meets(orders: Sequence[Sequence[str]], done: Sequence[int], rank: int) -> bool:
    """Return True if `rank` now sends and the next rank now receives."""
    after_it = (rank + 1) % len(orders)
    return (
        done[rank] < 2
        and done[after_it] < 2
        and (orders[rank][done[rank]], orders[after_it][done[after_it]]) == ("send", "recv")
    )


def _circle(orders: Sequence[Sequence[str]], done: Sequence[int]) -> str:
    ranks = len(orders)
    sends = [rank for rank in range(ranks) if done[rank] < 2 and orders[rank][done[rank]] == "send"]
    if len(sends) == ranks:
        chain = ", ".join(f"rank {rank} to {(rank + 1) % ranks}" for rank in range(ranks))
        return f"a hang: all send ({chain}), and nobody receives"
    return f"a hang: {ranks - len(sends)} of {ranks} ranks wait for a message that nobody has sent"


# ---- seconds ----

_TRANSFERS = ((4, 100, 10e-6, 1e9), (2, 1_000_000, 10e-6, 1e9), (8, 4_000_000, 20e-6, 2e9), (64, 64_000, 5e-6, 25e9))
"""(ranks, bytes, seconds before each message, bytes per second)."""


@exercise("01.seconds", "Write seconds(g, size, latency, bandwidth) -> (of a ring, of doubling), in seconds.")
def seconds(answer: Any) -> Iterator[Outcome]:
    """Judge both times of four all-reduces, small and large; each time is a case of its own."""
    diagnosis = Diagnosis(close(rtol=1e-4, atol=1e-3))
    for ranks, size, latency, bandwidth in _TRANSFERS:
        given = f"{ranks} ranks, {size:,} bytes, {1e6 * latency:g} us before a message, {bandwidth / 1e9:g} GB/s, us of"
        for place, (name, times) in enumerate((("the ring", _ring_times), ("doubling", _doubling_times))):
            right, misreadings = times(ranks, size, latency, bandwidth)
            outcome = diagnosis.outcome(
                f"{given} {name}",
                _us(right),
                lambda p=place, c=(ranks, size, latency, bandwidth): _us(_two(answer(*c))[p]),
                {words: _us(wrong) for words, wrong in misreadings.items()},
            )
            yield replace(outcome, reason=name)  # the score shows one mistake in only one sentence


def _two(value: Any) -> Any:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"the answer is {value!r}; return (seconds of the ring, seconds of doubling)")
    return value


def _us(value: Any) -> float:
    return round(1e6 * float(value), 4)


Times = tuple[float, dict[str, float]]
"""The right seconds, and those of misunderstandings."""


def _ring_times(g: int, size: float, latency: float, bandwidth: float) -> Times:
    step, whole = latency + size / g / bandwidth, latency + size / bandwidth
    return 2 * (g - 1) * step, {
        "this is one half; a ring has a reduce-scatter and an all-gather, of g - 1 steps each": (g - 1) * step,
        "each half has g - 1 steps, not g: a rank's own chunk need not travel": 2 * g * step,
        "this is one message; the ring sends 2 (g - 1) of them, one after the other": whole,
        "each step sends one chunk of size / g bytes, not the whole tensor": 2 * (g - 1) * whole,
        "a smaller message has the same latency; only its bytes are divided by g": 2 * (g - 1) / g * whole,
        "the latency counts in each of the 2 (g - 1) steps": latency + 2 * (g - 1) * size / g / bandwidth,
        "the latency is missing": 2 * (g - 1) * size / g / bandwidth,
    }


def _doubling_times(g: int, size: float, latency: float, bandwidth: float) -> Times:
    steps, whole = math.log2(g), latency + size / bandwidth
    return steps * whole, {
        "this is one message; doubling takes log2 g steps, one after the other": whole,
        "each step doubles the number of shares in a sum, so there are log2 g steps": (g - 1) * whole,
        "two ranks exchange the whole tensor in each step, not a chunk": steps * (latency + size / g / bandwidth),
        "both directions of an exchange are used at once, and no second half follows": 2 * steps * whole,
        "the latency counts in each step": latency + steps * size / bandwidth,
        "the latency is missing": steps * size / bandwidth,
    }
