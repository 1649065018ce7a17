"""Process groups on gloo ranks: they equal the plan, survive being made twice, and make torch meshes."""

from collections.abc import Iterator

import pytest

from labkit.comm.group_plan import GROUP_KINDS, groups_of_rank
from labkit.config import ParallelConfig
from labkit.launch import Ranks, run

LAYOUTS = [
    ParallelConfig(tp=2, pp=4, split_rank=1),
    ParallelConfig(tp=2, pp=2, cp=2, ep=4, etp=1),
    ParallelConfig(pp=4, ep=2, order="pp-tp-cp-ep-dp"),
    ParallelConfig(tp=2, pp=2, ep=2),
    ParallelConfig(),
    ParallelConfig(pp=8, split_rank=7),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(8) as started:
        yield started


def gathered(layouts: list[ParallelConfig]) -> list[dict]:
    """Of each layout: kind -> the ranks that an all-gather over the process group returns."""
    import torch
    import torch.distributed as dist

    from labkit.parallel import initialize_model_parallel

    found = []
    for config in layouts:
        groups = initialize_model_parallel(config)
        met = {}
        for kind in GROUP_KINDS:
            group = getattr(groups, kind)
            assert (group.process_group is None) == (group.size < 2), kind
            if group.process_group is None:
                met[kind] = list(group.ranks)
                continue
            members = [torch.empty(1, dtype=torch.int64) for _ in range(group.size)]
            dist.all_gather(members, torch.tensor([groups.rank]), group=group.process_group)
            assert members[group.rank].item() == groups.rank, kind
            met[kind] = [member.item() for member in members]
        found.append(met)
    return found


def test_every_group_meets_exactly_the_ranks_of_the_plan(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.run(gathered, LAYOUTS)):
        for config, met in zip(LAYOUTS, found, strict=True):
            plan = groups_of_rank(rank, config, 8)
            assert met == {kind: sorted(plan[kind].tolist()) for kind in GROUP_KINDS}


def test_groups_made_again_after_uneven_layouts_still_meet(ranks: Ranks) -> None:
    # Middle stages are in fewer groups; torch numbers groups per process, so an uneven count would hang here.
    uneven = [ParallelConfig(pp=8), ParallelConfig(tp=2, pp=4, split_rank=2), ParallelConfig(tp=8)]
    assert ranks.run(gathered, uneven) == ranks.run(gathered, uneven)


def embedding_group(config: ParallelConfig, ends: tuple[int, int]) -> tuple[int, ...]:
    import torch.distributed as dist

    from labkit.parallel import initialize_model_parallel

    groups = initialize_model_parallel(config, ends=ends)
    met: list[int | None] = [None] * groups.embd.size
    if groups.embd.size > 1:
        dist.all_gather_object(met, groups.rank, group=groups.embd.process_group)
        assert met == list(groups.embd.ranks)
    return groups.embd.ranks


def test_the_embedding_group_follows_the_first_and_last_stage(ranks: Ranks) -> None:
    config = ParallelConfig(pp=4, tp=2)  # ranks 0 and 1 are pipeline rank 0, 2 and 3 are 1, ...
    assert ranks.run(embedding_group, config, (2, 1)) == [(), (), (2, 4), (3, 5), (2, 4), (3, 5), (), ()]
    assert ranks.run(embedding_group, config, (0, 0)) == [(0,), (1,), (), (), (), (), (), ()]
    assert ranks.run(embedding_group, config, (0, 3))[-1] == (1, 7), "and the groups that follow still meet"


def communicators(config: ParallelConfig) -> dict[str, int]:
    from labkit.parallel import initialize_model_parallel

    groups = initialize_model_parallel(config)
    return {kind: id(getattr(groups, kind).process_group) for kind in GROUP_KINDS if getattr(groups, kind).size > 1}


def test_equal_groups_share_a_communicator_only_where_the_program_orders_them(ranks: Ranks) -> None:
    for used in ranks.run(communicators, ParallelConfig(tp=2, pp=2)):
        assert used["tp"] == used["etp"] == used["tp_cp"] == used["tp_ep"], "called in line"
        assert used["dp"] == used["dp_cp"], "one use: dense gradients"
        assert used["edp"] != used["dp"], "gradient buckets of experts finish in their own order"
        assert used["pp"] not in {used[kind] for kind in used if kind != "pp"}, "send/receive runs beside the program"


def on_mesh(config: ParallelConfig) -> tuple:
    import torch
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from labkit.parallel import initialize_model_parallel

    groups = initialize_model_parallel(config)
    whole = groups.device_mesh()
    for axis in whole.mesh_dim_names or ():
        assert whole.get_local_rank(axis) == getattr(groups, axis).rank, axis
        assert whole[axis].mesh.tolist() == list(getattr(groups, axis).ranks), axis
    mesh = groups.device_mesh("dp_cp", "tp")
    full = torch.arange(48.0).reshape(8, 6)
    sharded = distribute_tensor(full, mesh, [Replicate(), Shard(0)])
    assert torch.equal(sharded.to_local(), full.chunk(groups.tp.size)[groups.tp.rank])
    assert torch.equal(sharded.full_tensor(), full)
    experts = groups.device_mesh("edp", "ep", "etp")
    assert experts.get_local_rank("ep") == groups.ep.rank
    return tuple(whole.mesh_dim_names or ()), whole.mesh.tolist()


def test_device_mesh_has_the_coordinates_of_the_groups_and_serves_dtensor(ranks: Ranks) -> None:
    names, mesh = ranks.run(on_mesh, ParallelConfig(tp=2, pp=2, cp=2, ep=4, etp=1))[0]
    assert names == ("pp", "dp", "cp", "tp")
    assert mesh == [[[[0, 1], [2, 3]]], [[[4, 5], [6, 7]]]]
    names, mesh = ranks.run(on_mesh, ParallelConfig(pp=4, order="pp-tp-cp-ep-dp"))[0]
    assert names == ("dp", "cp", "tp", "pp")
    assert mesh == [[[[0, 1, 2, 3]]], [[[4, 5, 6, 7]]]]


def held_by_a_mesh(config: ParallelConfig) -> list[float]:
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    from labkit.comm.group_registry import sweep
    from labkit.parallel import initialize_model_parallel

    mesh = initialize_model_parallel(config).device_mesh("dp", "tp")["tp"]
    sweep()
    initialize_model_parallel(config).close()
    return distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).full_tensor().tolist()


def test_a_mesh_keeps_its_groups(ranks: Ranks) -> None:
    assert ranks.run(held_by_a_mesh, ParallelConfig(tp=2)) == [[0.0, 1.0, 2.0, 3.0]] * 8


def on_half(config: ParallelConfig) -> list | None:
    import torch
    import torch.distributed as dist

    from labkit.parallel import initialize_model_parallel

    if dist.get_rank() < config.rank_offset:
        return None
    groups = initialize_model_parallel(config)
    total = torch.ones(1)
    dist.all_reduce(total, group=groups.tp_dp_cp.process_group)
    return [groups.world_size, list(groups.world.ranks), total.item()]


def test_a_layout_on_the_upper_ranks_needs_nobody_below() -> None:
    found = run(on_half, 4, ParallelConfig(tp=2, rank_offset=2))
    assert found == [None, None, [2, [2, 3], 2.0], [2, [2, 3], 2.0]]


def refused(config: ParallelConfig, names: tuple[str, ...]) -> str:
    from labkit.parallel import initialize_model_parallel

    try:
        initialize_model_parallel(config).device_mesh(*names)
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("layout", "names", "message"),
    [
        ({"distributed_backend": "nccl"}, ("tp",), "distributed_backend is 'nccl', but torch.distributed runs 'gloo'"),
        ({"rank_offset": 8}, ("tp",), "rank_offset is 8 and there are 8 ranks; no rank is left"),
        ({"tp": 3}, ("tp",), "world size 8 is not a multiple of tp 3"),
        ({"tp": 2}, ("tp", "tp_cp"), "share an axis"),
        ({"tp": 2}, ("dp", "ep"), "mix groups of the dense layers with groups of the experts"),
        ({"tp": 2}, ("embd",), "'embd' is not a mesh dim"),
    ],
)
def test_refusals_on_every_rank(ranks: Ranks, layout: dict, names: tuple[str, ...], message: str) -> None:
    assert all(message in text for text in ranks.run(refused, ParallelConfig(**layout), names))


def timeouts(config: ParallelConfig) -> list[float]:
    import torch

    from labkit.comm.p2p import p2p_communicator
    from labkit.parallel import initialize_model_parallel

    groups = initialize_model_parallel(config)
    second = p2p_communicator(groups).second
    assert second.process_group is not groups.pp.process_group
    assert second.ranks == groups.pp.ranks
    made = [
        groups.tp.process_group,
        groups.pp.process_group,
        second.process_group,
        groups.leases.lease("alone", (groups.rank,)).process_group,
    ]
    return [handle._get_backend(torch.device("cpu")).options._timeout.total_seconds() for handle in made]


def test_a_groups_timeout_is_that_of_the_config(ranks: Ranks) -> None:
    config = ParallelConfig(tp=2, pp=2, distributed_timeout_minutes=0.75)
    assert ranks.run(timeouts, config) == [[45.0] * 4] * 8


def bound_to_a_gpu(config: ParallelConfig) -> tuple[bool, ...]:
    import torch
    import torch.distributed as dist

    from labkit.comm.p2p import second_communicator
    from labkit.parallel import initialize_model_parallel

    here = torch.device("cuda", 0)  # only the record of it: gloo never uses it
    dist.group.WORLD.bound_device_id = here
    try:
        groups = initialize_model_parallel(config)
        made = [groups.tp.process_group, second_communicator(groups).process_group]
        return *(group.bound_device_id is None for group in made), dist.group.WORLD.bound_device_id == here
    finally:
        dist.group.WORLD.bound_device_id = None


def test_groups_of_a_world_bound_to_gpus_are_not_split_from_it(ranks: Ranks) -> None:
    # A split needs every rank of the world to call; here only members do.
    assert ranks.run(bound_to_a_gpu, ParallelConfig(tp=2, pp=4)) == [(True, True, True)] * 8
