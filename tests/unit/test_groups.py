"""ParallelGroups in a process without torch.distributed: places in the pipeline, stages of chunks, refusals."""

import pytest
import torch

from labkit.comm.group_plan import GROUP_KINDS
from labkit.comm.groups import ParallelGroups, initialize_model_parallel, single_process_groups
from labkit.config import ParallelConfig, presets
from labkit.train.pretraining import initialize


def groups_at(rank: int, world_size: int, **layout) -> ParallelGroups:
    return initialize_model_parallel(ParallelConfig(**layout), rank=rank, world_size=world_size)


def test_a_plain_process_is_a_world_of_one() -> None:
    for groups in (initialize_model_parallel(ParallelConfig()), single_process_groups()):
        for kind in ("world", *GROUP_KINDS):
            group = getattr(groups, kind)
            assert (group.name, group.ranks, group.rank, group.process_group) == (kind, (0,), 0, None)
        assert groups.backend == "none"
        assert groups.is_first_stage() and groups.is_last_stage()


def test_single_process_groups_keep_the_chunks_and_drop_the_sizes() -> None:
    groups = single_process_groups(ParallelConfig(tp=2, pp=2, cp=2, vpp=2, split_rank=1, rank_offset=4))
    assert (groups.config.tp, groups.config.pp, groups.config.cp, groups.config.vpp) == (1, 1, 1, 2)
    assert groups.is_first_stage(0) and not groups.is_last_stage(0)
    assert groups.is_last_stage(1) and not groups.is_first_stage(1)


def test_a_plain_process_uses_the_cpu_unless_a_gpu_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # as on a machine with GPUs
    for groups in (single_process_groups(), initialize_model_parallel(ParallelConfig()), groups_at(6, 16, tp=2)):
        assert groups.device == torch.device("cpu")
    assert single_process_groups(device="cuda").device == torch.device("cuda")
    assert single_process_groups(device="cuda").backend == "none"
    tiny = presets.tiny().override({"train.allow_oversubscription": True})  # nobody asks the GPU for its memory
    assert initialize(tiny).groups.device == torch.device("cuda", 0), "training takes the GPU"


def test_groups_of_one_rank_of_the_16_gpu_example() -> None:
    groups = groups_at(6, 16, tp=2, pp=4)
    assert groups.tp.ranks == (6, 7) and groups.tp.rank == 0
    assert groups.dp.ranks == (4, 6) and groups.dp.rank == 1
    assert groups.pp.ranks == (2, 6, 10, 14) and groups.pp.rank == 1
    assert groups.mp.ranks == (2, 3, 6, 7, 10, 11, 14, 15)
    assert groups.embd.ranks == () and groups.embd.rank == -1 and groups.embd.size == 0, "a middle stage is in none"
    assert groups_at(14, 16, tp=2, pp=4).embd.ranks == (2, 14)


def test_first_and_last_stage_of_interleaved_chunks() -> None:
    stages = {
        (rank, chunk): (groups.is_first_stage(chunk), groups.is_last_stage(chunk))
        for rank in range(4)
        for groups in [groups_at(rank, 4, pp=4, vpp=2)]
        for chunk in range(2)
    }
    assert [where for where, (first, _) in stages.items() if first] == [(0, 0)]
    assert [where for where, (_, last) in stages.items() if last] == [(3, 1)]
    with pytest.raises(ValueError, match="chunk 2 does not exist; a rank holds vpp = 2 chunks"):
        groups_at(0, 4, pp=4, vpp=2).is_first_stage(2)


def test_offset_moves_every_group() -> None:
    groups = groups_at(5, 4, tp=2, rank_offset=4)
    assert groups.world.ranks == (4, 5, 6, 7) and groups.tp.ranks == (4, 5) and groups.dp.ranks == (5, 7)
    with pytest.raises(ValueError, match="rank 3 is not in this layout, whose ranks are 4 to 7"):
        groups_at(3, 4, tp=2, rank_offset=4)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tp": 3}, "world size 8 is not a multiple of tp 3 x cp 1 x pp 1 = 3"),
        ({"ep": 16}, "world size 8 is not a multiple of etp 1 x ep 16 x pp 1 = 16"),
        ({"distributed_timeout_minutes": 0.0}, "distributed_timeout_minutes is 0.0"),
        ({"pp": 2, "split_rank": 2}, "is 2 and pp is 2"),
    ],
)
def test_refusals(layout: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        groups_at(0, 8, **layout)


def test_a_world_too_large_to_list_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="the group of all ranks would list 2147483648 ranks"):
        groups_at(0, 2**31, tp=8, pp=2**20)


def test_a_mesh_needs_torch_distributed() -> None:
    with pytest.raises(ValueError, match=r"needs torch.distributed; call this inside labkit.launch.run"):
        single_process_groups().device_mesh("dp", "tp")
