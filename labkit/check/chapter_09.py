"""Exercises of chapter 09: bytes that a rank keeps, the slices of parameters that it owns, the norm over slices.

Wrong answers are compared with those of known misunderstandings. For slices the score shows the first rank that
differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from labkit.check.scoring import Diagnosis, Finding, Misreadings, Outcome, asked, close, exercise, holds, plain, shown
from labkit.parallel.data_parallel.bucket_layout import ParameterSpec, pieces_of_rank, plan_buckets
from labkit.plan.zero_stages import bytes_per_parameter

# ---- bytes of a rank ----

_KEPT = ((4, 8, 0), (4, 8, 1), (2, 8, 0), (2, 8, 1), (2, 64, 2), (2, 4, 3), (4, 16, 2), (8, 4, 1))
"""(bytes of a weight, ranks, ZeRO stage)."""
_TYPES = {2: "bf16", 4: "fp32", 8: "fp64"}


@exercise("09.bytes", "Write kept_bytes(weight, d, stage) -> the bytes of a parameter on a rank.")
def kept(answer: Any) -> Iterator[Outcome]:
    """Judge three widths of weights and four stages."""
    return asked(
        _KEPT,
        given="weights of {} bytes, d {}, stage {}".format,
        right=_bytes_kept,
        tried=answer,
        misread=_misread_bytes,
        equal=close(rtol=1e-9),
    )


def _bytes_kept(weight: int, d: int, stage: int) -> float:
    types = {"param_dtype": _TYPES[weight], "grad_dtype": _TYPES[max(4, weight)]}
    return float(bytes_per_parameter(**types, dp=d, stage=stage).total)


def _kept(weight: float, gradient: float, master: float, moments: float, shares: Sequence[int]) -> float:
    """Return the sum of four contents; `shares` says by how many ranks each is divided."""
    return sum(size / share for size, share in zip((weight, gradient, master, moments), shares, strict=True))


def _misread_bytes(weight: int, d: int, stage: int) -> Misreadings:
    wide = max(4, weight)
    master = 4 if weight < 4 else 0
    shares = [d if stage >= least else 1 for least in (3, 2, 1, 1)]
    four = (weight, wide, master, 2 * wide)
    later = [d if stage + 1 >= least else 1 for least in (3, 2, 1, 1)]
    return {
        "every stage divides everything; only stage 3 does that": _kept(*four, [d if stage else 1] * 4),
        "nothing is divided": _kept(*four, [1] * 4),
        "this adds a master for a weight of 4 bytes or more; such a weight is its own master": (
            _kept(weight, wide, 4, 2 * wide, shares)
        ),
        "this divides everything from stage 1 on, as only stage 3 does, and adds a master for a wide weight": (
            _kept(weight, wide, 4, 8, [d if stage else 1] * 4)
        ),
        "the master is missing, or moments are as narrow as the weight; Adam updates a copy of 4 bytes": _kept(
            weight, wide, 0, 2 * wide, shares
        ),
        "both moments have 4 bytes here; each is as wide as the tensor that Adam updates": _kept(
            weight, wide, master, 8, shares
        ),
        "Adam has two moments; this counts one": _kept(weight, wide, master, wide, shares),
        "the gradient has max(4, weight) bytes": _kept(weight, weight, master, 2 * wide, shares),
        "gradient and moments have 4 and 8 bytes here for every weight; both are wider for a weight of 8 bytes": _kept(
            weight, 4, master, 8, shares
        ),
        "this divides what the next stage divides; a weight that is its own master counts as weight, and only stage 3 "
        "divides weights": _kept(*four, later),
    }


# ---- owners of slices ----

_BUFFERS = (
    ((100, 300, 50), 1_000, 4, "alignment and padding"),
    ((128, 64), 1_000, 2, "what is where"),
    ((100, 300, 50), 256, 4, "two buckets"),
    ((1_000,), 1_000, 3, "one parameter, three owners"),
    ((64, 64, 64, 64), 64, 2, "a bucket for each, half of it padding"),
)
"""(sizes, bucket_size, dp, tested idea)."""
_MANY = (tuple(37 * i % 501 + 1 for i in range(40)), 2_000, 6)
Owners = list[list[tuple[int, int, int]]]
Placed = tuple[int, int, int]
"""(parameter, its first element in the buffer, one after its last)."""
Stretch = tuple[int, int, list[Placed]]
"""(start of a bucket, its end with padding, its parameters)."""


def owners(sizes: Sequence[int], bucket_size: int, dp: int) -> Owners:
    """Return the right answer by rank: (parameter, first element, one after the last) in the order of the buffer."""
    specs = [ParameterSpec(str(number), size) for number, size in enumerate(sizes)]
    plan = plan_buckets(specs, dp=dp, bucket_size=bucket_size, distributed_optimizer=True)
    return [
        [
            (int(piece.name), piece.offset_in_parameter, piece.offset_in_parameter + piece.numel)
            for piece in pieces_of_rank(plan, dp, rank)
        ]
        for rank in range(dp)
    ]


def _laid_out(
    sizes: Sequence[int], bucket_size: float, dp: int, *, backward: bool = True, align: int = 64, multiple: int = 128
) -> list[Stretch]:
    """Return the buckets by the rules of the exercise, or by rules that differ in one point."""
    buckets: list[Stretch] = []
    start = end = 0
    placed: list[Placed] = []
    order = range(len(sizes))
    for parameter in reversed(order) if backward else order:
        first = -(-end // align) * align
        end = first + sizes[parameter]
        placed.append((parameter, first, end))
        if end - start >= bucket_size or parameter == (0 if backward else len(sizes) - 1):
            length = math.lcm(dp, multiple)
            stop = start + -(-(end - start) // length) * length
            buckets.append((start, stop, placed))
            start = end = stop
            placed = []
    return buckets


def _cut(buckets: Sequence[Stretch], dp: int, *, within: bool = True) -> Owners:
    """Return each rank's part of every bucket; `within` counts elements within the parameter, else in the buffer."""
    found: Owners = [[] for _ in range(dp)]
    for start, end, placed in buckets:
        share = (end - start) // dp
        for rank in range(dp):
            low, high = start + rank * share, start + (rank + 1) * share
            for parameter, first, last in placed:
                mine = max(first, low), min(last, high)
                if mine[0] < mine[1]:
                    begin = first if within else 0
                    found[rank].append((parameter, mine[0] - begin, mine[1] - begin))
    return found


def _misread_owners(sizes: Sequence[int], bucket_size: int, dp: int) -> dict[str, Owners]:
    right = _laid_out(sizes, bucket_size, dp)
    whole = [(0, right[-1][1], [each for _, _, placed in right for each in placed])]
    turns = [(parameter, 0, size) for parameter, size in enumerate(sizes)]
    return {
        "whole parameters are dealt out in turn; a rank owns a part of each bucket, wherever parameters end": [
            [piece for piece in turns if piece[0] % dp == rank] for rank in range(dp)
        ],
        "the buffer is cut as a whole; close a bucket at bucket_size and cut each, so that all ranks share it": _cut(
            whole, dp
        ),
        "parameters lie end to end; each must start at a multiple of 64": _cut(
            _laid_out(sizes, bucket_size, dp, align=1), dp
        ),
        "parameters lie end to end, and buckets are padded to dp alone": _cut(
            _laid_out(sizes, bucket_size, dp, align=1, multiple=1), dp
        ),
        "buckets are padded to dp alone; their length must be a multiple of lcm(dp, 128)": _cut(
            _laid_out(sizes, bucket_size, dp, multiple=1), dp
        ),
        "buckets are padded to 128 alone; dp must divide their length, too": _cut(_laid_out(sizes, bucket_size, 1), dp),
        "parameters lie as they were registered; the first bucket is then complete when the backward ends": _cut(
            _laid_out(sizes, bucket_size, dp, backward=False), dp
        ),
        "elements are counted in the buffer; count them within the parameter": _cut(right, dp, within=False),
        "pieces are listed by parameter; list them in the order of the buffer": [
            sorted(own) for own in _cut(right, dp)
        ],
        "parameters are numbered in the order of the buffer; 0 is the first in the order of registration": [
            [(len(sizes) - 1 - parameter, first, last) for parameter, first, last in own] for own in _cut(right, dp)
        ],
    }


@exercise("09.shards", "Write shards(sizes, bucket_size, dp) -> by rank, the (parameter, first, last) that it owns.")
def shards(answer: Any) -> Iterator[Outcome]:
    """Judge five small buffers, then forty parameters: each element must have exactly its right owner."""
    diagnosis = Diagnosis()
    for sizes, bucket_size, dp, what in _BUFFERS:
        given = f"sizes {list(sizes)}, bucket_size {bucket_size} and dp {dp} ({what})"
        yield _judged(given, lambda a=(list(sizes), bucket_size, dp): answer(*a), (sizes, bucket_size, dp), diagnosis)
    sizes, bucket_size, dp = _MANY
    yield holds(
        f"{len(sizes)} parameters over {dp} ranks in buckets of {bucket_size}",
        f"that each of their {sum(sizes):,} elements has one owner, the one it has in the library",
        lambda: _each_once(answer(list(sizes), bucket_size, dp), owners(*_MANY)),
    )


def _judged(given: str, got: Callable[[], Any], case: tuple[Sequence[int], int, int], diagnosis: Diagnosis) -> Outcome:
    """Judge one buffer: name the first rank that differs, and the misunderstanding that gives the same slices."""
    right, rank = plain(owners(*case)), 0

    def tried() -> Finding:
        nonlocal rank
        value = plain(got())
        if value == right:
            return True
        if not isinstance(value, list) or len(value) != len(right):
            return "form", f"{shown(value)}: give a list with one list of pieces for each of the {len(right)} ranks"
        rank = next(r for r in range(len(right)) if value[r] != right[r])
        fitting = [words for words, other in _misread_owners(*case).items() if plain(other) == value]
        reason = diagnosis.meant(fitting)
        return reason, f"{shown(value[rank])} on rank {rank}{f': {reason}' if reason else ''}"

    outcome = holds(given, "", tried)
    return replace(outcome, expected=f"{shown(right[rank])} on rank {rank}")


def _each_once(answer: Any, expected: Owners) -> bool | str:
    """Return True, or the first element with no owner, two owners or a wrong owner."""
    if not isinstance(answer, (list, tuple)) or len(answer) != len(expected):
        return f"{shown(answer)}: give a list with one list of pieces for each of the {len(expected)} ranks"
    owner: dict[tuple[int, int], int] = {}
    for rank, pieces in enumerate(plain(answer)):
        for parameter, first, last in pieces:
            for element in range(first, last):
                if (parameter, element) in owner:
                    other = owner[parameter, element]
                    return f"element {element} of parameter {parameter} owned twice, by ranks {other} and {rank}"
                owner[parameter, element] = rank
    for rank, pieces in enumerate(expected):
        for parameter, first, last in pieces:
            for element in range(first, last):
                found = owner.pop((parameter, element), None)
                if found is None:
                    return f"element {element} of parameter {parameter} without an owner"
                if found != rank:
                    return f"element {element} of parameter {parameter} on rank {found}, which belongs to rank {rank}"
    if owner:
        parameter, element = min(owner)
        return f"an element {element} of parameter {parameter}, which has no such element"
    return True


# ---- the norm over slices ----

_LAYOUTS = ((2, 2), (1, 4), (2, 1), (1, 1), (4, 2))
"""(tp, dp); the first one gives each misunderstanding another number."""
Rank = dict[str, Any]


def _ranks(tp: int, dp: int) -> list[Rank]:
    """Return ranks with slices of a cut weight, of a norm's weight that all tp ranks have, and of a tied copy."""
    made: list[Rank] = []
    for d in range(dp):
        for t in range(tp):
            cut = {"grad": [1.0 + t, 2.0 + 3 * d], "cut": True, "shared": False}
            alike = {"grad": [4.0 + d], "cut": False, "shared": False}
            copy = {"grad": [7.0 + t + d], "cut": True, "shared": True}
            made.append({"tp": t, "dp": d, "pieces": [cut, alike, copy]})
    return made


def _squares(ranks: Sequence[Rank], counts: Callable[[Rank, dict[str, Any]], bool]) -> float:
    return sum(g * g for rank in ranks for p in rank["pieces"] if counts(rank, p) for g in p["grad"])


def _once(rank: Rank, piece: dict[str, Any]) -> bool:
    return not piece["shared"] and (piece["cut"] or rank["tp"] == 0)


@exercise("09.norm", "Write norm(ranks) -> the norm of the whole gradient, from each rank's slices.")
def norm(answer: Any) -> Iterator[Outcome]:
    """Judge five layouts of tp and dp."""
    return asked(
        _LAYOUTS,
        given="tp {}, dp {}".format,
        right=lambda tp, dp: math.sqrt(_squares(_ranks(tp, dp), _once)),
        tried=lambda tp, dp: answer(_ranks(tp, dp)),
        misread=lambda tp, dp: _misread_norms(_ranks(tp, dp), dp),
        equal=close(rtol=1e-9),
    )


def _misread_norms(ranks: Sequence[Rank], dp: int) -> Misreadings:
    def root(counts: Callable[[Rank, dict[str, Any]], bool]) -> float:
        return math.sqrt(_squares(ranks, counts))

    alone = [math.sqrt(_squares([rank], _once)) for rank in ranks]
    return {
        "only dp rank 0 counts, and with it copies; the other replicas hold other slices": root(
            lambda rank, piece: rank["dp"] == 0
        ),
        "only dp rank 0 counts; with the distributed optimizer the other replicas hold other slices": root(
            lambda rank, piece: rank["dp"] == 0 and _once(rank, piece)
        ),
        "the tied copy counts, but another rank counts the same gradient": root(
            lambda rank, piece: piece["cut"] or rank["tp"] == 0
        ),
        "every piece of every rank counts, so copies over tp and the tied copy count again": root(
            lambda rank, piece: True
        ),
        "pieces that all ranks of tp hold alike count on each of them": root(lambda rank, piece: not piece["shared"]),
        "tp rank 0 alone counts; the other ranks of tp hold other parts of cut parameters": root(
            lambda rank, piece: rank["tp"] == 0 and not piece["shared"]
        ),
        "norms of ranks are added; add their squares, and take one root": sum(alone),
        "this is the largest norm of a rank; all ranks hold parts of one gradient": max(alone),
        "this is a mean over replicas; their slices are parts of one gradient": math.sqrt(_squares(ranks, _once) / dp),
        "the root is missing: this is the sum of squares": _squares(ranks, _once),
    }
