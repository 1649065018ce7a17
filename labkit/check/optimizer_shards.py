"""Exercise of chapter 08: the slices of parameters that each rank owns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from labkit.check.scoring import Outcome, compare, exercise, holds, plain, shown
from labkit.parallel.data_parallel.bucket_layout import ParameterSpec, pieces_of_rank, plan_buckets

_CASES = (
    ((128, 64), 1_000, 2, "what lies where"),
    ((100, 300, 50), 1_000, 4, "alignment and padding"),
    ((100, 300, 50), 256, 4, "two buckets"),
    ((1_000,), 1_000, 3, "one parameter, three owners"),
    ((64, 64, 64, 64), 64, 2, "a bucket for each, half of it padding"),
)
"""(sizes, bucket_size, dp, tested idea)."""
_MANY = (tuple(37 * i % 501 + 1 for i in range(40)), 2_000, 6)


def owners(sizes: Sequence[int], bucket_size: int, dp: int) -> list[list[tuple[int, int, int]]]:
    """The right answer: by rank, (parameter, first element, one past the last) in the order of the buffer."""
    specs = [ParameterSpec(str(number), size) for number, size in enumerate(sizes)]
    plan = plan_buckets(specs, dp=dp, bucket_size=bucket_size, distributed_optimizer=True)
    return [
        [
            (int(piece.name), piece.offset_in_parameter, piece.offset_in_parameter + piece.numel)
            for piece in pieces_of_rank(plan, dp, rank)
        ]
        for rank in range(dp)
    ]


@exercise("08.shards", "Write shards(sizes, bucket_size, dp) -> by rank, the (parameter, first, last) that it owns.")
def shards(answer: Any) -> Iterator[Outcome]:
    """Judge five small buffers, then forty parameters: each element must have exactly its right owner."""
    for sizes, bucket_size, dp, what in _CASES:
        given = f"sizes {list(sizes)}, bucket_size {bucket_size} and dp {dp} ({what})"
        yield compare(given, owners(sizes, bucket_size, dp), lambda a=(list(sizes), bucket_size, dp): answer(*a))
    sizes, bucket_size, dp = _MANY
    yield holds(
        f"{len(sizes)} parameters over {dp} ranks in buckets of {bucket_size}",
        f"that each of their {sum(sizes):,} elements has one owner, the one it has in the library",
        lambda: _each_once(answer(list(sizes), bucket_size, dp), owners(*_MANY)),
    )


def _each_once(answer: Any, expected: list[list[tuple[int, int, int]]]) -> bool | str:
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
