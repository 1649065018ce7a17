"""Exercises of chapter 01: what each collective leaves on each rank, a ring, an order that does not hang, seconds.

Wrong answers are compared with those of known misunderstandings, and the score names the one that fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from labkit.check.scoring import ONLY_FIRST, Diagnosis, Misreadings, Outcome, close, exercise, holds

Chunks = list[list[int]]
"""The chunks of each rank, each a number."""


# ---- what each collective leaves ----

_CALLS = (
    ("broadcast", 3),
    ("all_gather", 3),
    ("all_to_all", 3),
    ("all_to_all", 4),
    ("all_reduce", 3),
    ("reduce_scatter", 3),
    ("reduce_scatter", 4),
)
"""(operation, ranks)."""


def _before(operation: str, ranks: int) -> Chunks:
    """Give every chunk another number: 1, 2, ... on rank 0, then on rank 1. An all-gather has one chunk per rank."""
    whole = [[ranks * rank + chunk + 1 for chunk in range(ranks)] for rank in range(ranks)]
    return [[chunks[rank]] for rank, chunks in enumerate(whole)] if operation == "all_gather" else whole


def _sums(before: Chunks) -> list[int]:
    return [sum(column) for column in zip(*before)]


def _after(operation: str, before: Chunks) -> Chunks:
    ranks = range(len(before))
    if operation == "broadcast":
        return [before[0] for _ in ranks]
    if operation == "all_gather":
        return [[chunk for chunks in before for chunk in chunks] for _ in ranks]
    if operation == "all_to_all":
        return [list(column) for column in zip(*before)]
    return [_sums(before) if operation == "all_reduce" else [_sums(before)[rank]] for rank in ranks]


@exercise("01.after", "Write after(operation, before) -> what each rank holds afterwards, one list of chunks per rank.")
def after(answer: Any) -> Iterator[Outcome]:
    """Judge five operations over three ranks, and two of them over four."""
    diagnosis = Diagnosis()
    for operation, ranks in _CALLS:
        before = _before(operation, ranks)
        outcome = diagnosis.outcome(
            f"{operation} of {before}",
            _after(operation, before),
            lambda o=operation, n=ranks: list(answer(o, _before(o, n))),
            _misread_calls(operation, before),
        )
        yield replace(outcome, reason=outcome.reason or operation)


def _misread_calls(operation: str, before: Chunks) -> Misreadings:
    moving = {"broadcast": _misread_broadcast, "all_gather": _misread_gather, "all_to_all": _misread_all_to_all}
    wrong = moving.get(operation, _misread_sums)(before)
    if operation == "all_reduce":
        wrong["each rank gets one sum; that is a reduce-scatter, an all-reduce gives all sums to all"] = [
            [total] for total in _sums(before)
        ]
    elif operation == "reduce_scatter":
        sums = _sums(before)
        wrong["each rank gets all sums; that is an all-reduce, here rank r keeps sum r alone"] = [sums for _ in before]
        wrong["the sums are on the wrong ranks; rank r keeps the sum of chunk r"] = [[s] for s in sums[1:] + sums[:1]]
        wrong["this is the mean; the sum is not divided"] = [[total / len(before)] for total in sums]
    return {f"nothing has moved in the {operation}": before, **wrong}


def _misread_broadcast(before: Chunks) -> dict[str, Any]:
    scattered = [[chunk] for chunk in before[0]]
    return {"each rank gets a chunk of its own; that is a scatter, a broadcast gives all chunks to all": scattered}


def _misread_gather(before: Chunks) -> dict[str, Any]:
    every = [chunk for chunks in before for chunk in chunks]
    turned = [every[rank:] + every[:rank] for rank in range(len(before))]
    return {
        "rank 0 alone gets everything; the 'all' in the name says that every rank does": [every, *before[1:]],
        "each rank begins with its own chunk; the chunks are in the order of ranks": turned,
        "a sum is taken; an all-gather moves chunks and adds nothing": [[sum(every)] for _ in before],
    }


def _misread_all_to_all(before: Chunks) -> dict[str, Any]:
    every = [chunk for chunks in before for chunk in chunks]
    return {
        "every rank gets every chunk; rank r gets chunk r of each rank alone": [every for _ in before],
        "each rank passes its chunks on to the next; chunk c of every rank goes to rank c": before[-1:] + before[:-1],
        "a sum is taken, as in a reduce-scatter; an all-to-all adds nothing": [[total] for total in _sums(before)],
        "sums are taken; an all-to-all adds nothing": [[sum(chunks) for chunks in before] for _ in before],
        "rank r keeps its own chunk alone; it also gets chunk r of all others": [
            [chunks[rank]] for rank, chunks in enumerate(before)
        ],
    }


def _misread_sums(before: Chunks) -> dict[str, Any]:
    sums = _sums(before)
    return {
        "rank 0 alone gets the sums; the 'all' in the name says that every rank does": [sums, *before[1:]],
        "this is the mean; the sum is not divided": [[total / len(before) for total in sums] for _ in before],
        "each rank adds up its own chunks; chunk c is added up over ranks": [[sum(chunks)] for chunks in before],
        "the sums go over the chunks of one rank; chunk c is added up over ranks": [
            [sum(chunks) for chunks in before] for _ in before
        ],
        "each rank keeps its own chunk; the sum over ranks is missing": [
            [chunks[rank]] for rank, chunks in enumerate(before)
        ],
    }


# ---- a ring to the previous rank ----

Rule = Callable[[int, int, int], tuple[int, int]]
"""(rank, step, ranks) -> (chunk to send, chunk to receive into)."""


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


@exercise(
    "01.ring", "Write rule(rank, step, ranks) -> (chunk to send, chunk to receive) in a ring to the previous rank."
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


@exercise(
    "01.order", "Write order(rank, ranks) -> ['send', 'recv'] or ['recv', 'send'] for a ring of blocking messages."
)
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


@exercise("01.seconds", "Write seconds(ranks, size, latency, bandwidth) -> (of a ring, of doubling), in seconds.")
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
