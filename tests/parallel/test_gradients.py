"""Finalisation, global norm and clipping over tp x pp x dp, against the gradient of the whole model on one process."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inputs import random
from torch import Tensor, nn

from labkit.config import OptimConfig, ParallelConfig
from labkit.parallel import (
    CommLedger,
    NaiveDataParallel,
    ParallelGroups,
    initialize_model_parallel,
    single_process_groups,
)
from labkit.parallel.data_parallel.gradients import (
    GradientStatistics,
    clip_factor,
    finalize_model_grads,
    gradient_statistics,
)
from labkit.parallel.data_parallel.optimizer import Optimizer, parameter_groups
from labkit.parallel.parameters.parameter_record import record_of
from labkit.parallel.parameters.weights import make_parameter, tensor_part


class Stage(nn.Module):
    """One matrix cut by columns, one norm held whole, and on the first and last stage a copy of a tied table."""

    def __init__(self, groups: ParallelGroups) -> None:
        super().__init__()
        stage = groups.pp.rank
        common = {"std": 1.0, "dtype": torch.float64}
        self.matrix = make_parameter(f"{stage}.matrix", (4, 3), group=groups.tp, partition_dim=0, **common)
        self.norm = make_parameter(f"{stage}.norm", (5,), **common)
        record_of(self.norm).sequence_parallel = True
        self.table = None
        if stage in (0, groups.pp.size - 1):
            self.table = make_parameter("table", (6, 2), group=groups.tp, partition_dim=0, **common)
            record_of(self.table).shared_embedding = True
            record_of(self.table).shared = stage > 0


def filled(groups: ParallelGroups) -> tuple[NaiveDataParallel, dict[str, Tensor]]:
    """A wrapped stage with other gradients on each dp rank (for the norm on each tp rank too), and what they become."""
    stage = Stage(groups)
    wrapped = NaiveDataParallel(stage, groups.dp_cp)
    expected: dict[str, Tensor] = {}
    replicas = range(groups.dp.size)
    for name, parameter in stage.named_parameters():
        copies = range(groups.pp.size) if name == "table" else [groups.pp.rank]
        parts = range(groups.tp.size) if name == "norm" else [0]  # partial sums over the sequence
        full = {
            (replica, copy, part): random(
                *record_of(parameter).full_shape, seed=1000 * len(name) + 100 * replica + 10 * copy + part
            )
            for replica in replicas
            for copy in copies
            for part in parts
        }
        expected[name] = torch.stack(list(full.values())).sum(0) / len(replicas)
        part = groups.tp.rank if name == "norm" else 0
        mine = full[groups.dp.rank, groups.pp.rank if name == "table" else copies[0], part]
        if record_of(parameter).tensor_model_parallel:
            mine = tensor_part(mine, groups.tp.rank, groups.tp.size, 0)
        parameter.main_grad.copy_(mine)
    return wrapped, expected


def statistics_of(chunks: list[nn.Module], groups: ParallelGroups) -> GradientStatistics:
    """Norm and finiteness as a training step asks for them."""
    optimizer = Optimizer(parameter_groups(chunks), OptimConfig(), layout=groups)
    counted, others = optimizer.gradient_pieces(), optimizer.uncounted_pieces()
    return gradient_statistics(counted, others, optimizer.norm_groups, groups.device)


def finalized(with_tokens: bool, last_stage: int | None = None) -> tuple[dict[str, list[float]], float, int]:
    groups = initialize_model_parallel(ParallelConfig(tp=2, pp=2))
    wrapped, expected = filled(groups)
    # Counts are known on the last stage alone; what other stages pass must not matter.
    last = groups.pp.rank == (groups.pp.size - 1 if last_stage is None else last_stage)
    tokens = torch.tensor(3.0 + groups.dp.rank if last else 777.0, dtype=torch.float64) if with_tokens else None
    finalize_model_grads([wrapped], groups, num_tokens=tokens, last_stage=last_stage)
    scale = sum(3.0 + r for r in range(groups.dp.size)) if with_tokens else 1.0
    for name, parameter in wrapped.module.named_parameters():
        whole = expected[name] / scale
        mine = tensor_part(whole, groups.tp.rank, 2, 0) if record_of(parameter).tensor_model_parallel else whole
        torch.testing.assert_close(parameter.main_grad, mine, rtol=1e-13, atol=1e-13)
    with CommLedger() as ledger:
        norm = statistics_of([wrapped], groups).norm
    values = {name: (grad / scale).flatten().tolist() for name, grad in expected.items()}
    return {f"{groups.pp.rank}.{k}" if k != "table" else k: v for k, v in values.items()}, norm, ledger.count()


@pytest.mark.parametrize(("world_size", "with_tokens", "last"), [(4, 0, None), (8, 0, None), (8, 1, None), (8, 1, 0)])
def test_every_gradient_becomes_that_of_the_global_batch_and_the_norm_counts_it_once(
    on_ranks, world_size: int, with_tokens: int, last: int | None
) -> None:
    results = on_ranks(finalized, world_size, bool(with_tokens), last)
    whole: dict[str, list[float]] = {}
    for gradients, _, _ in results:
        whole |= gradients
    assert set(whole) == {"0.matrix", "0.norm", "1.matrix", "1.norm", "table"}
    exact = math.sqrt(sum(x * x for values in whole.values() for x in values))
    norms = {norm for _, norm, _ in results}
    assert len(norms) == 1, "every rank must hold the same bits, else replicas drift apart"
    assert norms.pop() == pytest.approx(exact, rel=1e-13)
    assert {calls for _, _, calls in results} == {2 if world_size > 4 else 1}, "over tp x pp, then over the replicas"


class Plain(nn.Module):
    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(len(values), dtype=torch.float64))
        self.weight.main_grad = torch.tensor(values, dtype=torch.float64)


@given(
    values=st.lists(st.floats(-1e3, 1e3, allow_subnormal=False), min_size=1, max_size=8), max_norm=st.floats(1e-3, 1e3)
)
def test_clipping_equals_torchs_on_one_process(values: list[float], max_norm: float) -> None:
    model, reference = Plain(values), torch.nn.Parameter(torch.zeros(len(values), dtype=torch.float64))
    reference.grad = torch.tensor(values, dtype=torch.float64)
    expected = torch.nn.utils.clip_grad_norm_([reference], max_norm)
    norm = statistics_of([model], single_process_groups()).norm
    assert norm == pytest.approx(float(expected), rel=1e-12, abs=1e-150)  # squares underflow below
    clipped = model.weight.main_grad * clip_factor(norm, max_norm)
    torch.testing.assert_close(clipped, reference.grad, rtol=1e-12, atol=1e-150)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_clips_nothing(bad: float) -> None:
    found = statistics_of([Plain([3.0, bad])], single_process_groups())
    assert not found.finite and clip_factor(found.norm, 1.0) == 1.0


def test_a_parameter_that_two_chunks_share_is_scaled_and_counted_once() -> None:
    first, second = Plain([3.0, 4.0]), Plain([0.0])
    second.weight = first.weight
    assert statistics_of([first, second], single_process_groups()).norm == 5.0
    finalize_model_grads([first, second], single_process_groups(), num_tokens=torch.tensor(2))
    torch.testing.assert_close(first.weight.main_grad, torch.tensor([1.5, 2.0], dtype=torch.float64))


def counted(layout: dict[str, int]) -> tuple[int, int, float, dict[str, int]]:
    """(elements that this rank counts, elements that it only looks at, the norm, this rank's parameters)."""
    groups = initialize_model_parallel(ParallelConfig(**layout))
    wrapped, _ = filled(groups)
    finalize_model_grads([wrapped], groups)
    optimizer = Optimizer(parameter_groups([wrapped]), OptimConfig(), layout=groups)
    pieces, others = optimizer.gradient_pieces(), optimizer.uncounted_pieces()
    statistics = gradient_statistics(pieces, others, optimizer.norm_groups, groups.device)
    assert statistics.finite
    if others:
        others[-1].view(-1)[0] = math.nan if groups.rank == groups.world_size - 1 else 0.0
    spoiled = gradient_statistics(pieces, others, optimizer.norm_groups, groups.device)
    assert spoiled[:2] == (statistics.norm, False), "a replica that is not finite stops every rank and changes no norm"
    for asking in range(groups.world_size):  # to stop the run
        asked = gradient_statistics(pieces, others, optimizer.norm_groups, groups.device, stop=groups.rank == asking)
        assert asked.stop and asked.norm == statistics.norm and not statistics.stop, "every rank hears of it"
    sizes = {name: math.prod(record_of(p).full_shape) for name, p in wrapped.module.named_parameters()}
    names = {name if name == "table" else f"{groups.pp.rank}.{name}": size for name, size in sizes.items()}
    elements = (sum(x.numel() for x in pieces), sum(x.numel() for x in others))
    return *elements, statistics.norm, names


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_over_all_ranks_the_optimizer_counts_every_element_once(on_ranks, layout: dict[str, int]) -> None:
    results = on_ranks(counted, 4, layout)
    whole: dict[str, int] = {}
    for *_, names in results:
        whole |= names
    assert sum(result[0] for result in results) == sum(whole.values())
    assert all(result[0] + result[1] > 0 for result in results)
    assert len({result[2] for result in results}) == 1
