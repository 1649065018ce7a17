"""The distributed optimizer beside megatron-core's and torch's ZeroRedundancyOptimizer, on the same model and data."""

import random
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from labkit.config import OptimConfig, ParallelConfig
from labkit.launch import run
from labkit.parallel import (
    DistributedDataParallel,
    DistributedOptimizer,
    ParameterSpec,
    initialize_model_parallel,
    pieces_of_rank,
    plan_buckets,
)
from labkit.parallel.data_parallel.gradients import clip_factor, gradient_statistics, scale_gradients
from labkit.parallel.data_parallel.optimizer import parameter_groups

pytestmark = pytest.mark.oracle

STEPS = 4
OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-5, clip_grad=0.5)


def _megatron() -> Any:
    import megatron_on_cpu

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import distributed, optimizer, parallel_state
        from megatron.core.distributed import param_and_grad_buffer
        from megatron.core.optimizer import distrib_optimizer
        from megatron.core.transformer import TransformerConfig
    megatron_on_cpu.settle()
    return SimpleNamespace(
        distributed=distributed,
        optimizer=optimizer,
        state=parallel_state,
        buffers=param_and_grad_buffer,
        sharded=distrib_optimizer.DistributedOptimizer,
        transformer=TransformerConfig,
    )


def _their_pieces(sizes: list[int], dp: int, rank: int, limit: int | None) -> list[tuple[int, str, int, int, int]]:
    """(bucket, name, start, end, offset in the parameter) of all that megatron-core gives to `rank`."""
    megatron = _megatron()
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    names = {parameter: f"p{i}" for i, parameter in enumerate(parameters)}
    group = SimpleNamespace(size=lambda: dp, rank=lambda: rank)
    megatron.buffers.log_on_each_pipeline_stage = lambda *args, **kwargs: None  # asks a running torch.distributed
    buffer = megatron.buffers._ParamAndGradBuffer(
        megatron.distributed.DistributedDataParallelConfig(use_distributed_optimizer=True),
        torch.float32,
        torch.float32,
        parameters,
        group,
        limit,
        names,
        1.0,
        list(range(len(sizes))),
        False,
        SimpleNamespace(tp=group, dp_cp=group),
    )
    (by_bucket,) = megatron.sharded._build_gbuf_range_map(buffer).values()
    found = []
    for bucket, shard in enumerate(by_bucket):
        for parameter, ranges in shard["param_map"].items():
            place = ranges["gbuf_world"]
            found.append((bucket, names[parameter], place.start, place.end, ranges["param"].start))
    return sorted(found)


def _owners_agree() -> int:
    chosen = random.Random(0)
    for _ in range(60):
        sizes = [chosen.choice([1, 7, 50, 64, 100, 128, 300, 1000]) for _ in range(chosen.randint(1, 9))]
        dp, limit = chosen.choice([1, 2, 3, 4, 6, 8]), chosen.choice([None, 1, 128, 256, 700])
        specs = [ParameterSpec(f"p{i}", size) for i, size in enumerate(sizes)]
        plan = plan_buckets(specs, dp=dp, bucket_size=limit, distributed_optimizer=True)
        for rank in range(dp):
            ours = sorted(
                (p.bucket, p.name, p.start, p.end, p.offset_in_parameter) for p in pieces_of_rank(plan, dp, rank)
            )
            assert ours == _their_pieces(sizes, dp, rank, limit), (sizes, dp, limit, rank)
    return 60


def test_every_rank_owns_what_megatron_gives_it() -> None:
    assert run(_owners_agree, 1) == [60]


class Model(nn.Module):
    """Enough parameters for several buckets, of sizes that no alignment likes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(13, 31), nn.LayerNorm(31), nn.Linear(31, 5)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def _loss(model: nn.Module, step: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(6, 13, generator=generator, dtype=torch.float64).to(dtype)
    return model(x).to(torch.promote_types(dtype, torch.float32)).logsumexp(1).square().mean()


def _ours(dtype: torch.dtype, overlap: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    groups = initialize_model_parallel(ParallelConfig())
    chunk = DistributedDataParallel(
        Model(dtype),
        groups,
        bucket_size=100,
        distributed_optimizer=True,
        overlap_param_gather=overlap,
    )
    optimizer = DistributedOptimizer(parameter_groups([chunk]), [chunk], groups, OPTIM)
    norms = []
    for step in range(STEPS):
        chunk.zero_grad_buffer()
        _loss(chunk, step, groups.rank, dtype).backward()
        chunk.finish_grad_sync()
        statistics = gradient_statistics(
            optimizer.gradient_pieces(), optimizer.uncounted_pieces(), optimizer.norm_groups, groups.device
        )
        norms.append(statistics.norm)
        scale_gradients([chunk], clip_factor(statistics.norm, OPTIM.clip_grad))
        optimizer.step(OPTIM.lr)
    chunk.finish_param_sync()
    return norms, {name: p.detach().clone() for name, p in chunk.module.named_parameters()}


def _megatrons(dtype: torch.dtype, overlap: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    megatron = _megatron()
    megatron.state.initialize_model_parallel()
    kind_of = torch.Tensor.type
    torch.Tensor.type = lambda self, *args: (  # its optimizer sorts parameters by the names of GPU types
        kind_of(self, *args) if args else kind_of(self).replace("torch.", "torch.cuda.", 1)
    )
    config = megatron.transformer(num_layers=1, hidden_size=8, num_attention_heads=1, bf16=dtype == torch.bfloat16)
    setting = megatron.distributed.DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        use_distributed_optimizer=True,
        overlap_param_gather=overlap,
        bucket_size=100,
    )
    chunk = megatron.distributed.DistributedDataParallel(config, setting, Model(dtype))
    optimizer = megatron.optimizer.get_megatron_optimizer(
        megatron.optimizer.OptimizerConfig(
            optimizer="adam",
            lr=OPTIM.lr,
            weight_decay=OPTIM.weight_decay,
            adam_beta1=OPTIM.beta1,
            adam_beta2=OPTIM.beta2,
            adam_eps=OPTIM.eps,
            clip_grad=OPTIM.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
            overlap_param_gather=overlap,
        ),
        [chunk],
    )
    for group in optimizer.param_groups:  # its scheduler does this ahead of every step
        group["weight_decay"] = OPTIM.weight_decay * group["wd_mult"]
    norms = []
    for step in range(STEPS):
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        _loss(chunk, step, torch.distributed.get_rank(), dtype).backward()
        chunk.finish_grad_sync()
        _, norm, _ = optimizer.step()
        norms.append(norm)
    if overlap:
        chunk.disable_forward_pre_hook()  # which gathers
    return norms, {name: p.detach().clone() for name, p in chunk.module.named_parameters()}


def _side_by_side(dtype: torch.dtype, overlap: bool) -> tuple[Any, Any]:
    return _ours(dtype, overlap), _megatrons(dtype, overlap)


@pytest.mark.parametrize(("dtype", "overlap"), [(torch.float32, False), (torch.bfloat16, True)], ids=str)
def test_parameters_are_those_of_megatrons_distributed_optimizer(dtype: torch.dtype, overlap: bool) -> None:
    for (our_norms, ours), (their_norms, theirs) in run(_side_by_side, 3, dtype, overlap):
        assert our_norms == pytest.approx(their_norms, rel=1e-5)
        for name, parameter in theirs.items():
            close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-6}
            torch.testing.assert_close(ours[name], parameter, **close)
            assert not torch.equal(parameter, dict(Model(dtype).named_parameters())[name])


def _torchs() -> tuple[dict[str, torch.Tensor], int]:
    """Parameters after the same steps, and the elements whose moments this rank keeps."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

    wrapped = TorchDDP(Model(torch.float64))
    decayed = [p for p in wrapped.parameters() if p.ndim > 1]
    plain = [p for p in wrapped.parameters() if p.ndim == 1]
    optimizer = ZeroRedundancyOptimizer(
        [{"params": decayed, "weight_decay": OPTIM.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        optimizer_class=torch.optim.AdamW,
        lr=OPTIM.lr,
        betas=(OPTIM.beta1, OPTIM.beta2),
        eps=OPTIM.eps,
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        _loss(wrapped, step, torch.distributed.get_rank(), torch.float64).backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), OPTIM.clip_grad)
        optimizer.step()
    kept = sum(state["exp_avg"].numel() for state in optimizer.optim.state.values())
    return {name: p.detach().clone() for name, p in wrapped.module.named_parameters()}, kept


def _beside_torch() -> tuple[Any, Any]:
    return _ours(torch.float64, True), _torchs()


def test_parameters_are_those_of_torchs_zero_redundancy_optimizer() -> None:
    """It deals out whole parameters, so that the largest one decides what a rank keeps; cutting them is even."""
    results = run(_beside_torch, 2)
    for (_, ours), (theirs, _) in results:
        for name, parameter in theirs.items():
            torch.testing.assert_close(ours[name], parameter, rtol=1e-12, atol=1e-14)
    sizes = [(f"p{i}", p.numel()) for i, p in enumerate(Model(torch.float64).parameters())]
    plan = plan_buckets([ParameterSpec(*s) for s in sizes], dp=2, bucket_size=100, distributed_optimizer=True)
    most = max(sum(piece.numel for piece in pieces_of_rank(plan, 2, rank)) for rank in range(2))
    total = sum(size for _, size in sizes)
    assert sum(kept for _, (_, kept) in results) == total
    assert most <= max(kept for _, (_, kept) in results)
