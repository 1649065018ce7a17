"""Column and row parallel layers against the unsharded torch layer: output, input gradient, weight gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from inputs import random, whole_world
from torch import Tensor, nn

from labkit.parallel import CommLedger, Group, all_gather
from labkit.parallel.layers import ColumnParallelLinear, RowParallelLinear
from labkit.parallel.mlp import ACTIVATIONS, ParallelMLP
from labkit.parallel.parameters.parameter_record import Replicated, record_of
from labkit.parallel.parameters.weights import gather_parameter

EXACT = {"rtol": 1e-12, "atol": 1e-13}


def unsharded(module: nn.Module, group: Group) -> dict[str, Tensor]:
    """Leaves with the gathered values of all parameters; biases made random first, since they start at zero."""
    full = {}
    for number, (name, parameter) in enumerate(module.named_parameters()):
        if name.endswith("bias"):
            whole = random(*record_of(parameter).full_shape, seed=99 + number)
            cut = record_of(parameter).tensor_model_parallel
            stride = record_of(parameter).partition_stride
            mine = torch.cat([b.chunk(group.size)[group.rank] for b in whole.chunk(stride)]) if cut else whole
            parameter.data.copy_(mine)
        full[name] = gather_parameter(parameter, parameter, group).clone().requires_grad_()
    return full


def assert_same_gradients(module: nn.Module, full: dict[str, Tensor], group: Group) -> None:
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(gather_parameter(parameter.grad, parameter, group), full[name].grad, **EXACT)


def column(bias: bool, gather_output: bool, skip_bias_add: bool, stride: int) -> None:
    group = whole_world()
    options = {"gather_output": gather_output, "skip_bias_add": skip_bias_add, "partition_stride": stride}
    layer = ColumnParallelLinear("fc", 6, 16, group=group, bias=bias, std=0.5, dtype=torch.float64, **options)
    full = unsharded(layer, group)
    x, reference_x = (random(5, 2, 6, seed=1).requires_grad_() for _ in range(2))
    y, skipped = layer(x)
    expected = F.linear(reference_x, full["weight"], full.get("bias"))
    if skip_bias_add and bias:
        assert skipped is layer.bias
        y = y + skipped
    else:
        assert skipped is None
    weights = random(5, 2, 16, seed=2)
    if gather_output:
        mine, target = weights, y
    else:
        mine = torch.cat([b.chunk(group.size, -1)[group.rank] for b in weights.chunk(stride, -1)], -1)
        blocks = [part.chunk(stride, -1) for part in all_gather(y.detach()[None], group).unbind(0)]
        target = torch.cat([blocks[r][s] for s in range(stride) for r in range(group.size)], -1)
    torch.testing.assert_close(target.detach(), expected.detach(), **EXACT)
    (y * mine).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(x.grad, reference_x.grad, **EXACT)
    assert_same_gradients(layer, full, group)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("bias", "gather_output", "skip_bias_add", "stride"),
    [(True, False, False, 1), (True, True, False, 1), (True, False, True, 2), (False, False, False, 2)],
)
def test_column_parallel_equals_the_whole_layer(
    on_ranks, world_size, bias, gather_output, skip_bias_add, stride
) -> None:
    on_ranks(column, world_size, bias, gather_output, skip_bias_add, stride)


def row(bias: bool, input_is_parallel: bool, skip_bias_add: bool) -> None:
    group = whole_world()
    options = {"input_is_parallel": input_is_parallel, "skip_bias_add": skip_bias_add}
    layer = RowParallelLinear("fc", 8, 6, group=group, bias=bias, std=0.5, dtype=torch.float64, **options)
    full = unsharded(layer, group)
    reference_x = random(5, 2, 8, seed=1).requires_grad_()
    x = reference_x.detach().chunk(group.size, -1)[group.rank] if input_is_parallel else reference_x.detach()
    x = x.clone().requires_grad_()
    y, skipped = layer(x)
    assert (skipped is layer.bias) if skip_bias_add else (skipped is None)
    y = y if skipped is None else y + skipped
    expected = F.linear(reference_x, full["weight"], full.get("bias"))
    torch.testing.assert_close(y, expected, **EXACT)
    weights = random(5, 2, 6, seed=2)
    (y * weights).sum().backward()
    (expected * weights).sum().backward()
    grad = all_gather(x.grad, group, dim=-1) if input_is_parallel else x.grad
    torch.testing.assert_close(grad, reference_x.grad, **EXACT)
    assert_same_gradients(layer, full, group)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("bias", "input_is_parallel", "skip_bias_add"),
    [(True, True, False), (True, False, False), (True, True, True), (False, True, False)],
)
def test_row_parallel_equals_the_whole_layer(on_ranks, world_size, bias, input_is_parallel, skip_bias_add) -> None:
    on_ranks(row, world_size, bias, input_is_parallel, skip_bias_add)


def mlp(activation: str, sequence_parallel: bool) -> list[tuple[str, str, int]]:
    group = whole_world()
    layer = ParallelMLP(
        "mlp",
        6,
        8,
        group=group,
        activation=activation,
        std=0.5,
        dtype=torch.float64,
        sequence_parallel=sequence_parallel,
    )
    full = unsharded(layer, group)
    reference_x = random(4, 2, 6, seed=1).requires_grad_()
    x = reference_x.detach().chunk(group.size)[group.rank] if sequence_parallel else reference_x.detach()
    x = x.clone().requires_grad_()
    weights = random(4, 2, 6, seed=2)
    with CommLedger() as ledger:
        y = layer(x)
        (y * (weights.chunk(group.size)[group.rank] if sequence_parallel else weights)).sum().backward()
    inner = ACTIVATIONS[activation](F.linear(reference_x, full["fc1.weight"], full["fc1.bias"]))
    expected = F.linear(inner, full["fc2.weight"], full["fc2.bias"])
    (expected * weights).sum().backward()
    whole = (lambda z: all_gather(z.detach(), group)) if sequence_parallel else (lambda z: z.detach())
    torch.testing.assert_close(whole(y), expected.detach(), **EXACT)
    torch.testing.assert_close(whole(x.grad), reference_x.grad, **EXACT)
    if sequence_parallel:  # its gradient saw a part of the sequence: `finalize_model_grads` adds them up
        assert record_of(layer.fc2.bias).sequence_parallel and not record_of(layer.fc1.bias).sequence_parallel
        layer.fc2.bias.grad = all_gather(layer.fc2.bias.grad[None], group).sum(0)
    assert_same_gradients(layer, full, group)
    return sorted((r.operation, str(r.phase), r.bytes) for r in ledger.records)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_the_mlp_equals_the_whole_one_with_one_all_reduce_each_way(on_ranks, world_size: int, activation: str) -> None:
    size = 4 * 2 * 6 * 8
    for calls in on_ranks(mlp, world_size, activation, False):
        assert calls == [("all_reduce", "backward", size), ("all_reduce", "forward", size)]


def test_sequence_parallel_replaces_each_all_reduce_by_its_two_halves_and_regathers_the_input(on_ranks) -> None:
    whole, part = 4 * 2 * 6 * 8, 2 * 2 * 6 * 8
    for calls in on_ranks(mlp, 2, "gelu", True):
        assert calls == [
            ("all_gather", "backward", part),  # the input of fc1, which was not kept
            ("all_gather", "backward", part),  # the gradient of fc2's reduce-scatter
            ("all_gather", "forward", part),
            ("reduce_scatter", "backward", whole),
            ("reduce_scatter", "forward", whole),
        ]


def fused(dtype: torch.dtype) -> None:
    group = whole_world()

    def run_twice(accumulate: bool) -> list[Tensor]:
        layer = ParallelMLP("mlp", 6, 8, group=group, std=0.5, dtype=dtype, gradient_accumulation_fusion=accumulate)
        for weight in (layer.fc1.weight, layer.fc2.weight):
            if accumulate:
                weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32)
        for seed in (1, 2):
            (layer(random(4, 2, 6, seed=seed).to(dtype)) ** 2).sum().backward()
        if accumulate:
            assert layer.fc1.weight.grad is None and layer.fc2.weight.grad is None
            assert layer.fc1.bias.grad is not None
            return [layer.fc1.weight.main_grad, layer.fc2.weight.main_grad]
        return [layer.fc1.weight.grad, layer.fc2.weight.grad]

    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for added, plain in zip(run_twice(True), run_twice(False)):
        torch.testing.assert_close(added, plain.float(), rtol=tolerance, atol=tolerance * float(plain.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_accumulation_adds_up_in_main_grad_and_leaves_no_grad(on_ranks, dtype: torch.dtype) -> None:
    on_ranks(fused, 2, dtype)


def same_bits() -> None:
    group = whole_world()

    def once() -> list[Tensor]:
        layer = ParallelMLP("mlp", 16, 32, group=group)
        x = random(8, 2, 16, seed=1).float().requires_grad_()
        y = layer(x)
        y.square().sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]

    first, second = once(), once()
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    everyone = all_gather(torch.cat([first[0].flatten(), first[1].flatten()])[None], group)
    assert all(torch.equal(everyone[0], other) for other in everyone), "ranks disagree about what they hold alike"


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_same_layer_gives_the_same_bits_twice_and_on_every_rank(on_ranks, world_size: int) -> None:
    on_ranks(same_bits, world_size)


def linearity() -> None:
    from hypothesis import Phase, given, settings  # here: its objects do not travel to the ranks
    from hypothesis import strategies as st

    group = whole_world()
    layer = ColumnParallelLinear("fc", 3, 4, group=group, bias=False, gather_output=True, std=1.0, dtype=torch.float64)
    back = RowParallelLinear(
        "back", 4, 3, group=group, bias=False, input_is_parallel=False, std=1.0, dtype=torch.float64
    )
    one_process = gather_parameter(back.weight, back.weight, group) @ gather_parameter(
        layer.weight, layer.weight, group
    )

    # Derandomised, every rank draws the same examples in the same order, so that they meet in the same collectives.
    @settings(derandomize=True, database=None, deadline=None, max_examples=20, phases=[Phase.generate])
    @given(length=st.integers(1, 6), batch=st.integers(1, 3), seed=st.integers(0, 10**6))
    def check(length: int, batch: int, seed: int) -> None:
        x = random(length, batch, 3, seed=seed)
        torch.testing.assert_close(back(layer(x)[0])[0], x @ one_process.t(), **EXACT)

    check()


def test_any_input_shape_gives_what_one_process_gives(on_ranks) -> None:
    on_ranks(linearity, 2)


def column_parallel(group: Group, input_size: int, output_size: int, **options: object) -> nn.Module:
    return ColumnParallelLinear("layers.0.mlp.fc1", input_size, output_size, group=group, **options)  # type: ignore[arg-type]


def row_parallel(group: Group, input_size: int, output_size: int, **options: bool) -> nn.Module:
    return RowParallelLinear("layers.0.mlp.fc2", input_size, output_size, group=group, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda g: column_parallel(g, 4, 7), "layers.0.mlp.fc1: output size 7 cannot be cut over tp=2"),
        (lambda g: column_parallel(g, 4, 6, partition_stride=2), "in 2 blocks; it must be a multiple of 4"),
        (lambda g: column_parallel(g, 4, 6, replicated=Replicated(2, 2), gather_output=True), "goes neither with"),
        (
            lambda g: column_parallel(g, 4, 5, replicated=Replicated(2, 2)),
            "replicated columns 3 cannot be cut",
        ),
        (lambda g: row_parallel(g, 5, 4), "input size 5 cannot be cut over tp=2; it must be a multiple of 2"),
        (lambda g: column_parallel(g, 4, 4, gather_output=True, skip_bias_add=True), "gather_output goes neither"),
        (lambda g: row_parallel(g, 4, 4, sequence_parallel=True, input_is_parallel=False), "needs input_is_parallel"),
        (lambda g: ParallelMLP("a", 4, 4, group=g, activation="tanh"), "choose one of gelu, gelu_tanh, swiglu"),
    ],
)
def test_bad_sizes_and_options_are_refused(make: Callable[[Group], nn.Module], message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        make(Group("tp", (0, 1), 0))
    assert message in str(refusal.value)
