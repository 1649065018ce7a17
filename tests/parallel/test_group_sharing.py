"""Layouts of a process share their process groups and free them, however unevenly the ranks keep and drop layouts."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from labkit.comm.group_plan import GROUP_KINDS, groups_of_rank
from labkit.comm.group_registry import sweep
from labkit.config import ParallelConfig, presets
from labkit.launch import RankError, Ranks

WORLD = 8


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as started:
        yield started


def kept() -> dict[int, Any]:
    """Layouts that this rank keeps between calls (each call brings the variables of this file anew)."""
    return vars(sys).setdefault("kept_layouts", {})


def in_use() -> tuple[int, int]:
    """(threads of this process, process groups of torch) on a rank."""
    from torch.distributed import distributed_c10d

    status = Path("/proc/self/status").read_text()
    return int(status.split("Threads:")[1].split()[0]), len(distributed_c10d._world.pg_map)


def freed() -> None:
    kept().clear()
    gc.collect()


def settles_at(ranks: Ranks, expected: list[tuple[int, int]]) -> None:
    """A thread that has ended may be counted a little longer: compare again for some seconds."""
    deadline = time.monotonic() + 20.0
    while (found := ranks.run(in_use)) != expected and time.monotonic() < deadline:
        time.sleep(0.05)
    assert found == expected


@pytest.fixture
def empty(ranks: Ranks) -> Iterator[tuple[int, int]]:
    """What a rank without a layout uses; each test leaves it so."""
    before = ranks.run(in_use)
    assert {groups for _, groups in before} == {1}, "only torch's default group"
    yield before[0]
    ranks.run(freed)
    settles_at(ranks, before)


def meet(groups: Any) -> None:
    """An all-reduce over every communicator of a layout, and over those that are made on demand."""
    import torch
    import torch.distributed as dist

    from labkit.comm.groups import cut_group
    from labkit.comm.p2p import second_communicator

    used = [getattr(groups, kind) for kind in GROUP_KINDS]
    used.append(second_communicator(groups))
    if groups.dp_cp.size % 2 == 0:
        used += cut_group(groups, groups.dp_cp, 2)
    for group in used:
        if group.size > 1:
            total = torch.tensor([1.0 + groups.rank])
            dist.all_reduce(total, group=group.process_group)
            assert total.item() == sum(1.0 + rank for rank in group.ranks), group.name


def layout(seed: int) -> ParallelConfig:
    """A random layout of the world."""
    draw = random.Random(seed)
    while True:
        order = draw.sample(["tp", "cp", "ep", "dp", "pp"], 5)
        tp, cp, pp, ep, etp = (draw.choice((1, 1, 2, 2, 4, 8)) for _ in range(5))
        split = draw.randrange(1, pp) if pp > 1 and draw.random() < 0.5 else None
        config = ParallelConfig(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, order="-".join(order), split_rank=split)
        with contextlib.suppress(ValueError):  # sizes that do not fit the world or each other
            groups_of_rank(0, config, WORLD)
            return config


def two_layouts_at_once() -> tuple[bool, bool, int, int]:
    from labkit.parallel import initialize_model_parallel

    config = ParallelConfig(tp=2, pp=2)
    first = initialize_model_parallel(config)
    meet(first)
    once = in_use()[1]
    second = initialize_model_parallel(config)
    meet(second)
    shared = first.tp.process_group is second.tp.process_group
    apart = first.pp.process_group is not second.tp.process_group
    twice = in_use()[1]
    first.close()
    meet(second)
    return shared, apart, once, twice


def test_two_layouts_over_the_same_ranks_share_their_process_groups(ranks: Ranks, empty: tuple[int, int]) -> None:
    for shared, apart, once, twice in ranks.run(two_layouts_at_once):
        assert shared and apart
        assert twice == once > 1


def kept_unevenly(seeds: list[int]) -> None:
    """Each rank keeps and drops layouts by its own dice: by close, by dropping the last reference, by the collector."""
    import torch.distributed as dist

    from labkit.parallel import initialize_model_parallel

    dice = random.Random(dist.get_rank())
    for seed in seeds:
        groups = initialize_model_parallel(layout(seed))
        meet(groups)
        kept()[seed] = groups
        for old in list(kept()):
            if dice.random() < 0.4:
                end = dice.choice(("close", "drop", "cycle"))
                if end == "close":
                    kept()[old].close()
                elif end == "cycle":
                    ring: list[Any] = [kept()[old]]
                    ring.append(ring)
                del kept()[old]
    for groups in kept().values():
        assert groups.world.process_group is not None, "a layout that this rank keeps is open"


def test_ranks_that_keep_and_drop_different_layouts_still_meet(ranks: Ranks, empty: tuple[int, int]) -> None:
    seeds = [1, 2, 1, 3, 1, 2, 4, 3, 1, 1, 2, 3]
    for _ in range(2):  # the second call meets what the first has kept
        ranks.run(kept_unevenly, seeds)


def raises_on_one_rank(config: ParallelConfig, unlucky: int, when: str) -> None:
    import torch.distributed as dist

    from labkit.parallel import initialize_model_parallel

    kept()[0] = initialize_model_parallel(config)
    meet(kept()[0])
    if dist.get_rank() == unlucky and when == "before":
        raise OSError("no layout on this rank")
    kept()[1] = initialize_model_parallel(config)  # shares everything, so that nobody waits for the unlucky rank
    if dist.get_rank() == unlucky and when == "after":
        raise OSError("a layout on this rank")


def names_of_kept() -> list[int]:
    return sorted(kept())


@pytest.mark.parametrize("when", ["before", "after"])
def test_after_an_exception_on_one_rank_layouts_meet_again(ranks: Ranks, empty: tuple[int, int], when: str) -> None:
    for _ in range(2):
        with pytest.raises(RankError, match="layout on this rank"):
            ranks.run(raises_on_one_rank, ParallelConfig(tp=2, pp=2), 3, when)
    assert ranks.run(names_of_kept)[0] == [0, 1], "the ranks have not been replaced"
    ranks.run(kept_unevenly, [5, 5, 6])


def closed_twice(config: ParallelConfig) -> list[str]:
    import torch

    from labkit.comm import collectives
    from labkit.comm.groups import cut_group
    from labkit.parallel import initialize_model_parallel

    with initialize_model_parallel(config) as groups:
        meet(groups)
    groups.close()
    said = []
    for use in (
        lambda: collectives.all_reduce(torch.ones(1), groups.tp),
        lambda: groups.device_mesh("tp"),
        lambda: cut_group(groups, groups.dp_cp, 2),
        lambda: groups.world.process_group,
    ):
        with pytest.raises(RuntimeError) as error:
            use()
        said.append(str(error.value))
    return said


def test_a_closed_layout_says_so_and_closes_twice(ranks: Ranks, empty: tuple[int, int]) -> None:
    said = ranks.run(closed_twice, ParallelConfig(tp=2))[0]
    assert said[0] == (
        "group tp of ranks 0, 1 belongs to a layout that was closed; make the layout again with "
        "initialize_model_parallel"
    )
    assert all("belongs to a layout that was closed" in text for text in said)


def held_by_a_layer(config: ParallelConfig) -> int:
    import torch

    from labkit.parallel import ColumnParallelLinear, initialize_model_parallel

    layer = ColumnParallelLinear("a", 4, 4, group=initialize_model_parallel(config).tp, gather_output=True)
    sweep()  # nobody else refers to the layout
    assert layer(torch.ones(2, 1, 4))[0].shape == (2, 1, 4)
    return in_use()[1]


def test_a_layer_keeps_the_group_it_uses_and_no_other(ranks: Ranks, empty: tuple[int, int]) -> None:
    assert min(ranks.run(held_by_a_layer, ParallelConfig(tp=2, cp=2))) >= 2


def stuck_operation(config: ParallelConfig) -> None:
    import torch
    import torch.distributed as dist

    from labkit.parallel import initialize_model_parallel

    with initialize_model_parallel(config) as groups:
        if groups.tp.rank == 0:  # nobody answers
            kept()[0] = dist.all_reduce(torch.ones(1), group=groups.tp.process_group, async_op=True)
            kept()[1] = dist.irecv(
                torch.ones(1), src=groups.pp.ranks[1 - groups.pp.rank], group=groups.pp.process_group
            )


def test_an_operation_that_nobody_answers_does_not_hold_up_the_ranks(ranks: Ranks, empty: tuple[int, int]) -> None:
    ranks.run(stuck_operation, ParallelConfig(tp=2, pp=2))
    ranks.run(freed, timeout=20.0)
    ranks.run(kept_unevenly, [1], timeout=20.0)


def part_of_the_world(first: int, size: int) -> None:
    import torch.distributed as dist

    from labkit.parallel import initialize_model_parallel

    config = ParallelConfig(tp=2, rank_offset=first)
    if first <= dist.get_rank() < first + size:
        kept()[first] = initialize_model_parallel(config, world_size=size)
        meet(kept()[first])


def test_layouts_on_overlapping_parts_of_the_world(ranks: Ranks, empty: tuple[int, int]) -> None:
    for first, size in ((4, 4), (2, 4), (0, 4), (2, 6), (0, 8), (2, 4)):
        ranks.run(part_of_the_world, first, size)


def random_layouts(seeds: list[int]) -> None:
    from labkit.parallel import initialize_model_parallel

    for seed in seeds:
        meet(initialize_model_parallel(layout(seed)))


def communicators(config: ParallelConfig) -> int:
    """Different groups of more than one rank in a layout: about the number of its communicators."""
    return len({tuple(group) for group in groups_of_rank(0, config, WORLD).values() if len(group) > 1})


@pytest.mark.parametrize("count", [20, pytest.param(100, marks=pytest.mark.sweep)])
def test_many_layouts_leave_no_more_threads_than_the_largest_of_them(
    ranks: Ranks, empty: tuple[int, int], count: int
) -> None:
    seeds = list(range(count))
    largest = sorted(seeds, key=lambda seed: -communicators(layout(seed)))[: count // 10]
    ranks.run(random_layouts, largest)
    settles_at(ranks, [empty] * WORLD)
    ranks.run(random_layouts, seeds)
    settles_at(ranks, [empty] * WORLD)


def trained(config: Any, times: int) -> None:
    """Trainings of which each third fails on every rank. Each closes its groups before anything is collected."""
    from labkit.models.chunks import build_model_chunk
    from labkit.train import pretrain

    made: list[Any] = []

    def provider(config: Any, groups: Any, **stage: Any) -> Any:
        made.append(groups)
        if len(made) % 3 == 0:
            raise ArithmeticError("no model")
        return build_model_chunk(config, groups, **stage)

    for _ in range(times):
        with contextlib.suppress(ArithmeticError):
            pretrain(config, model_provider=provider)
        with pytest.raises(RuntimeError, match="belongs to a layout that was closed"):
            print(made[-1].world.process_group)


def test_trainings_in_warm_ranks_leave_no_group_behind(ranks: Ranks, empty: tuple[int, int]) -> None:
    small = {"model.layers": 2, "model.hidden": 16, "model.seq_length": 16, "train.steps": 1, "train.eval_steps": 0}
    layout = {"parallel.tp": 2, "parallel.pp": 2, "parallel.sequence_parallel": True, "train.global_batch_size": 4}
    config = presets.tiny().override({**small, **layout})
    for _ in range(2):
        ranks.run(trained, config, 6)
        settles_at(ranks, [empty] * WORLD)
