"""Every rank replays the reference's choice for the very tokens that the data pipeline gives it.

Shapes: S sequence, B micro batch, E experts.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from labkit.comm.groups import ParallelGroups, initialize_model_parallel
from labkit.config import RunConfig, presets
from labkit.data.batches import microbatch_positions
from labkit.parallel.context.zigzag import zigzag_positions
from labkit.train.parity.routing_trace import own_records, record_routings, replay_routings

STEPS, S, B = 3, 16, 2
SP = {"sequence_parallel": True}
LAYOUTS = [
    ({}, 1),
    ({}, 4),
    ({"cp": 2}, 4),
    ({"tp": 2, **SP}, 4),
    ({"tp": 2, "cp": 2, **SP, "ep": 4, "etp": 1}, 8),
    ({"cp": 4, "pp": 2}, 8),
]


def config_of(layout: dict[str, object]) -> RunConfig:
    small = {"moe.num_experts": 8, "seq_length": S, "micro_batch_size": B, "global_batch_size": 16, "layers": 2}
    return presets.tiny().override({**small, **layout})


def named_tokens(config: RunConfig) -> list[Tensor]:
    """Records in which every token has a number of its own, position in the dataset x S + place: [S, B, 1] each."""
    place = torch.arange(S).view(S, 1, 1)
    samples = (microbatch_positions(config, dp=1, dp_rank=0, step=step) for step in range(STEPS))
    return [torch.from_numpy(row).view(1, B, 1) * S + place for rows in samples for row in rows]


def groups_of(config: RunConfig, rank: int, world_size: int) -> ParallelGroups:
    return initialize_model_parallel(config.parallel, rank=rank, world_size=world_size)


@pytest.mark.parametrize(("layout", "world_size"), LAYOUTS, ids=str)
def test_a_rank_keeps_the_tokens_that_it_reads(layout, world_size):
    config = config_of(layout)
    records, seen = named_tokens(config), 0
    for rank in range(world_size):
        groups = groups_of(config, rank, world_size)
        dp, cp, tp = groups.dp, groups.cp, groups.tp
        places = zigzag_positions(S, cp.size, cp.rank)
        if "sequence_parallel" in layout:
            places = places.view(tp.size, -1)[tp.rank]
        samples = [microbatch_positions(config, dp=dp.size, dp_rank=dp.rank, step=step) for step in range(STEPS)]
        wanted = [torch.from_numpy(row)[None] * S + places[:, None] for rows in samples for row in rows]
        own = list(own_records(records, config, groups, range(config.num_microbatches(world_size))))
        assert len(own) == len(wanted)
        for mine, tokens in zip(own, wanted):
            assert torch.equal(mine.squeeze(-1), tokens)
        seen += sum(mine.numel() for mine in own)
    copies = config.parallel.pp * (1 if "sequence_parallel" in layout else config.parallel.tp)
    assert seen == copies * STEPS * 16 * S, "every token once, but for ranks that hold the same"


def test_microbatches_come_in_the_order_of_the_stage():
    config = config_of({})
    records = named_tokens(config)
    forwards = [3, 0, 2, 1, 7, 6, 5, 4]
    own = list(own_records(records, config, groups_of(config, 0, 1), forwards))
    assert [int(record[0, 0]) for record in own[:8]] == [int(records[number][0, 0]) for number in forwards]
    assert torch.equal(own[8], records[8 + 3]), "the second step begins after all of the first"


def test_records_of_another_batch_are_refused():
    config = config_of({})
    records = named_tokens(config)
    with pytest.raises(ValueError, match="23 records and 8 microbatches per rank do not fit 8 microbatches per step"):
        list(own_records(records[:-1], config, groups_of(config, 0, 1), range(8)))
    with pytest.raises(ValueError, match=r"24 records and 8 microbatches per rank do not fit 8 .* on 2 replicas"):
        list(own_records(records, config, groups_of(config, 0, 2), range(8)))


class Router(nn.Module):
    """As much of a router as a trace needs."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.record, self.replay = name, None, None


@pytest.fixture
def routers(monkeypatch):
    """The chunks of a rank with two stages, one router each."""
    monkeypatch.setattr("labkit.moe.router.TopKRouter", Router)
    return [nn.Sequential(Router("layers.0.mlp.router")), nn.Sequential(Router("layers.1.mlp.router"))]


def test_each_router_writes_a_list_of_its_own_and_reads_its_own(routers):
    config = config_of({})
    lists = record_routings(routers)
    assert list(lists) == ["layers.0.mlp.router", "layers.1.mlp.router"]
    for number, chunk in enumerate(routers):
        chunk[0].record.append(torch.tensor(number))
    assert [int(records[0]) for records in lists.values()] == [0, 1]
    traces = {name: [record + 1000 * number for record in named_tokens(config)] for number, name in enumerate(lists)}
    actions = [SimpleNamespace(kind="F", stage=stage, microbatch=number) for number in range(8) for stage in (0, 1)]
    schedule = SimpleNamespace(stages_of=lambda _: (0, 1), actions=lambda _: actions)
    replay_routings(traces, config, groups_of(config, 0, 1), routers, schedule)
    for chunk, records in zip(routers, traces.values()):
        assert len(chunk[0].replay.records) == len(records)
        assert all(torch.equal(mine, record) for mine, record in zip(chunk[0].replay.records, records))


def test_a_router_that_the_reference_lacks_is_named(routers):
    config = config_of({})
    schedule = SimpleNamespace(stages_of=lambda _: (0, 1), actions=lambda _: [])
    with pytest.raises(ValueError, match=r"the reference has no layers\.0\.mlp\.router; it has layers\.5\.mlp\.router"):
        replay_routings({"layers.5.mlp.router": []}, config, groups_of(config, 0, 1), routers, schedule)
