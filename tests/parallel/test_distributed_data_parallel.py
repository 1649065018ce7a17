"""Bucketed data parallelism: equal to one process in every form, and what decides when a bucket may be sent."""

import math
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from labkit.comm.groups import cut_group
from labkit.config import OptimConfig, ParallelConfig, presets
from labkit.launch import run
from labkit.parallel import (
    ColumnParallelLinear,
    CommLedger,
    DistributedDataParallel,
    NaiveDataParallel,
    WeightGradStore,
    dropped,
    initialize_model_parallel,
    own_part,
    single_process_groups,
    wrap_model_chunks,
)
from labkit.parallel.parameters.parameter_record import record_of
from labkit.parallel.recompute import checkpoint
from labkit.train import pretrain

MICROBATCHES = 3
HIDDEN = 6


class Model(nn.Module):
    """What makes data parallelism hard: a weight used twice, a fused layer, one without gradient, a frozen one, two
    types, and an expert."""

    def __init__(self, group=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(10, HIDDEN))
        self.unused = nn.Parameter(torch.randn(7))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.fused = ColumnParallelLinear(
            "fused", HIDDEN, HIDDEN, group=group or single_process_groups().tp, gradient_accumulation_fusion=True
        )
        self.single = nn.Parameter(torch.randn(HIDDEN))
        self.expert = nn.Linear(HIDDEN, HIDDEN)
        for parameter in self.expert.parameters():
            parameter.allreduce = False
        self.double()
        self.single.data = self.single.data.float()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table[ids] * self.single.double()
        x = self.fused(x[:, None])[0][:, 0].tanh()
        x = x + self.expert(x)
        return (x @ self.table.t()).logsumexp(1).mean()


def ids(replica: int, microbatch: int) -> torch.Tensor:
    return torch.randint(10, (4,), generator=torch.Generator().manual_seed(10 * replica + microbatch))


def step(wrapped, replicas, finish=True) -> int:
    """One step's gradients; returns how many buckets were on their way when the last backward returned."""
    wrapped.zero_grad_buffer()
    batches = [(replica, microbatch) for replica in replicas for microbatch in range(MICROBATCHES)]
    for batch in batches:
        with wrapped.no_sync() if batch != batches[-1] else nullcontext():
            wrapped(ids(*batch)).backward()
    started = sum(bucket.started for bucket in getattr(wrapped, "buckets", ()))
    if finish:
        wrapped.finish_grad_sync()
    return started


def gradients(wrapped) -> dict[str, torch.Tensor]:
    return {name: p.main_grad.clone() for name, p in wrapped.module.named_parameters() if p.requires_grad}


def _train(options: dict, ep: int = 1):
    groups = initialize_model_parallel(ParallelConfig(ep=ep))
    wrapped = DistributedDataParallel(Model(groups.tp), groups, **options)
    with CommLedger() as ledger:
        started = [step(wrapped, [groups.dp.rank]) for _ in range(3)]
    calls = [(r.operation, r.group, r.bytes, r.phase, r.layer) for r in ledger.records]
    return gradients(wrapped), started, calls


OPTIONS = [
    {},
    {"bucket_size": 40},
    {"bucket_size": 1, "average_in_collective": True},
    {"overlap_grad_reduce": False, "average_in_collective": True},
    {"bucket_size": 40, "calculate_per_token_loss": True},
    {"bucket_size": 40, "num_distributed_optimizer_instances": 2},
    {"bucket_size": 1, "num_distributed_optimizer_instances": 2, "average_in_collective": True},
    {"num_distributed_optimizer_instances": 4},
    {"bucket_size": 40, "check_for_nan_in_grad": True},
]


@pytest.fixture(scope="module")
def alone():
    """Sums over the batches of four replicas, from one process."""
    groups = single_process_groups()
    wrapped = NaiveDataParallel(Model(), groups.dp_cp, groups.edp)
    step(wrapped, range(4))
    return gradients(wrapped)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_one_process_that_sees_all_batches(on_ranks, alone, options):
    results = on_ranks(_train, 4, options)
    share = 1 if options.get("calculate_per_token_loss") else 4
    for name, total in alone.items():
        found = results[0][0][name]
        rtol = 1e-5 if found.dtype == torch.float32 else 1e-12
        torch.testing.assert_close(found, (total / share).to(found.dtype), rtol=rtol, atol=1e-14)
        assert all(torch.equal(results[0][0][name], other[0][name]) for other in results), name
    assert not results[0][0]["unused"].any()
    assert all(phase == "gradients" for _, _, _, phase, _ in results[0][2])


@pytest.mark.parametrize(
    ("options", "started"),
    [
        ({"bucket_size": 1}, [0, 7, 7]),  # each parameter by itself; the first step learns
        ({}, [0, 3, 3]),  # float64, float32 and the expert's
        ({"overlap_grad_reduce": False}, [0, 0, 0]),
    ],
)
def test_buckets_leave_behind_the_backward_once_their_gradients_are_known(on_ranks, options, started):
    assert [counted for _, counted, _ in on_ranks(_train, 4, options)] == [started] * 4


def test_only_the_last_backward_counts():
    """A step may have more or fewer microbatches than that in which was learned."""
    wrapped = DistributedDataParallel(Model(), single_process_groups(), bucket_size=1)
    assert [step(wrapped, replicas) for replicas in ([0], [0, 1], [0], [0, 1, 2])] == [0, 7, 7, 7]


def test_all_ranks_reduce_in_one_order(on_ranks):
    for options in ({"bucket_size": 1}, {"bucket_size": 40, "num_distributed_optimizer_instances": 2}):
        calls = [calls for _, _, calls in on_ranks(_train, 4, options)]
        assert all(other == calls[0] for other in calls)


def test_the_same_run_twice_is_bit_equal(on_ranks):
    first, second = on_ranks(_train, 4, {"bucket_size": 40}), on_ranks(_train, 4, {"bucket_size": 40})
    for (a, *_), (b, *_) in zip(first, second):
        assert all(torch.equal(a[name], b[name]) for name in a)


def _beside_the_naive_twin():
    groups = initialize_model_parallel(ParallelConfig())
    naive = NaiveDataParallel(Model(), groups.dp_cp, groups.edp, grad_dtype=torch.float64)
    bucketed = DistributedDataParallel(Model(), groups, grad_dtype=torch.float64, bucket_size=40)
    for _ in range(2):
        step(naive, [groups.dp.rank])
        step(bucketed, [groups.dp.rank])
    return gradients(naive), gradients(bucketed)


def test_bit_equal_to_the_naive_twin_on_two_ranks(on_ranks):
    """Two addends commute, so there no bucket map may change a bit (from four ranks on it may)."""
    for naive, bucketed in on_ranks(_beside_the_naive_twin, 2):
        assert all(torch.equal(naive[name], bucketed[name]) for name in naive)


# ---- experts, shards, instances ----


def _expert_gradients(form: str, per_token: bool):
    groups = initialize_model_parallel(ParallelConfig(ep=2))
    if form == "naive":
        wrapped = NaiveDataParallel(Model(groups.tp), groups.dp_cp, groups.edp, average=not per_token)
    else:
        wrapped = DistributedDataParallel(
            Model(groups.tp), groups, average_in_collective=form == "average", calculate_per_token_loss=per_token
        )
    for parameter in wrapped.module.parameters():
        if parameter.requires_grad:
            parameter.main_grad.fill_(groups.rank + 1)
    wrapped.finish_grad_sync()
    own = {name: p.main_grad.flatten()[0].item() for name, p in wrapped.module.named_parameters() if p.requires_grad}
    return groups.edp.ranks, own["expert.weight"], own["table"]


@pytest.mark.parametrize(
    ("form", "per_token"), [("sum", False), ("average", False), ("sum", True), ("naive", False), ("naive", True)]
)
def test_experts_are_summed_over_their_own_group_and_divided_by_all_replicas(on_ranks, form, per_token):
    replicas = 1 if per_token else 4
    for edp, expert, dense in on_ranks(_expert_gradients, 4, form, per_token):
        assert len(edp) == 2
        assert expert == sum(rank + 1 for rank in edp) / replicas
        assert dense == sum(range(1, 5)) / replicas


def _scattered(instances: int):
    groups = initialize_model_parallel(ParallelConfig())
    options = {"bucket_size": 40, "num_distributed_optimizer_instances": instances}
    whole = DistributedDataParallel(Model(), groups, **options)
    parts = DistributedDataParallel(Model(), groups, distributed_optimizer=True, **options)
    for wrapped in (whole, parts):
        step(wrapped, [groups.dp.rank])
        step(wrapped, [groups.dp.rank])
    found = []
    for buffer, other in zip(parts.buffers, whole.buffers):
        for name, parameter in zip(buffer.names, buffer.parameters):
            lies_in_buffer = parameter.untyped_storage().data_ptr() == buffer.param_data.untyped_storage().data_ptr()
            found.append(lies_in_buffer and torch.equal(parameter, dict(zip(other.names, other.parameters))[name]))
        for bucket in buffer.buckets:
            mine = torch.zeros(buffer.plan.numel, dtype=torch.bool)
            own_part(mine[bucket.plan.start : bucket.plan.end], buffer.group).fill_(True)
            for name in bucket.plan.names:
                here = buffer.view(mine, name)
                ours, theirs = buffer.view(buffer.grad_data, name)[here], other.view(other.grad_data, name)[here]
                found.append(torch.allclose(ours, theirs, rtol=1e-13 if ours.dtype == torch.float64 else 1e-6, atol=0))
    return found


@pytest.mark.parametrize("instances", [1, 2])
def test_the_own_part_of_every_bucket_is_that_of_the_whole_reduction(on_ranks, instances):
    for found in on_ranks(_scattered, 4, instances):
        assert len(found) > 10 and all(found)


def test_the_hierarchical_form_sends_a_share_between_instances(on_ranks):
    """Each rank sends 1/w of the gradients across, where the flat form sends all of them."""
    instances, width = 2, 2
    for _, _, calls in on_ranks(_train, 4, {"num_distributed_optimizer_instances": instances}):
        sent = {}
        for operation, group, size, _, _ in calls:
            sent[operation, group] = sent.get((operation, group), 0) + size
        whole = sent["reduce_scatter", "dp_cp_within"]
        assert sent["all_reduce", "dp_cp_across"] * width == sent["all_gather", "dp_cp_within"] * width == whole
        assert ("all_reduce", "dp_cp") not in sent


def _wrong_when_dropped():
    groups = initialize_model_parallel(ParallelConfig())
    wrapped = DistributedDataParallel(Model(), groups)
    with dropped(operation="all_reduce", phase="gradients") as hook:
        step(wrapped, [groups.dp.rank])
    return hook.calls, gradients(wrapped)["table"]


def test_replicas_without_their_reduction_differ(on_ranks):
    (calls, a), (_, b), *_ = on_ranks(_wrong_when_dropped, 4)
    assert calls == 3 and not torch.allclose(a, b)


# ---- when a gradient is complete ----


class Layers(nn.Module):
    """Fused layers one after the other, the first of them used a second time at the end, as a tied weight is."""

    def __init__(self, group, recompute=False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            ColumnParallelLinear(
                f"layers.{i}", 8, 8, group=group, bias=i == 1, gradient_accumulation_fusion=True, dtype=torch.float64
            )
            for i in range(3)
        )
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.layers[0]):
            run = lambda x, layer=layer: layer(x)[0].tanh()  # noqa: E731
            x = checkpoint(run, x) if self.recompute else run(x)
        return x.square().sum()


def sample(rank: int, microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + microbatch)
    return torch.randn(3, 1, 8, generator=generator, dtype=torch.float64)


def _split_backward():
    """Whole backwards, then I and W, each of the second step's: gradients and buckets started after each."""
    groups = initialize_model_parallel(ParallelConfig())
    wrapped = DistributedDataParallel(Layers(groups.tp), groups, bucket_size=1)

    def whole():
        wrapped.zero_grad_buffer()
        for microbatch in range(2):
            with wrapped.no_sync() if microbatch == 0 else nullcontext():
                wrapped(sample(groups.rank, microbatch)).backward()
        wrapped.finish_grad_sync()
        return gradients(wrapped)

    def split():
        wrapped.zero_grad_buffer()
        store, started = WeightGradStore(), []
        for microbatch in range(2):
            with wrapped.no_sync():
                loss = wrapped(sample(groups.rank, microbatch))
                with store.collecting(microbatch):
                    loss.backward()
            started.append(sum(bucket.started for bucket in wrapped.buckets))
            with wrapped.no_sync() if microbatch == 0 else nullcontext():
                store.run(microbatch)
            started.append(sum(bucket.started for bucket in wrapped.buckets))
        wrapped.finish_grad_sync()
        return gradients(wrapped), started

    expected = whole()
    wrapped = DistributedDataParallel(Layers(groups.tp), groups, bucket_size=1)
    return expected, [split() for _ in range(2)]


def test_a_split_backward_is_complete_with_its_last_w(on_ranks):
    """Hooks fire in I, where fused layers have added nothing yet; the buckets leave in W."""
    for expected, (first, second) in on_ranks(_split_backward, 2):
        assert first[1] == [0, 0, 0, 0] and second[1] == [0, 0, 0, 4]
        for name, gradient in expected.items():
            assert torch.equal(second[0][name], gradient) and gradient.any()


def _always_allowed():
    """I and W with synchronisation allowed all the time: three arrivals make a gradient complete, not the first."""
    groups = initialize_model_parallel(ParallelConfig())
    wrapped = DistributedDataParallel(Layers(groups.tp), groups, bucket_size=1)
    found = []
    for _ in range(2):
        wrapped.zero_grad_buffer()
        store = WeightGradStore()
        for microbatch in range(2):
            with store.collecting(microbatch):
                wrapped(sample(groups.rank, microbatch)).backward()
        before = sum(bucket.started for bucket in wrapped.buckets)
        for microbatch in range(2):
            store.run(microbatch)
        found.append((before, sum(bucket.started for bucket in wrapped.buckets)))
        wrapped.finish_grad_sync()
    return gradients(wrapped), found


def test_hooks_that_fire_in_i_do_not_complete_a_gradient(on_ranks):
    expected = on_ranks(_split_backward, 2)[0][0]
    for found, started in on_ranks(_always_allowed, 2):
        assert started == [(0, 0), (0, 4)]
        assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def _recomputed(recompute: bool):
    groups = initialize_model_parallel(ParallelConfig())
    wrapped = DistributedDataParallel(Layers(groups.tp, recompute), groups, bucket_size=1)
    started = []
    for _ in range(2):
        wrapped.zero_grad_buffer()
        wrapped(sample(groups.rank, 0).requires_grad_()).backward()
        started.append(sum(bucket.started for bucket in wrapped.buckets))
        wrapped.finish_grad_sync()
    return gradients(wrapped), started


def test_a_parameter_of_two_recomputed_segments_arrives_twice(on_ranks):
    """Each segment runs a backward of its own, so the shared weight's hook fires for each."""
    plain, recomputed = on_ranks(_recomputed, 2, False), on_ranks(_recomputed, 2, True)
    for (expected, _), (found, started) in zip(plain, recomputed):
        assert started == [0, 4]
        assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def _another_path():
    """In the second step, one rank's backward leaves out the layers that are registered last."""
    groups = initialize_model_parallel(ParallelConfig())
    module = nn.ModuleList(nn.Linear(4, 4).double() for _ in range(3))
    wrapped = DistributedDataParallel(module, groups, bucket_size=1)
    started = []
    for number in range(2):
        wrapped.zero_grad_buffer()
        x = torch.ones(1, 4, dtype=torch.float64)
        for layer in list(module)[: 1 if number == 1 and groups.rank == 1 else 3]:
            x = layer(x)
        x.sum().backward()
        started.append(sum(bucket.started for bucket in wrapped.buckets))
        wrapped.finish_grad_sync()
    return started, gradients(wrapped)


def test_a_gradient_that_does_not_come_on_one_rank_delays_it_and_nothing_else(on_ranks):
    """Buckets that are complete wait for those before them, so that both ranks still reduce in one order."""
    (full, a), (partial, b) = on_ranks(_another_path, 2)
    assert (full, partial) == ([0, 6], [0, 0])
    assert all(torch.equal(a[name], b[name]) and a[name].any() for name in ("0.weight", "2.weight"))


def test_a_gradient_after_its_bucket_was_sent_is_an_error():
    wrapped = DistributedDataParallel(Model(), single_process_groups(), bucket_size=1)
    step(wrapped, [0])
    with pytest.raises(RuntimeError, match=r"arrived after bucket \d+ was sent"):
        wrapped(ids(0, 0)).backward()
    step(wrapped, [0])  # a new step mends it


# ---- several chunks on a rank ----


class Half(nn.Module):
    def __init__(self, tied: nn.Parameter) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4).double()
        self.tied = tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(x) @ self.tied


def _tied(data_parallel: str):
    """Two steps in which each chunk is started right after its own last backward, as the pipeline does."""
    groups = initialize_model_parallel(ParallelConfig())
    torch.manual_seed(0)
    tied = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
    optim = OptimConfig(precision="fp64", data_parallel=data_parallel, bucket_size=1)
    first, last = chunks = wrap_model_chunks([Half(tied), Half(tied)], groups, optim)
    sent_early = []
    for _ in range(2):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        x = torch.full((2, 4), groups.rank + 1.0, dtype=torch.float64)
        first(x).square().sum().backward()  # the chunk that owns the weight is done first
        first.start_grad_sync()
        if isinstance(first, DistributedDataParallel):
            sent_early.append([bucket.plan.names for bucket in first.buckets if bucket.started])
        last(x).sum().backward()
        last.start_grad_sync()
        for chunk in chunks:
            chunk.finish_grad_sync()
    wrapped = [chunk for chunk in chunks if isinstance(chunk, DistributedDataParallel)]
    holders = sum("tied" in buffer.names for chunk in wrapped for buffer in chunk.buffers)
    return tied.main_grad.clone(), sent_early, holders


def test_a_weight_of_two_chunks_is_sent_after_both(on_ranks):
    """Under a V the word embedding belongs to first and last stage of one rank."""
    naive, bucketed = on_ranks(_tied, 2, "naive"), on_ranks(_tied, 2, "bucketed")
    for (expected, *_), (found, sent_early, holders) in zip(naive, bucketed):
        assert torch.equal(found, expected) and found.any()
        assert holders == 1
        assert sent_early == [[("own.bias",), ("own.weight",)]] * 2


# ---- the rest ----


@given(shapes=st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=6), limit=st.integers(1, 30))
def test_main_grads_partition_the_buffer(shapes, limit):
    """Each element that is no padding belongs to exactly one parameter, and each parameter to one bucket."""
    module = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
    for options in ({}, {"distributed_optimizer": True}):
        wrapped = DistributedDataParallel(module, single_process_groups(), bucket_size=limit, **options)
        (buffer,) = wrapped.buffers
        for number, parameter in enumerate(module, start=1):
            assert parameter.main_grad.shape == parameter.shape
            parameter.main_grad.add_(number)
        counts = [int((buffer.grad_data == number).sum()) for number in range(1, len(shapes) + 1)]
        assert counts == [parameter.numel() for parameter in module]
        assert int((buffer.grad_data == 0).sum()) == buffer.plan.padding
        held = [id(p) for bucket in wrapped.buckets for p in bucket.parameters]
        assert sorted(held) == sorted(id(p) for p in module)


def test_buffers_are_kept_by_type_and_sixteen_bits_are_summed_in_fp32():
    module = nn.ParameterList(
        [nn.Parameter(torch.zeros(3, dtype=d)) for d in (torch.bfloat16, torch.float32, torch.bfloat16, torch.float64)]
    )
    module[2].allreduce = False
    wrapped = DistributedDataParallel(module, single_process_groups())
    kinds = [(b.param_dtype, b.grad_dtype, b.is_expert, b.names) for b in wrapped.buffers]
    assert kinds == [
        (torch.bfloat16, torch.float32, False, ("0",)),
        (torch.float32, torch.float32, False, ("1",)),
        (torch.float64, torch.float64, False, ("3",)),
        (torch.bfloat16, torch.float32, True, ("2",)),
    ]
    module[0].main_grad.fill_(2.0)
    wrapped.scale_gradients(0.25)
    assert module[0].main_grad.tolist() == [0.5] * 3


def test_a_step_forgets_the_gradients_of_the_one_before():
    """The first gradient replaces what was there, the second is added; a parameter that got none has zero."""
    module = nn.ParameterList([nn.Parameter(torch.zeros(3)) for _ in range(2)])
    wrapped = DistributedDataParallel(module, single_process_groups())
    for parameter in module:
        parameter.main_grad.fill_(math.nan)
    wrapped.zero_grad_buffer()
    for _ in range(2):
        with wrapped.no_sync():
            (3 * module[0]).sum().backward()
    wrapped.finish_grad_sync()
    assert [parameter.main_grad.tolist() for parameter in module] == [[6.0] * 3, [0.0] * 3]


def test_gradients_that_somebody_else_adds_start_from_zero():
    """As those of Transformer Engine's layers, which add to `main_grad` and know nothing of a first gradient."""
    module = nn.ParameterList([nn.Parameter(torch.zeros(3))])
    record_of(module[0]).added_elsewhere = True
    wrapped = DistributedDataParallel(module, single_process_groups())
    module[0].main_grad.fill_(math.nan)
    wrapped.zero_grad_buffer()
    module[0].main_grad.add_(1.0)
    wrapped.finish_grad_sync()
    assert module[0].main_grad.tolist() == [1.0] * 3


def test_later_pipeline_ranks_and_no_overlap_make_one_bucket():
    module = nn.ParameterList([nn.Parameter(torch.zeros(3)) for _ in range(4)])
    second = initialize_model_parallel(ParallelConfig(pp=2), rank=1, world_size=2)
    first = initialize_model_parallel(ParallelConfig(pp=2), rank=0, world_size=2)
    assert len(DistributedDataParallel(module, first, bucket_size=1).buckets) == 4
    assert len(DistributedDataParallel(module, first, bucket_size=1, overlap_grad_reduce=False).buckets) == 1
    assert len(DistributedDataParallel(module, second, bucket_size=1).buckets) == 1


def test_groups_are_cut_into_runs_of_neighbours():
    for rank in range(8):
        groups = initialize_model_parallel(ParallelConfig(tp=2), rank=rank, world_size=16)
        within, across = cut_group(groups, groups.dp_cp, 4)
        assert within.ranks == ((0, 2), (1, 3), (4, 6), (5, 7))[rank // 4 * 2 + rank % 2]
        assert across.ranks == tuple(range(rank % 4, 16, 4))
        assert within.ranks[within.rank] == across.ranks[across.rank] == rank
        assert cut_group(groups, groups.dp_cp, 4) == (within, across)
        assert cut_group(groups, groups.dp_cp, 1)[0] is groups.dp_cp


def test_bad_input_is_refused():
    groups = initialize_model_parallel(ParallelConfig(), rank=0, world_size=4)
    with pytest.raises(ValueError, match="excludes calculate_per_token_loss"):
        DistributedDataParallel(Model(), groups, average_in_collective=True, calculate_per_token_loss=True)
    with pytest.raises(ValueError, match="dp_cp has 4 ranks, which cannot be cut into 3 equal parts"):
        DistributedDataParallel(Model(), groups, num_distributed_optimizer_instances=3)
    with pytest.raises(ValueError, match="needs distributed_optimizer"):
        DistributedDataParallel(Model(), groups, overlap_param_gather=True)
    wrapped = DistributedDataParallel(Model(), single_process_groups())
    for synchronise in (wrapped.start_grad_sync, wrapped.finish_grad_sync):
        with wrapped.no_sync(), pytest.raises(RuntimeError, match=r"inside no_sync\(\)"):
            synchronise()


@pytest.mark.parametrize("options", [{}, {"distributed_optimizer": True, "calculate_per_token_loss": True}], ids=str)
def test_a_run_with_gradients_in_bf16_keeps_its_loss(options):
    """A gradient of 4 microbatches on 2 ranks is rounded 5 times to 8 bits, by 2^-9 of itself each time, and nobody
    rounds the norm. The loss of the first step is untouched; later ones differ by less than the 2^-8 of bf16 logits."""
    shape = {"layers": 2, "hidden": 32, "heads": 4, "seq_length": 32, "global_batch_size": 8, "steps": 4}
    config = presets.tiny().override({**shape, **options, "precision": "bf16", "record_events": False})
    wide, narrow = (run(pretrain, 2, config.override({"grad_reduce_in_bf16": on}))[0] for on in (False, True))
    assert wide.losses[0] == narrow.losses[0] and wide.losses[-1] < wide.losses[0]
    assert narrow.losses == pytest.approx(wide.losses, rel=2**-8)
    (_, norm), (_, expected) = (result.series("grad_norm")[0] for result in (narrow, wide))
    assert norm != expected and norm == pytest.approx(expected, rel=5 * 2**-9)
