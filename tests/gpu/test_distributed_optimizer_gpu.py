"""The distributed optimizer on CUDA: two ranks on one GPU through the host, and NCCL where each rank has a GPU."""

from __future__ import annotations

import pytest
import torch

from labkit.config import presets
from labkit.launch import run
from labkit.train import pretrain

pytestmark = pytest.mark.gpu

ZERO = {"optim.distributed_optimizer": True, "optim.overlap_param_gather": True}


def losses(precision: str, zero: bool) -> list[float]:
    config = presets.tiny().override(
        {
            "model.layers": 2,
            "train.steps": 4,
            "train.global_batch_size": 4,
            "optim.precision": precision,
            "optim.bucket_size": 20_000,
            "optim.clip_grad": 0.0,
            **(ZERO if zero else {}),
        }
    )
    return pretrain(config).losses


def through(backend: str) -> None:
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip(f"NCCL needs a GPU for each of 2 ranks; there is {torch.cuda.device_count()}")


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_losses_are_those_of_the_whole_optimizer(backend: str, precision: str) -> None:
    """A gather that a forward did not wait for on its stream would show from the second step on."""
    through(backend)
    whole, zero = (run(losses, 2, precision, z, backend=backend, device="cuda", timeout=300.0) for z in (False, True))
    assert zero[0] == pytest.approx(whole[0], rel=1e-5 if precision == "fp32" else 1e-2)
    assert whole[0][-1] < whole[0][0]


def cublas_workspaces_taken() -> None:
    """cuBLAS keeps up to 32 MiB of torch's memory for each thread and stream, from its first product on: this thread's,
    and that of autograd."""
    x = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.nn.functional.linear(x, x).float().sum().backward()


def bytes_held(zero: bool, grad_dtype: torch.dtype) -> int:
    """Bytes of the allocator that live on from building and stepping an optimizer over 64 MB of weights."""
    from labkit.config import OptimConfig, ParallelConfig
    from labkit.parallel import DistributedDataParallel, initialize_model_parallel
    from labkit.train.pretraining import build_optimizer

    groups = initialize_model_parallel(ParallelConfig())
    optim = OptimConfig(precision="bf16", distributed_optimizer=zero)
    cublas_workspaces_taken()
    before = torch.cuda.memory_allocated()
    module = torch.nn.Linear(4096, 8192, bias=False, device=groups.device, dtype=torch.bfloat16)
    chunk = DistributedDataParallel(module, groups, grad_dtype=grad_dtype, distributed_optimizer=zero)
    optimizer = build_optimizer([chunk], optim, layout=groups)
    chunk.zero_grad_buffer()
    chunk(torch.ones(1, 4096, device=groups.device, dtype=torch.bfloat16)).float().sum().backward()
    chunk.finish_grad_sync()
    optimizer.step(1e-3)
    chunk.finish_param_sync()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before


def test_the_allocator_holds_the_bytes_of_the_closed_form() -> None:
    """18 bytes a parameter, and 6 + 12/2 with the optimizer sharded over two ranks; 2 less with gradients in bf16."""
    numel = 4096 * 8192
    for zero, grad_dtype, formula in (
        *((False, torch.float32, 18), (True, torch.float32, 12)),
        *((False, torch.bfloat16, 16), (True, torch.bfloat16, 10)),
    ):
        for held in run(bytes_held, 2, zero, grad_dtype, backend="gloo", device="cuda", timeout=300.0):
            assert held == pytest.approx(formula * numel, rel=0.01)
