"""Which microbatches keep everything, by the rows of a schedule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_schedules import random_legal_schedule

from labkit.schedules import Schedule, get_pp_rank_microbatches, gpipe, interleaved, one_f_one_b
from labkit.schedules.simulator import kept_whole

Stages = frozenset[tuple[int, int]]


def alive(schedule: Schedule, rank: int, kept: Stages) -> list[tuple[int, bool]]:
    """At each forward of the row: how many of `kept` are alive already, and whether this one is kept."""
    seen, now = [], 0
    for action in schedule.actions(rank):
        chosen = (action.stage, action.microbatch) in kept
        if action.kind == "F":
            seen.append((now, chosen))
        now += {"F": 1, "B": -1, "W": -1, "I": 0}[action.kind] if chosen else 0
    return seen


@given(seed=st.integers(0, 10_000), count=st.integers(0, 6))
def test_never_more_than_asked_for_and_no_place_left_empty(seed: int, count: int) -> None:
    """Whatever the rows: split backwards, several stages a rank, any order."""
    schedule = random_legal_schedule(seed)
    for rank in range(schedule.pp):
        seen = alive(schedule, rank, kept_whole(schedule, rank, count))
        assert all(before < count if chosen else before == count for before, chosen in seen)


def by_window(schedule: Schedule, rank: int, count: int, warmup: int) -> Stages:
    """Megatron's rule: of the forwards of a rank, the first `count` in each window of warm-up + 1."""
    forwards = [(a.stage, a.microbatch) for a in schedule.actions(rank) if a.kind == "F"]
    return frozenset(key for k, key in enumerate(forwards) if k % (warmup + 1) < count)


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [4, 8, 11])
def test_under_1f1b_it_is_megatrons_rule(pp: int, microbatches: int) -> None:
    schedule = one_f_one_b(pp, microbatches)
    for rank in range(pp):
        warmup = min(pp - rank - 1, microbatches)
        for count in range(pp + 2):
            assert kept_whole(schedule, rank, count) == by_window(schedule, rank, count, warmup)


def test_under_interleaving_a_window_of_forwards_can_keep_twice_as_many() -> None:
    """Backwards come back chunk by chunk, not in the order of the forwards: Megatron's count of 4 has 8 alive."""
    schedule = interleaved(4, 2, 8)
    _, _, warmup, _ = get_pp_rank_microbatches(8, 2, 4, pp_size=4, pp_rank=0)
    assert max(n + chosen for n, chosen in alive(schedule, 0, by_window(schedule, 0, 4, warmup))) == 8
    assert max(n + chosen for n, chosen in alive(schedule, 0, kept_whole(schedule, 0, 4))) == 4


def test_none_all_and_a_bad_count() -> None:
    schedule = gpipe(2, 4)
    assert kept_whole(schedule, 0, 0) == frozenset()
    assert kept_whole(schedule, 1, 9) == {(1, m) for m in range(4)}
    with pytest.raises(ValueError, match="-1 microbatches cannot be kept whole; give 0 or more"):
        kept_whole(schedule, 0, -1)
