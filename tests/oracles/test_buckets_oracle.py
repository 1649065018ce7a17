"""Gradient buffers beside megatron-core's, and gradients beside those of its and torch's DistributedDataParallel."""

import random
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from labkit.config import ParallelConfig
from labkit.launch import run
from labkit.parallel import DistributedDataParallel, ParameterSpec, initialize_model_parallel, plan_buckets
from labkit.parallel.parameters.parameter_record import record_of

pytestmark = pytest.mark.oracle


def _megatron() -> Any:
    import megatron_on_cpu

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import distributed, parallel_state
        from megatron.core.distributed import param_and_grad_buffer
    megatron_on_cpu.settle()
    return SimpleNamespace(distributed=distributed, state=parallel_state, buffers=param_and_grad_buffer)


def _theirs(sizes: list[int], shared: int | None, dp: int, limit: int | None, zero: bool, pad: bool) -> Any:
    """megatron-core's buffer for parameters of these sizes; no rank but this one exists."""
    megatron = _megatron()
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    if shared is not None:
        parameters[shared].shared_embedding = True
    group = SimpleNamespace(size=lambda: dp, rank=lambda: 0)
    buffer = megatron.buffers._ParamAndGradBuffer(
        megatron.distributed.DistributedDataParallelConfig(
            use_distributed_optimizer=zero, pad_buckets_for_high_nccl_busbw=pad
        ),
        torch.float32,
        torch.float32,
        parameters,
        group,
        limit,
        {parameter: f"p{i}" for i, parameter in enumerate(parameters)},
        1.0,
        list(range(len(sizes))),
        False,
        SimpleNamespace(tp=group, dp_cp=group),
    )
    ranges = {f"p{i}": buffer.param_index_map[parameter][:2] for i, parameter in enumerate(parameters)}
    names = [
        tuple(name for p in bucket.params_list for name in ranges if parameters[int(name[1:])] is p)
        for bucket in buffer.buckets
    ]
    return ranges, buffer.bucket_indices, names, buffer.numel


def _both_layouts() -> int:
    """Compares 150 layouts; their buffers want torch.distributed, so this runs in a rank."""
    chosen = random.Random(0)
    for _ in range(150):
        sizes = [chosen.choice([1, 7, 50, 64, 100, 128, 300, 1000]) for _ in range(chosen.randint(1, 9))]
        shared = chosen.choice([None, 0, len(sizes) - 1])
        dp, limit = chosen.choice([1, 2, 3, 4, 6, 8]), chosen.choice([None, 1, 128, 256, 700])
        zero, pad = chosen.random() < 0.7, chosen.random() < 0.2
        specs = [ParameterSpec(f"p{i}", size, i == shared) for i, size in enumerate(sizes)]
        ours = plan_buckets(
            specs, dp=dp, bucket_size=limit, distributed_optimizer=zero, pad=2**16 if pad and zero else 1
        )
        ranges, buckets, names, numel = _theirs(sizes, shared, dp, limit, zero, pad)
        case = (sizes, shared, dp, limit, zero, pad)
        assert ours.ranges == ranges, case
        assert [(bucket.start, bucket.end) for bucket in ours.buckets] == buckets, case
        assert [bucket.names for bucket in ours.buckets] == names, case
        assert ours.numel == numel, case
    return 150


def test_layouts_are_megatrons():
    assert run(_both_layouts, 1) == [150]


class Model(nn.Module):
    """A weight used twice, and an expert."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(11, 6))
        self.inner = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))
        self.expert = nn.Linear(6, 6)
        for parameter in self.expert.parameters():
            parameter.allreduce = False
        self.to(dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.inner(self.table[ids])
        return ((x + self.expert(x)) @ self.table.t()).logsumexp(1).mean()


def _batches(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(11, (5,), generator=generator) for _ in range(3)]


def _steps(wrapped: Any, rank: int) -> None:
    """Two steps, so that the second one overlaps."""
    for _ in range(2):
        wrapped.zero_grad_buffer()
        first, second, last = _batches(rank)
        with wrapped.no_sync():
            wrapped(first).backward()
            wrapped(second).backward()
        wrapped(last).backward()
        wrapped.finish_grad_sync()


def _gradients(module: nn.Module, attribute: str) -> dict[str, torch.Tensor]:
    return {name: getattr(parameter, attribute).clone() for name, parameter in module.named_parameters()}


def _beside_megatron(cases: list[tuple[bool, bool, int]], dtype: torch.dtype) -> list[Any]:
    groups = initialize_model_parallel(ParallelConfig(ep=2))
    ours = []
    for average, per_token, limit in cases:
        options = {"average_in_collective": average, "calculate_per_token_loss": per_token, "bucket_size": limit}
        wrapped = DistributedDataParallel(Model(dtype), groups, grad_dtype=dtype, **options)
        _steps(wrapped, groups.rank)
        ours.append(_gradients(wrapped.module, "main_grad"))
    megatron = _megatron()
    megatron.state.initialize_model_parallel(expert_model_parallel_size=2)
    from megatron.core.transformer import TransformerConfig

    theirs = []
    for average, per_token, limit in cases:
        config = TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=1, calculate_per_token_loss=per_token
        )
        options = {"overlap_grad_reduce": True, "average_in_collective": average, "bucket_size": limit}
        setting = megatron.distributed.DistributedDataParallelConfig(grad_reduce_in_fp32=False, **options)
        wrapped = megatron.distributed.DistributedDataParallel(config, setting, Model(dtype))
        _steps(wrapped, groups.rank)
        theirs.append(_gradients(wrapped.module, "main_grad"))
    return list(zip(cases, ours, theirs))


def test_gradients_are_megatrons_with_experts_of_their_own_group():
    cases = [(False, False, 40), (True, False, 40), (False, True, 1), (False, False, 10_000)]
    for compared in run(_beside_megatron, 4, cases, torch.float64):
        for case, ours, theirs in compared:
            for name, gradient in theirs.items():
                assert torch.allclose(ours[name], gradient, rtol=1e-12, atol=1e-14) and gradient.any(), (case, name)


def test_gradients_in_bf16_are_megatrons_to_the_bit():
    """Three microbatches add up in bf16, then two ranks: the scaling, each addition and its rounding are the same."""
    for compared in run(_beside_megatron, 2, [(False, False, 40), (True, False, 10_000)], torch.bfloat16):
        for case, ours, theirs in compared:
            for name, gradient in theirs.items():
                assert ours[name].dtype == gradient.dtype == torch.bfloat16 and gradient.any(), (case, name)
                assert torch.equal(ours[name], gradient), (case, name)


def _beside_torch() -> Any:
    groups = initialize_model_parallel(ParallelConfig())
    ours = DistributedDataParallel(Model(), groups, bucket_size=40)
    for parameter in ours.module.parameters():
        record_of(parameter).allreduce = True
    _steps(ours, groups.rank)
    theirs = nn.parallel.DistributedDataParallel(Model())
    first, second, last = _batches(groups.rank)
    with theirs.no_sync():
        theirs(first).backward()
        theirs(second).backward()
    theirs(last).backward()
    return _gradients(ours.module, "main_grad"), _gradients(theirs.module, "grad")


def test_gradients_are_those_of_torchs():
    for ours, theirs in run(_beside_torch, 3):
        for name, gradient in theirs.items():
            torch.testing.assert_close(ours[name], gradient, rtol=1e-12, atol=1e-14)
