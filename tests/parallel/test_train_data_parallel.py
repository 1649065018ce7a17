"""The naive data-parallel twin: equal to one process that sees every replica's batch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from labkit.comm.groups import initialize_model_parallel, single_process_groups
from labkit.comm.ledger import CommLedger
from labkit.config import ParallelConfig
from labkit.launch import run
from labkit.parallel.data_parallel.naive import NaiveDataParallel

MICROBATCHES = 3


def model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).to(dtype)


def batch(replica: int, microbatch: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * replica + microbatch)
    return torch.randn(4, 5, generator=generator, dtype=torch.float64).to(dtype)


def backward_passes(wrapped: NaiveDataParallel, replicas: list[int]) -> None:
    wrapped.zero_grad_buffer()
    with wrapped.no_sync():
        for replica in replicas:
            for microbatch in range(MICROBATCHES):
                wrapped(batch(replica, microbatch)).square().mean().backward()


def train_on_a_rank(average: bool) -> tuple[dict[str, torch.Tensor], list[tuple]]:
    groups = initialize_model_parallel(ParallelConfig())
    wrapped = NaiveDataParallel(model(), groups.dp_cp, average=average)
    backward_passes(wrapped, [groups.dp.rank])
    with CommLedger() as ledger:
        wrapped.start_grad_sync()
        wrapped.finish_grad_sync()
    calls = [(r.operation, r.group_size, r.bytes, r.phase) for r in ledger.records]
    return {name: p.main_grad.clone() for name, p in wrapped.module.named_parameters()}, calls


@pytest.mark.parametrize("average", [True, False])
def test_equals_one_process_that_sees_all_batches(average):
    alone = NaiveDataParallel(model(), single_process_groups().dp_cp)
    backward_passes(alone, [0, 1, 2])
    results = run(train_on_a_rank, 3, average)
    for grads, calls in results:
        assert calls == [("all_reduce", 3, alone.grad_buffer.numel() * 8, "gradients")]
        for name, param in alone.module.named_parameters():
            expected = param.main_grad / 3 if average else param.main_grad
            torch.testing.assert_close(grads[name], expected, rtol=1e-13, atol=1e-15)
    for name, grad in results[0][0].items():
        assert all(torch.equal(grad, other[name]) for other, _ in results[1:]), f"replicas disagree on {name}"


def test_the_same_run_twice_is_bit_equal():
    first, second = run(train_on_a_rank, 2, True), run(train_on_a_rank, 2, True)
    for (a, _), (b, _) in zip(first, second):
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_main_grads_are_fp32_views_of_one_buffer_for_bf16_weights():
    module = model(torch.bfloat16)
    wrapped = NaiveDataParallel(module, single_process_groups().dp_cp)
    for microbatch in range(MICROBATCHES):
        wrapped(batch(0, microbatch, torch.bfloat16)).square().mean().backward()
    total = 0
    for param in module.parameters():
        assert param.grad is None
        assert param.main_grad.dtype == torch.float32
        assert param.main_grad.untyped_storage().data_ptr() == wrapped.grad_buffer.untyped_storage().data_ptr()
        assert param.main_grad.any()
        total += param.numel()
    assert wrapped.grad_buffer.numel() == total
    wrapped.zero_grad_buffer()
    assert not any(param.main_grad.any() for param in module.parameters())


@given(shapes=st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=6))
def test_main_grads_partition_the_buffer(shapes):
    """Each element of the buffer belongs to exactly one parameter, whatever the shapes."""
    module = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
    wrapped = NaiveDataParallel(module, single_process_groups().dp_cp)
    for number, param in enumerate(module, start=1):
        assert param.main_grad.shape == param.shape
        param.main_grad.add_(number)
    counts = [int((wrapped.grad_buffer == number).sum()) for number in range(1, len(shapes) + 1)]
    assert counts == [param.numel() for param in module]
    assert sum(counts) == wrapped.grad_buffer.numel()


def test_a_wrapped_chunk_answers_like_a_bare_one():
    module = model()
    module.pre_process = True
    wrapped = NaiveDataParallel(module, single_process_groups().dp_cp)
    assert wrapped.pre_process is True
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = wrapped.no_such_thing


def test_experts_without_their_group_are_refused():
    module = model()
    module[2].weight.allreduce = False
    with pytest.raises(ValueError, match=r"give it groups\.edp"):
        NaiveDataParallel(module, single_process_groups().dp_cp)


def test_synchronising_inside_no_sync_is_refused():
    wrapped = NaiveDataParallel(model(), single_process_groups().dp_cp)
    with wrapped.no_sync(), pytest.raises(RuntimeError, match="no_sync"):
        wrapped.start_grad_sync()
    wrapped.start_grad_sync()
    wrapped.finish_grad_sync()
