"""fp8 casts and products against float64: error bounds, scales, history, what is kept and what is cast once."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.extra.numpy as npst
import numpy as np
import pytest
import torch
from fp8_bounds import RECIPES, SLACK, UNIT, product_bound, random, rounding_bound
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from labkit.config import ConfigError, OptimConfig, presets
from labkit.fp8 import Float8Recipe, Float8Scaling, float8_recipe
from labkit.fp8.casting import (
    BLOCK,
    COLUMNS,
    E4M3,
    E5M2,
    ROWS,
    SQUARE,
    block_scales,
    cast,
    scale_of,
    spread,
    through_blocks,
)
from labkit.fp8.gemms import product, scaled_product
from labkit.parallel import CommLedger, WeightGradStore, single_process_groups
from labkit.parallel.layers import ColumnParallelLinear, RowParallelLinear

magnitudes = npst.arrays(np.float64, st.integers(1, 40), elements=st.floats(-1e6, 1e6, width=32))


@given(magnitudes, st.sampled_from([E4M3, E5M2]), st.booleans())
def test_a_cast_moves_a_value_by_half_a_bit_at_most(values: Any, dtype: torch.dtype, power_of_two: bool) -> None:
    x = torch.from_numpy(values)
    scale = scale_of(x.abs().amax(), dtype, power_of_two=power_of_two)
    back = cast(x, scale, dtype).double() / scale.double()
    assert ((back - x).abs() <= rounding_bound(x, scale, dtype)).all()
    largest = (x.abs().amax() * scale).item()
    assert largest <= torch.finfo(dtype).max * SLACK
    if not power_of_two and x.abs().amax() > 1e-30:
        assert largest == pytest.approx(torch.finfo(dtype).max, rel=1e-6), "the whole range is used"


def test_too_large_saturates_and_what_is_not_finite_stays_so() -> None:
    x = torch.tensor([1e4, -1e4, math.nan])
    assert cast(x, torch.tensor(1.0), E4M3).float()[:2].tolist() == [448.0, -448.0]
    assert cast(x * 10, torch.tensor(1.0), E5M2).float()[:2].tolist() == [57344.0, -57344.0]
    assert cast(x, torch.tensor(1.0), E4M3).float()[2].isnan()
    for bad in (math.inf, math.nan):
        for recipe in RECIPES:
            layer = linear(recipe)
            layer(random(4, 1, 32, seed=1))[0].sum().backward()
            layer.plan.gemms._scaling.end_step()  # type: ignore[attr-defined]
            x = random(4, 1, 32, seed=1)
            x[2, 0, 3] = bad
            y, _ = layer(x)
            assert not y[2].isfinite().any(), f"{recipe} hides {bad}"


def test_scales_of_nothing_and_of_almost_nothing() -> None:
    assert scale_of(torch.tensor(0.0), E4M3) == 1
    assert scale_of(torch.tensor(1e-45), E4M3).isfinite()
    assert scale_of(torch.tensor(448.0), E4M3, power_of_two=True) == 1
    assert scale_of(torch.tensor(449.0), E4M3, power_of_two=True) == 0.5


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from([ROWS, COLUMNS, SQUARE]), st.integers(0, 99))
def test_blocks_have_scales_of_their_own(rows: int, columns: int, block: tuple[int, int], seed: int) -> None:
    x = random(rows, columns, seed=seed) * torch.exp(4 * random(rows, 1, seed=seed + 1))
    scales = block_scales(x, block, E4M3)
    assert scales.shape == (math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    assert (torch.log2(scales) % 1 == 0).all()
    whole = spread(scales, block, x.shape)
    assert ((through_blocks(x, block, E4M3) - x).abs() <= rounding_bound(x, whole, E4M3)).all()
    row, column = rows // 2, columns // 2
    mine = x[row // block[0] * block[0] :][: block[0], column // block[1] * block[1] :][:, : block[1]]
    assert whole[row, column] == scale_of(mine.abs().amax(), E4M3, power_of_two=True)


def test_one_outlier_costs_its_block_and_not_the_tensor() -> None:
    x = random(256, 256, seed=1, std=1e-3)
    x[0, 0] = 1e3
    per_tensor = cast(x, scale_of(x.abs().amax(), E4M3), E4M3).double() / scale_of(x.abs().amax(), E4M3)
    rest = slice(1, None)
    assert (per_tensor[rest] == 0).double().mean() > 0.5, "most of the tensor is lost below the smallest number"
    error = (through_blocks(x, ROWS, E4M3) - x)[rest].norm() / x[rest].norm()
    assert error < 0.04


# ---- layers ----


def linear(
    recipe: str, kind: type = ColumnParallelLinear, *, hybrid: bool = True, fusion: bool = False, **more: Any
) -> Any:
    groups = single_process_groups()
    scaling = Float8Scaling(Float8Recipe(recipe, hybrid, **more), groups)
    layer = kind(
        "fc",
        32,
        48,
        group=groups.tp,
        std=0.1,
        dtype=torch.float64,
        precision=scaling,
        gradient_accumulation_fusion=fusion,
    )
    assert layer.bias is not None
    layer.bias.data.copy_(random(48, seed=8))
    return layer


def step(layer: Any, seed: int = 1, std: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """(x, y, dy) of one forward and backward."""
    x, grad = random(40, 2, 32, seed=seed, std=std).requires_grad_(), random(40, 2, 48, seed=seed + 1, std=1e-6)
    y, _ = layer(x)
    y.backward(grad)
    return x, y.detach(), grad


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("hybrid", [True, False])
def test_outputs_and_gradients_stay_inside_their_bounds(recipe: str, kind: type, hybrid: bool) -> None:
    layer = linear(recipe, kind, hybrid=hybrid)
    gradients = E5M2 if hybrid else E4M3
    for number in range(3):  # the first step has no history, the others scale by it
        layer.zero_grad()
        x, y, grad = step(layer)
        weight = layer.weight.detach()
        x2, grad2 = x.detach().reshape(-1, 32), grad.reshape(-1, 48)
        tops = {name: t.abs().amax() for name, t in (("x", x2), ("w", weight), ("g", grad2))}
        for name, got, exact, bound in (
            (
                "y", y, x2 @ weight.t() + layer.bias.detach(),
                product_bound(x2, weight.t(), (E4M3, E4M3), (tops["x"], tops["w"])),
            ),
            ("dx", x.grad, grad2 @ weight, product_bound(grad2, weight, (gradients, E4M3), (tops["g"], tops["w"]))),
            (
                "dw", layer.weight.grad, grad2.t() @ x2,
                product_bound(grad2.t(), x2, (gradients, E4M3), (tops["g"], tops["x"])),
            ),
        ):  # fmt: skip
            error = (got.reshape(exact.shape) - exact).abs()
            assert (error <= bound).all(), (recipe, number, name, (error / bound).max())
            relative = (error.norm() / exact.norm()).item()
            # Two roundings of relative size u/sqrt(3) or less on average over a binade, none of them zero.
            assert 0.003 < relative < 2 * UNIT[gradients if name != "y" else E4M3], (name, relative)
        torch.testing.assert_close(layer.bias.grad, grad2.sum(0), rtol=1e-12, atol=0)  # not a product: exact
        layer.plan.gemms._scaling.end_step()


def test_blocks_lie_along_the_dimension_that_a_product_sums_over() -> None:
    """A tensor core multiplies one row of blocks by one scale: rows for y and dx, columns for dW.

    Scales are powers of two, so it matters only where values spread over more binades than e4m3 has, as here.
    """
    layer = linear("blockwise", hybrid=False)
    size = torch.exp(6 * random(40, 2, 1, seed=3))
    x, grad = (size * random(40, 2, 32, seed=1)).requires_grad_(), size * random(40, 2, 48, seed=2)
    y, _ = layer(x)
    y.backward(grad)
    weight = through_blocks(layer.weight.detach(), SQUARE, E4M3)
    rows, columns = (
        [through_blocks(t.detach().reshape(80, -1), block, form) for t, form in ((x, E4M3), (grad, E4M3))]
        for block in (ROWS, COLUMNS)
    )
    expected = rows[0] @ weight.t() + layer.bias.detach(), rows[1] @ weight, columns[1].t() @ columns[0]
    for found, product_of_blocks in zip((y.detach(), x.grad, layer.weight.grad), expected, strict=True):
        torch.testing.assert_close(found.reshape(product_of_blocks.shape), product_of_blocks, rtol=1e-12, atol=1e-12)
    assert not torch.equal(rows[0], columns[0]) and not torch.equal(rows[1], columns[1])


def test_hybrid_keeps_range_where_e4m3_keeps_bits() -> None:
    """Gradients over six orders of magnitude: e4m3 loses the small ones, e5m2 does not."""
    grad = 10.0 ** torch.linspace(-9, -3, 80 * 48, dtype=torch.float64).view(40, 2, 48)
    lost = {}
    for hybrid in (True, False):
        layer = linear("current", hybrid=hybrid)
        packed, _ = layer.plan.gemms.pack(grad, "grad", None, trains=True)
        lost[hybrid] = (packed.view(E5M2 if hybrid else E4M3).float() == 0).float().mean().item()
    assert lost[True] < 0.02 and lost[False] > 0.05


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_same_step_twice_gives_the_same_bits(recipe: str) -> None:
    found = []
    for _ in range(2):
        layer = linear(recipe)
        for seed in (1, 5):
            x, y, _ = step(layer, seed=seed)
            layer.plan.gemms._scaling.end_step()
        found.append((y, x.grad, layer.weight.grad))
    assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_i_and_w_give_the_gradients_of_b_into_main_grad(recipe: str) -> None:
    found = []
    for split in (False, True):
        layer, store = linear(recipe, fusion=True), WeightGradStore()
        layer.weight.main_grad = torch.zeros(48, 32)  # fp32, as training keeps it
        if split:
            with store.collecting(0):
                x, _, _ = step(layer)
            assert not layer.weight.main_grad.any() and layer.bias.grad is None
            store.run(0)
        else:
            x, _, _ = step(layer)
        assert layer.weight.grad is None and layer.weight.main_grad.any()
        found.append((x.grad, layer.weight.main_grad, layer.bias.grad))
    assert all(torch.equal(whole, parts) for whole, parts in zip(*found, strict=True))


@pytest.mark.parametrize(("recipe", "bytes_per_value"), [("delayed", 1), ("current", 1), ("blockwise", 8)])
def test_what_is_kept_for_backward(recipe: str, bytes_per_value: int) -> None:
    layer, kept = linear(recipe), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(random(40, 2, 32, seed=1))
    activations = [t for t in kept if t.data_ptr() != layer.weight.data_ptr()]
    scales = 4 if bytes_per_value == 1 else 0
    assert sum(t.nbytes for t in activations) == 40 * 2 * 32 * bytes_per_value + scales


# ---- history ----


def test_delayed_scales_come_from_the_history_and_current_ones_do_not() -> None:
    layers = {recipe: linear(recipe, amax_history_len=3) for recipe in ("delayed", "current")}
    stds = (1.0, 8.0, 1.0, 1.0, 1.0, 1.0)
    for number, std in enumerate(stds):
        amax = random(40, 2, 32, seed=1, std=std).abs().amax()
        for recipe, layer in layers.items():
            layer.plan.gemms._weight = None
            _, scale_inv = layer.plan.gemms.pack(random(40, 2, 32, seed=1, std=std), "input", None, trains=True)
            window = stds[max(0, number - 3) : number] if recipe == "delayed" and number else (std,)
            expected = 448 / (amax * max(window) / std)
            assert (1 / scale_inv).item() == pytest.approx(expected.item(), rel=1e-6), (recipe, number)
            layer.plan.gemms._scaling.end_step()


def test_most_recent_forgets_at_once_and_margin_halves() -> None:
    for algo, margin, expected in (("max", 0, 448 / 8), ("most_recent", 0, 448.0), ("most_recent", 2, 448 / 4)):
        layer = linear("delayed", amax_compute_algo=algo, margin=margin)
        for top in (8.0, 1.0):
            layer.plan.gemms.pack(torch.full((2, 1, 32), top), "input", None, trains=True)
            layer.plan.gemms._scaling.end_step()
        assert layer.plan.gemms._scaling.scales[0, 0] == expected


def test_microbatches_of_a_step_count_by_their_largest_and_an_evaluation_does_not_count() -> None:
    layer = linear("delayed")
    for std in (1.0, 4.0, 2.0):
        step(layer, std=std)
    with torch.no_grad():
        layer(random(40, 2, 32, seed=1, std=100.0))
    layer.plan.gemms._scaling.end_step()
    top = random(40, 2, 32, seed=1, std=4.0).abs().amax()
    assert layer.plan.gemms._scaling.scales[0, 0].item() == pytest.approx(448 / top.item(), rel=1e-6)


def test_a_step_without_this_layer_or_with_an_overflow_keeps_its_scale() -> None:
    layer = linear("delayed", amax_history_len=1)
    step(layer)
    scaling = layer.plan.gemms._scaling
    scaling.end_step()
    before = scaling.scales.clone()
    scaling.end_step()
    assert torch.equal(scaling.scales, before)
    layer.plan.gemms.pack(torch.full((2, 1, 32), math.inf), "input", None, trains=True)
    scaling.end_step()
    assert torch.equal(scaling.scales, before)


def test_a_weight_is_cast_once_a_step_and_again_when_it_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    from labkit.fp8 import gemms

    casts = []
    real = gemms.Float8Gemms._cast
    monkeypatch.setattr(
        gemms.Float8Gemms, "_cast", lambda self, x, kind, *a, **k: casts.append(kind) or real(self, x, kind, *a, **k)
    )
    layer = linear("current")
    for _ in range(3):
        step(layer)
    assert casts.count("weight") == 1 and casts.count("input") == 3
    before = step(layer)[1]
    with torch.no_grad():
        layer.weight.mul_(2)
    assert casts.count("weight") == 1
    after = step(layer)[1]
    assert casts.count("weight") == 2 and not torch.equal(before, after)
    layer.weight.data.zero_()  # through .data no version is counted: the end of the step says so
    layer.plan.gemms._scaling.end_step()
    assert torch.equal(step(layer)[1], layer.bias.detach().expand(40, 2, 48))


def test_a_resumed_history_scales_like_the_one_that_was_saved() -> None:
    layer = linear("delayed")
    for seed in (1, 7):
        step(layer, seed=seed, std=seed)
        layer.plan.gemms._scaling.end_step()
    resumed = linear("delayed")
    resumed.plan.gemms._scaling.load_layer_states(layer.plan.gemms._scaling.layer_states(), steps=2)
    for _ in range(2):
        assert torch.equal(step(layer)[1], step(resumed)[1])
        for each in (layer, resumed):
            each.plan.gemms._scaling.end_step()
    with pytest.raises(KeyError, match="fc"):
        resumed.plan.gemms._scaling.load_layer_states({}, steps=1)


# ---- the rest ----


def test_tensor_cores_are_given_what_the_definition_says() -> None:
    """`torch._scaled_mm` runs on a CPU too: the call for GPUs is compared with the product it stands for."""
    for formats in ((E4M3, E4M3), (E5M2, E4M3)):
        a, b = (random(n, 64, seed=n).to(dtype) for n, dtype in zip((32, 48), formats, strict=True))
        scale_inv = torch.tensor(0.5), torch.tensor(0.25)
        expected = product(a, b, scale_inv, torch.float32)
        torch.testing.assert_close(expected, (a.double() @ b.double().t() / 8).float(), rtol=1e-5, atol=1e-5)
        try:
            got = scaled_product(a, b, scale_inv, torch.float32, fast=False)
        except (RuntimeError, ValueError) as error:
            pytest.skip(f"this build of torch has no fp8 product on CPUs: {error}")
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


class OnGpu:
    """As much of a tensor on a GPU as the choice of a product looks at."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype


def test_tensor_cores_are_not_given_what_they_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch._scaled_mm` wants multiples of 16, e5m2 on one side at most, and no float64 result."""
    from labkit.fp8.gemms import _on_tensor_cores

    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability[0])

    def taken(formats: tuple[torch.dtype, torch.dtype], out_dtype: torch.dtype, rows: int = 48) -> bool:
        a, b = OnGpu((32, 64), formats[0]), OnGpu((rows, 64), formats[1])
        return _on_tensor_cores(a, b, out_dtype)  # type: ignore[arg-type]

    assert all(taken((form, E4M3), out) for form in (E4M3, E5M2) for out in (torch.bfloat16, torch.float32))
    assert not taken((E5M2, E5M2), torch.bfloat16)
    assert not taken((E4M3, E4M3), torch.float64)
    assert not taken((E4M3, E4M3), torch.bfloat16, rows=40)
    capability[0] = (8, 6)
    assert not taken((E4M3, E4M3), torch.bfloat16)


def test_one_process_communicates_nothing() -> None:
    with CommLedger() as ledger:
        for recipe in RECIPES:
            layer = linear(recipe)
            step(layer)
            layer.plan.gemms._scaling.end_step()
    assert not ledger.records


def test_recipes_of_a_config_and_names_that_clash() -> None:
    assert float8_recipe(OptimConfig()) is None
    found = float8_recipe(OptimConfig(fp8="e4m3", fp8_recipe="current", fp8_margin=1))
    assert found is not None and found.name == "current" and found.dtype("grad") == E4M3 and found.margin == 1
    for bad, words in (
        ({"optim.fp8": "hybrid", "optim.precision": "fp16"}, "fp8 goes with optim.precision bf16, fp32"),
        ({"optim.fp8_recipe": "current"}, "optim.fp8_recipe.*has no effect with optim.fp8 = none"),
        ({"optim.fp8": "e5m2"}, "must be one of none, e4m3, hybrid"),
    ):
        with pytest.raises(ConfigError, match=words):
            presets.tiny().override(bad).validate(1)
    scaling = Float8Scaling(found, single_process_groups())
    scaling.gemms("layers.0.mlp.fc1")
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.fc1.*names must differ"):
        scaling.gemms("layers.0.mlp.fc1")
    assert BLOCK == 128 and scaling.names == ("layers.0.mlp.fc1",)
