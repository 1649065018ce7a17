"""The arithmetic of the parity microscope: differences, joining shards, order of the first difference, the report."""

import math
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from labkit.comm.groups import initialize_model_parallel
from labkit.config import ConfigError, presets
from labkit.parallel.parameters.weights import tensor_part
from labkit.schedules import build_schedule
from labkit.train.lr_schedule import build_lr_schedule
from labkit.train.parity.assemble import FullRun, assemble, join_replicas, join_shards, join_zigzag
from labkit.train.parity.comparison import ParityReport, ParityRow, compare, differences, tensor_difference
from labkit.train.parity.snapshots import Recorder, Shard, Snapshot


def test_difference_is_relative_to_the_reference():
    b = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert tensor_difference(b + torch.tensor([0.0, 0.05]), b) == pytest.approx(0.01)


def test_the_floor_keeps_noise_small():
    noise = torch.full((4,), 1e-18, dtype=torch.float64)
    assert tensor_difference(-noise, noise) == 2.0
    assert tensor_difference(-noise, noise, floor=1e-6) == pytest.approx(4e-12)


def test_differences_without_a_scale():
    zero = torch.zeros(3)
    assert tensor_difference(zero, zero) == 0.0
    assert tensor_difference(torch.ones(3), zero) == math.inf
    assert tensor_difference(torch.full((3,), math.nan), torch.ones(3)) == math.inf
    assert tensor_difference(torch.ones(3), torch.ones(4)) == math.inf


@given(tp=st.integers(1, 4), stride=st.integers(1, 3), dim=st.integers(0, 1), data=st.data())
def test_joining_is_the_inverse_of_slicing(tp, stride, dim, data):
    rows, columns = (data.draw(st.integers(1, 3)) * (tp * stride if d == dim else 1) for d in range(2))
    full = torch.arange(rows * columns).reshape(rows, columns)
    parts = [tensor_part(full, rank, tp, dim, stride) for rank in range(tp)]
    assert torch.equal(join_shards(parts, dim, stride), full)


def shard(values: torch.Tensor, dim: int | None = None, *, shared: bool = False, rows: int | None = None) -> Shard:
    return Shard(values.clone(), dim, 1, rows or len(values), shared)


def ranks_of_tp2_pp2() -> tuple[list[Snapshot], torch.Tensor]:
    """Two stages of two tensor-parallel ranks; word embedding of 3 rows padded to 4, tied to the last stage."""
    word = torch.arange(8.0).reshape(4, 2)
    snapshots = []
    for pp in (0, 1):
        for tp in (0, 1):
            part = shard(word[2 * tp : 2 * tp + 2], 0, shared=pp == 1, rows=3)
            own = {"first.bias": shard(torch.ones(2))} if pp == 0 else {"last.bias": shard(torch.ones(2))}
            params = {0: {"embedding.word.weight": part, **own}}
            name = "embedding" if pp == 0 else "layers.0"
            order = ["embedding.word.weight", "first.bias"] if pp == 0 else ["last.bias"]
            activations = {name: torch.ones(2, 1, 2)}
            snapshots.append(Snapshot(tp, 0, 0, pp, [1.5], activations, params, deepcopy(params), order))
    return snapshots, word


def test_assembling_joins_shards_and_stages_and_drops_padding_and_the_tied_copy():
    snapshots, word = ranks_of_tp2_pp2()
    whole = assemble(reversed(snapshots))
    assert list(whole.parameters[0]) == ["embedding.word.weight", "first.bias", "last.bias"]
    assert torch.equal(whole.parameters[0]["embedding.word.weight"], word[:3])
    assert list(whole.activations) == ["embedding", "layers.0"]
    assert whole.disagreements == []


def test_replicas_that_differ_in_one_bit_are_named():
    snapshots, _ = ranks_of_tp2_pp2()
    snapshots[1].gradients[0]["first.bias"].tensor[0] += 2**-23
    snapshots[3].parameters[0]["embedding.word.weight"].tensor[0, 0] += 1
    snapshots[2].losses = [1.25]
    assert assemble(snapshots).disagreements == [
        "first.bias gradient (tp replicas)",
        "embedding.word.weight parameter (tied copies)",
        "loss",
    ]


def test_sequence_parallel_outputs_are_joined_along_the_sequence():
    snapshots, _ = ranks_of_tp2_pp2()
    for snapshot in snapshots:
        for output in snapshot.activations.values():
            output.fill_(snapshot.tp)
    assert assemble(snapshots, sequence_parallel=True).activations["embedding"][:, 0, 0].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_context_parallel_outputs_are_joined_chunk_by_chunk(cp):
    """The first and the last chunk are rank 0's, the two in the middle the last rank's; sp cuts a rank's part again."""
    chunks = torch.arange(2.0 * cp * 6).reshape(2 * cp, 6, 1, 1)
    parts = [torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]]) for rank in range(cp)]
    assert torch.equal(join_zigzag(parts), chunks.flatten(0, 1))
    snapshots = [
        Snapshot(tp, rank, 0, 0, activations={"embedding": half})
        for rank, part in enumerate(parts)
        for tp, half in enumerate(part.chunk(2))
    ]
    whole = assemble(snapshots, sequence_parallel=True)
    assert torch.equal(whole.activations["embedding"], chunks.flatten(0, 1))
    for snapshot in snapshots:
        snapshot.dp = 1
    others = [replace(s, dp=0, activations={"embedding": s.activations["embedding"] + 1}) for s in snapshots]
    joined = assemble([*snapshots, *others], sequence_parallel=True).activations["embedding"]
    assert torch.equal(joined, chunks.flatten(0, 1) + 1), "outputs are those of the first replica"


def test_context_parallel_ranks_whose_tensor_parallel_copies_differ_are_named_once():
    snapshots = [Snapshot(tp, cp, activations={"embedding": torch.ones(2, 1, 1)}) for tp in (0, 1) for cp in (0, 1)]
    assert assemble(snapshots).disagreements == []
    snapshots[2].activations["embedding"][0] += 1
    snapshots[3].activations["embedding"][0] += 1
    assert assemble(snapshots).disagreements == ["embedding output (tp ranks)"]


@given(cuts=st.lists(st.integers(0, 12), max_size=4), rows=st.sampled_from([1, 3, 4]))
def test_shards_are_joined_wherever_they_are_cut(cuts, rows):
    full = torch.arange(12.0).reshape(rows, -1)
    edges = [0, *sorted(cuts), 12]
    replicas = []
    for start, end in pairwise(edges):
        tensor = torch.full_like(full, -1.0)
        tensor.view(-1)[start:end] = full.view(-1)[start:end]
        replicas.append(Shard(tensor, None, 1, rows, False, ((start, end),) if end > start else ()))
    joined, agree = join_replicas(replicas)
    assert agree and torch.equal(joined, full)


def test_an_element_that_nobody_owns_differs_from_everything_and_two_owners_must_agree():
    tensor = torch.ones(6)
    missing, _ = join_replicas([Shard(tensor, None, 1, 6, False, owned) for owned in (((0, 2),), ((3, 6),))])
    assert missing.isnan().tolist() == [False, False, True, False, False, False]
    assert tensor_difference(missing, tensor) == math.inf
    twice = [Shard(t, None, 1, 6, False, ((0, 6),)) for t in (tensor, tensor.clone())]
    assert join_replicas(twice)[1]
    twice[1].tensor[5] = 2.0
    assert not join_replicas(twice)[1]


def test_an_expert_that_is_whole_everywhere_is_joined_over_tp_as_well():
    """Its shards lie on the ranks of edp: tp times dp, where etp is 1."""
    full = torch.arange(8.0)
    snapshots = []
    for number, (dp, tp) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        own = (2 * number, 2 * number + 2)
        piece = torch.full((8,), -1.0)
        piece[own[0] : own[1]] = full[own[0] : own[1]]
        kept = {0: {"layers.0.mlp.fc1.bias": Shard(piece, None, 1, 8, False, (own,), expert=True)}}
        snapshots.append(Snapshot(tp, 0, dp, 0, gradients=kept))
    joined = assemble(snapshots)
    assert torch.equal(joined.gradients[0]["layers.0.mlp.fc1.bias"], full)
    assert joined.disagreements == []


def whole() -> FullRun:
    weights = {"embedding.weight": torch.ones(4), "layers.0.weight": torch.ones(4), "final.weight": torch.ones(4)}
    outputs = {"embedding": torch.ones(2), "layers.0": torch.ones(2)}
    copies = [{name: w.clone() for name, w in weights.items()} for _ in range(4)]
    return FullRun([2.0, 1.0], outputs, {0: copies[0], 1: copies[1]}, {0: copies[2], 1: copies[3]}, [])


def test_tensors_are_compared_in_the_order_of_training():
    assert [name for name, _, _ in differences(whole(), whole(), lr=0.1)] == [
        "embedding output", "layers.0 output", "loss",
        "final.weight gradient", "layers.0.weight gradient", "embedding.weight gradient",
        "embedding.weight parameter", "layers.0.weight parameter", "final.weight parameter",
        "loss of step 2",
        "final.weight gradient of step 2", "layers.0.weight gradient of step 2", "embedding.weight gradient of step 2",
        "embedding.weight parameter of step 2", "layers.0.weight parameter of step 2",
        "final.weight parameter of step 2",
    ]  # fmt: skip


def test_floors_are_those_of_the_standard():
    changed, reference = whole(), whole()
    reference.gradients[0]["layers.0.weight"].zero_()
    changed.gradients[0]["layers.0.weight"].zero_()[0] = 1e-9
    changed.parameters[0]["final.weight"].zero_()
    reference.parameters[0]["final.weight"].zero_()[0] = 1e-3
    found = {name: value for name, _, value in differences(changed, reference, lr=0.1)}
    assert found["layers.0.weight gradient"] == pytest.approx(1e-9 / (1e-6 * math.sqrt(8)))
    assert found["final.weight parameter"] == pytest.approx(1e-3 / (0.1 * 2))


def test_a_tensor_that_the_layout_lacks_counts_as_different():
    changed = whole()
    del changed.gradients[0]["layers.0.weight"]
    found = {name: value for name, _, value in differences(changed, whole(), lr=0.1)}
    assert found["layers.0.weight gradient"] == math.inf


ROW = ParityRow({"tp": 2}, 2, "tp2 pp1 dp1", 1e-15, 2e-14, 3e-13, None, "equal")


def test_the_report_says_what_came_out():
    good = ParityReport([ROW], 3, "float64", 1e-10, [6.9])
    assert good.ok
    assert good.sentence == "1 of 1 layouts agree with one process to 1e-10 over 3 optimizer steps in float64."
    bad = replace(
        good, rows=[ROW, replace(ROW, name="tp4 pp1 dp1", first_difference="layers.1.mlp output", verdict="fault")]
    )
    assert not bad.ok
    assert bad.sentence == "tp4 pp1 dp1 differs from one process, first in layers.1.mlp output."
    lines = bad.table().splitlines()
    assert lines[1].split() == ["tp2", "pp1", "dp1", "2", "1.0e-15", "2.0e-14", "3.0e-13", "equal", "none"]
    assert lines[2].endswith("fault    layers.1.mlp output")
    assert ROW.largest == 3e-13


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({"hidden_dropout": 0.1}, {}, "model.hidden_dropout is 0.1"),
        ({}, {"dtype": "bfloat16"}, "dtype is 'bfloat16'"),
        ({}, {"steps": 0}, "steps is 0"),
        ({}, {"layouts": [{"tp": 3}]}, "tp"),
        ({}, {"layouts": [{"tp": 2, "world_size": 3}]}, "world"),
        ({}, {"layouts": [{"tpp": 2}]}, "tpp"),
        ({}, {"fault": {"operation": "allreduce"}}, 'did you mean "all_reduce"'),
        ({}, {"fault": {"groups": "tp"}}, 'did you mean "group"'),
        ({}, {"fault": {}}, "must name an operation"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_launched(changes, arguments, message, monkeypatch):
    monkeypatch.setattr("labkit.launch.run", lambda *_, **__: pytest.fail("launched"))
    with pytest.raises(ValueError, match=message):
        compare(presets.tiny().override(changes), **{"layouts": [{"tp": 2}], **arguments})


def test_a_fault_that_matched_nothing_is_no_agreement():
    report = ParityReport([ROW], 3, "float64", 1e-10, [6.9], {"operation": "all_reduce", "group": "pp"})
    assert report.fault_missed and not report.ok
    assert "operation=all_reduce,group=pp matched no call in any layout" in report.sentence
    harmless = replace(report, rows=[ROW, replace(ROW, dropped_calls=2)])
    assert harmless.ok and "agree with one process" in harmless.sentence


@pytest.mark.parametrize(("given", "minutes"), [({}, 3.0), ({"timeout": 90.0}, 1.5)])
def test_backend_time_limit_and_device_reach_every_launch(monkeypatch, given, minutes):
    seen = []

    def launch(fn, world_size, *args, **options):
        seen.append((world_size, options))
        return [(Snapshot(losses=[1.0], gradients={0: {}}, parameters={0: {}}), 0)] * world_size

    monkeypatch.setattr("labkit.launch.run", launch)
    config = presets.tiny().override({"distributed_backend": "gloo", "distributed_timeout_minutes": 3.0})
    compare(config, [{"tp": 2}], steps=1, device="cpu", on_run=lambda *named: named, **given)
    wanted = {"backend": "gloo", "distributed_timeout_minutes": minutes, "device": "cpu"}
    names = ("one process", 1), ("tp2 pp1 dp1", 2)
    assert seen == [(ranks, wanted | {"progress": (name, ranks)}) for name, ranks in names]


def test_few_steps_of_a_run_with_a_long_warm_up_keep_its_learning_rates(monkeypatch):
    configs = []

    def launch(fn, world_size, config, *args, **options):
        configs.append(config)
        return [(Snapshot(losses=[1.0], gradients={0: {}}, parameters={0: {}}), 0)] * world_size

    monkeypatch.setattr("labkit.launch.run", launch)
    config = presets.tiny().override({"warmup_steps": 10})
    compare(config, [{"tp": 2}], steps=2)
    for launched in configs:
        rates = [build_lr_schedule(c.optim, c.train.steps) for c in (launched, config)]
        assert [rates[0](step) for step in (0, 1)] == [rates[1](step) for step in (0, 1)] == [0.0, 1e-4]


def test_the_one_process_has_no_option_of_a_pipeline(monkeypatch):
    """Base and layouts may name a schedule with its options; refused with one stage, they are left out there."""
    configs = []

    def launch(fn, world_size, config, *args, **options):
        configs.append(config)
        return [(Snapshot(losses=[1.0], gradients={0: {}}, parameters={0: {}}), 0)] * world_size

    monkeypatch.setattr("labkit.launch.run", launch)
    pipeline = {"pp": 2, "vpp": 2, "pipeline_layout": "E t|ttt|t*3|tL", "schedule.name": "interleaved"}
    transfers = {"overlap_p2p_comm": True, "microbatch_group_size": 4, "variable_seq_lengths": True}
    config = presets.tiny().override(pipeline | transfers)
    report = compare(config, [{}, {"schedule.name": "zbv", "vpp": 1, "overlap_p2p_comm": False,
                                   "microbatch_group_size": None}], steps=1)  # fmt: skip
    alone, *launched = configs
    assert (alone.parallel.pp, alone.parallel.vpp, alone.parallel.pipeline_layout) == (1, 1, None)
    assert (alone.schedule.name, alone.schedule.microbatch_group_size) == ("auto", None)
    assert [c.schedule.name for c in launched] == ["interleaved", "zbv"]
    assert [row.name for row in report.rows] == [
        "tp1 pp2 dp1 vpp2 interleaved E t|ttt|t*3|tL variable lengths group 4",
        "tp1 pp2 dp1 zbv E t|ttt|t*3|tL variable lengths",
    ]


def test_a_table_that_cannot_drive_a_layout_is_refused_before_any_process_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("labkit.launch.run", lambda *_, **__: pytest.fail("ranks were started"))
    path = tmp_path / "own.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    layout = {"pp": 2, "schedule.path": str(path)}
    with pytest.raises(ConfigError, match="2 microbatches, the run has 16"):
        compare(presets.tiny(), [layout])
    with pytest.raises(ConfigError, match="7 layers cannot be shared evenly by 2 stages"):
        compare(presets.tiny().override({"layers": 7, "global_batch_size": 2}), [layout])


class Child(nn.Module):
    """A layer whose weight its parent uses without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))


class Parent(nn.Module):
    """Uses a layer by calling it, then the weights of two others, registered before and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.called, self.late = Child(), nn.Linear(1, 1, bias=False), Child()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.called(x) * self.late.weight * self.early.weight


def test_weights_whose_module_is_not_called_come_after_what_was_called_before_them():
    chunk = nn.Sequential(Parent(), nn.Linear(1, 1, bias=False))
    for name, parameter in chunk.named_parameters():
        parameter.full_name = name
    groups = initialize_model_parallel(presets.tiny().parallel, rank=0, world_size=1)
    recorder = Recorder((0,), presets.tiny())
    recorder.on_model(groups, [chunk], build_schedule(presets.tiny().schedule, pp=1, vpp=1, microbatches=1))
    for _ in range(2):
        chunk(torch.ones(1, 1))
    assert recorder.snapshot.order == ["0.called.weight", "0.early.weight", "0.late.weight", "1.weight"]


def test_a_routers_weights_are_kept_by_position_and_its_bias_among_the_parameters():
    """[T, E] is laid out as the input's [S, B]; the bias is a buffer, and alike on all ranks."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(3))
            self.register_buffer("expert_bias", torch.arange(3.0))

        def forward(self, x_SBH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scores_TE = x_SBH.flatten(0, 1) @ self.weight
            return scores_TE, scores_TE > 0

    chunk = nn.ModuleDict({"layers": nn.ModuleDict({"3": nn.ModuleDict({"mlp": nn.ModuleDict({"router": Router()})})})})
    router = chunk["layers"]["3"]["mlp"]["router"]
    router.weight.full_name = "layers.3.mlp.router.weight"
    chunk.forward = lambda x: router(x)
    groups = initialize_model_parallel(presets.tiny().parallel, rank=0, world_size=1)
    recorder = Recorder((0,), presets.tiny())
    recorder.on_model(groups, [chunk], build_schedule(presets.tiny().schedule, pp=1, vpp=1, microbatches=1))
    x_SBH = torch.randn(4, 2, 3)
    chunk(x_SBH)
    assert torch.equal(recorder.snapshot.activations["layers.3.mlp.router"], x_SBH)
    recorder.on_update(0, [chunk])
    kept = recorder.snapshot.parameters[0]["layers.3.mlp.router.expert_bias"]
    assert torch.equal(kept.tensor, torch.arange(3.0)) and kept.partition_dim is None
    assert kept.tensor is not router.expert_bias, "a copy, which later steps leave alone"
