"""A rank that computes longer than its peers is named, and no other rank is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from labkit.comm.groups import single_process_groups
from labkit.train.reporting.slow_ranks import OFTEN, PAUSE, RATIO, STEPS, Pace, PaceWatch, SlowRank, slow_ranks


def pace(*busy: float, stage: int = 0, usual: float = 0.0) -> Pace:
    """One rank's steps; a single number stands for all of them."""
    return Pace(stage, "node", list(busy) if len(busy) > 1 else list(busy) * STEPS, usual)


def named(paces: Sequence[Pace]) -> list[int]:
    return [found.rank for found in slow_ranks(paces)]


def test_a_rank_50_percent_slower_is_named_with_its_ratio_and_host() -> None:
    paces = [pace(1.0), pace(1.0), pace(1.5), pace(1.0)]
    assert slow_ranks(paces) == [SlowRank(2, 1.5, "node", False)]
    said = "rank 2 computes 1.5 times as long as the median of its stage for 20 steps (host node)"
    assert str(slow_ranks(paces)[0]) == said
    assert named([pace(1.0), pace(1.5)]) == [1], "of two ranks, each is the peer of the other"
    assert named([pace(1.0), pace(RATIO - 0.01)]) == []


def test_stages_differ_by_design_and_only_ranks_of_one_stage_are_compared() -> None:
    stages = [pace(1.0), pace(1.0), pace(9.0, stage=1), pace(9.0, stage=1)]
    assert named(stages) == []
    assert named([*stages[:3], pace(13.5, stage=1)]) == [3]


def test_a_rank_alone_in_its_stage_is_measured_by_its_past_and_by_the_past_of_the_others() -> None:
    before = [pace(1.0, usual=1.0), pace(9.0, stage=1, usual=9.0), pace(4.0, stage=2, usual=4.0)]
    assert named(before) == []
    slow = [*before[:2], pace(6.0, stage=2, usual=4.0)]
    assert named(slow) == [2] and "before" in str(slow_ranks(slow)[0])
    everywhere = [pace(3.0, usual=1.0), pace(27.0, stage=1, usual=9.0), pace(12.0, stage=2, usual=4.0)]
    assert named(everywhere) == [], "the whole machine is slow, no rank of it"
    young = [pace(1.0), pace(9.0, stage=1), pace(4.0, stage=2)]
    assert named(young) == [], "nothing is usual yet"


@pytest.mark.parametrize("slow_steps", range(STEPS + 1))
def test_most_of_the_steps_must_be_slow(slow_steps: int) -> None:
    """A step that takes a hundred times as long is one slow step."""
    busy = [100.0] * slow_steps + [1.0] * (STEPS - slow_steps)
    assert named([pace(1.0), pace(*busy), pace(1.0)]) == ([1] if slow_steps >= OFTEN else [])


def test_fewer_steps_say_nothing() -> None:
    assert named([pace(*[1.0] * (STEPS - 1)), pace(*[9.0] * (STEPS - 1))]) == []
    assert named([pace(1.0)]) == [] and named([pace(0.0), pace(0.0)]) == []


def noisy(steps: int, deviation: float, slow: int = -1) -> list[list[int]]:
    """The ranks that are named at the end of each step. Each step of each of 8 ranks varies by itself; a hundredth of
    them takes five times as long. Rank `slow` needs 1.5 times as long."""
    draws = random.Random(7)
    busy = [
        [
            (1.5 if rank == slow else 1.0) * abs(draws.gauss(1.0, deviation)) * (5.0 if draws.random() < 0.01 else 1.0)
            for _ in range(steps)
        ]
        for rank in range(8)
    ]
    return [named([pace(*own[end - STEPS : end]) for own in busy]) for end in range(STEPS, steps + 1)]


@pytest.mark.parametrize("deviation", [0.05, 0.1, 0.3])
def test_noise_names_nobody_in_a_thousand_steps(deviation: float) -> None:
    assert not any(noisy(1000, deviation))


@pytest.mark.parametrize(("deviation", "share"), [(0.05, 0.99), (0.1, 0.8)])
def test_noise_hides_no_slow_rank(deviation: float, share: float) -> None:
    found = noisy(1000, deviation, slow=3)
    assert {rank for ranks in found for rank in ranks} == {3}
    assert sum(map(bool, found)) >= share * len(found)


@dataclass(frozen=True)
class World:
    """Process groups of one rank of two, as far as the watch looks at them."""

    world: object
    pp: object
    device: torch.device


@dataclass(frozen=True)
class Some:
    rank: int
    size: int


def watch(device: str = "cpu", size: int = 2) -> PaceWatch:
    groups = single_process_groups()
    return PaceWatch(World(Some(1, size), groups.pp, torch.device(device)))  # pyright: ignore[reportArgumentType]


def test_waits_are_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = 100.0
    monkeypatch.setattr("labkit.launch.status.waited_seconds", lambda: waited)
    own = watch()
    for step in range(STEPS + 30):
        own.begin_step()
        waited += 3.0
        own.end_step(4.0 if step < STEPS + 25 else 5.0)
    assert own.pace().busy == [1.0] * (STEPS - 5) + [2.0] * 5 and own.pace().usual == 1.0


@pytest.mark.parametrize(("device", "size"), [("cuda", 2), ("cpu", 1)])
def test_nothing_is_measured_where_waits_do_not_show_or_nobody_waits(device: str, size: int) -> None:
    own = watch(device, size)
    own.begin_step()
    own.end_step(1.0)
    assert own.pace().busy == []


def test_a_slow_rank_is_named_once_in_a_while() -> None:
    own, paces = watch(), [pace(1.0), pace(2.0), pace(1.0)]
    said = [step for step in range(STEPS, STEPS + 2 * PAUSE) if own.news(step, paces)]
    assert said == [STEPS, STEPS + PAUSE]
    paces[2] = pace(3.0)
    paces += [pace(1.0)] * 3
    (news,) = own.news(STEPS + 2 * PAUSE - 1, paces)
    assert news.startswith("rank 2 computes 3.0 times"), "another rank need not wait"
