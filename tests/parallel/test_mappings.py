"""Each operator and its conjugate are transposes of each other: <A x, y> = <x, A* y> over all ranks, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from inputs import random, whole_world
from torch import Tensor

from labkit.parallel import CommLedger, Group, all_gather, all_reduce, comm_scope
from labkit.parallel import mappings as m

Operator = Callable[[Tensor, Group], Tensor]


def over_ranks(x: Tensor, group: Group) -> float:
    """A sum over ranks of a scalar each."""
    return float(all_reduce(x.detach().clone().reshape(1), group))


def uneven_all_to_all(x: Tensor, group: Group) -> Tensor:
    return m.all_to_all(x, group, [group.rank + 1] * group.size, list(range(1, group.size + 1)))


def gather_for_replicated(x: Tensor, group: Group) -> Tensor:
    return m.gather_from_sequence_parallel_region(x, group, tensor_parallel_output_grad=False)


def adjoints() -> None:
    group = whole_world()
    t, rank = group.size, group.rank
    rows = t * (t + 1) // 2
    # (operator, input shape, whether the input, whether the output is one tensor that all ranks hold alike)
    cases: list[tuple[Operator, tuple[int, ...], bool, bool]] = [
        (m.copy_to_tensor_model_parallel_region, (3, 2, 4), True, False),
        (m.reduce_from_tensor_model_parallel_region, (3, 2, 4), False, True),
        (m.scatter_to_tensor_model_parallel_region, (3, 2, 2 * t), True, False),
        (m.gather_from_tensor_model_parallel_region, (3, 2, 4), False, True),
        (m.scatter_to_sequence_parallel_region, (2 * t, 2, 3), True, False),
        (gather_for_replicated, (2, 3), False, True),
        (m.gather_from_sequence_parallel_region, (2, 2, 3), False, False),
        (m.reduce_scatter_to_sequence_parallel_region, (2 * t, 2, 3), False, False),
        (m.all_to_all, (2 * t, 3), False, False),
        (uneven_all_to_all, (rows, 3), False, False),
    ]
    for number, (operator, shape, alike_in, alike_out) in enumerate(cases):
        x = random(*shape, seed=number * 100 + (0 if alike_in else rank)).requires_grad_()
        out = operator(x, group)
        y = random(*out.shape, seed=number * 100 + 50 + (0 if alike_out else rank))
        (adjoint,) = torch.autograd.grad(out, x, y)
        # A tensor that all ranks hold alike is one vector, so it enters the inner product once.
        left = float((out * y).sum()) if alike_out else over_ranks((out * y).sum(), group)
        right = float((x * adjoint).sum()) if alike_in else over_ranks((x * adjoint).sum(), group)
        assert abs(left - right) <= 1e-12 * max(1.0, abs(left)), f"case {number}: {left} != {right}"
        if alike_out:
            assert torch.equal(all_gather(out.detach()[None], group)[0], out.detach())


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_mapping_is_the_transpose_of_its_backward(on_ranks, world_size: int) -> None:
    on_ranks(adjoints, world_size)


def values() -> None:
    group = whole_world()
    t, rank = group.size, group.rank
    whole = random(2 * t, 3, 2 * t, seed=1)
    assert torch.equal(m.scatter_to_tensor_model_parallel_region(whole, group), whole[:, :, 2 * rank : 2 * rank + 2])
    assert torch.equal(m.scatter_to_sequence_parallel_region(whole, group), whole[2 * rank : 2 * rank + 2])
    mine = whole[:, :, 2 * rank : 2 * rank + 2].contiguous()
    assert torch.equal(m.gather_from_tensor_model_parallel_region(mine, group), whole)
    assert torch.equal(m.gather_from_sequence_parallel_region(whole[2 * rank : 2 * rank + 2], group), whole)
    assert torch.equal(m.copy_to_tensor_model_parallel_region(whole, group), whole)
    torch.testing.assert_close(m.reduce_from_tensor_model_parallel_region(whole, group), t * whole)
    torch.testing.assert_close(
        m.reduce_scatter_to_sequence_parallel_region(whole, group), t * whole[2 * rank : 2 * rank + 2]
    )


def test_mappings_compute_what_their_table_says(on_ranks) -> None:
    on_ranks(values, 4)


def booked() -> list[tuple[str, str | None, str | None]]:
    group = whole_world()
    x = torch.ones(2, 2, requires_grad=True)
    with CommLedger() as ledger:
        with comm_scope(layer="block"):
            y = m.reduce_from_tensor_model_parallel_region(m.copy_to_tensor_model_parallel_region(x, group), group)
        y.sum().backward()
        with comm_scope(phase="recompute"):
            m.reduce_from_tensor_model_parallel_region(x, group)
    return [(r.operation, r.layer, r.phase) for r in ledger.records]


def test_f_talks_backward_and_g_forward_under_the_layer_that_called_them(on_ranks) -> None:
    expected = [
        ("all_reduce", "block", "forward"),
        ("all_reduce", "block", "backward"),
        ("all_reduce", None, "recompute"),
    ]
    assert on_ranks(booked, 2) == [expected, expected]


def gradients_twice() -> None:
    group = whole_world()
    x = random(4, 5, seed=group.rank).float().requires_grad_()

    def gradient() -> Tensor:
        y = m.copy_to_tensor_model_parallel_region(x * x, group)
        return torch.autograd.grad(m.reduce_from_tensor_model_parallel_region(y, group).cos().sum(), x)[0]

    assert torch.equal(gradient(), gradient())


def test_the_same_graph_gives_the_same_bits_twice(on_ranks) -> None:
    on_ranks(gradients_twice, 4)


def test_a_group_of_one_bypasses_every_mapping_and_bad_sizes_are_refused() -> None:
    alone = Group("tp", (0,), 0)
    x = torch.ones(3, 3)
    for name in (
        "copy_to_tensor_model_parallel_region",
        "reduce_from_tensor_model_parallel_region",
        "scatter_to_tensor_model_parallel_region",
        "gather_from_tensor_model_parallel_region",
        "scatter_to_sequence_parallel_region",
        "gather_from_sequence_parallel_region",
        "reduce_scatter_to_sequence_parallel_region",
        "all_to_all",
    ):
        assert getattr(m, name)(x, alone) is x
    pair = Group("tp", (0, 1), 0)
    with pytest.raises(ValueError, match="2 ranks of tp: 3 must be a multiple of 2"):
        m.scatter_to_tensor_model_parallel_region(x, pair)
