"""Experts in fp8: products of the cast operands, inside the bounds of rounding; scales and history; forms for GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fp8_bounds import RECIPES, product_bound, random
from torch import Tensor

from labkit.config import ModelConfig, MoEConfig
from labkit.fp8 import Float8Recipe, Float8Scaling, Float8Spec, gemms, grouped_gemms
from labkit.fp8.casting import COLUMNS, E4M3, E5M2, ROWS, SQUARE, cast, scale_of, through_blocks
from labkit.moe.experts import StackedLinear
from labkit.moe.grouped_gemm import Segments
from labkit.moe.layer import MoELayer
from labkit.parallel import WeightGradStore, single_process_groups
from labkit.parallel.parameters.parameter_record import record_of

INPUT, OUTPUT = 32, 48
ROUTINGS = {
    "skewed": [130, 1, 0, 29],
    "one takes all": [0, 0, 90, 0],
    "equal": [40, 40, 40, 40],
    "single expert": [7],
    "nothing": [0, 0, 0, 0],
}
GROUPS = single_process_groups()


def experts(
    recipe: str, count: int = 4, *, hybrid: bool = True, fusion: bool = False, dtype: torch.dtype = torch.float64,
    **more: Any,
) -> tuple[StackedLinear, Float8Scaling]:  # fmt: skip
    """One projection. The weights of experts differ in size by factors of 8."""
    scaling = Float8Scaling(Float8Recipe(recipe, hybrid, **more), GROUPS)
    made: dict[str, Any] = {"ep": GROUPS.ep, "etp": GROUPS.etp, "partition_dim": 1, "std": 0.1, "dtype": dtype}
    layer = StackedLinear(
        "experts", "fc1", (count, OUTPUT, INPUT), accumulate=fusion, gemms=scaling.grouped_gemms, **made
    )
    with torch.no_grad():
        layer.weight.mul_(8.0 ** torch.arange(count, dtype=dtype)[:, None, None])
    return layer, scaling


def rows(counts: list[int], dtype: torch.dtype = torch.float64, seed: int = 1) -> tuple[Tensor, Tensor]:
    """x and dy. The rows of an expert are larger than those of the one before."""
    size = torch.repeat_interleave(2.0 ** torch.arange(len(counts), dtype=torch.float64), torch.tensor(counts))
    x, grad = (random(sum(counts), width, seed=seed + width) * size[:, None] for width in (INPUT, OUTPUT))
    return x.to(dtype).requires_grad_(), (1e-6 * grad).to(dtype)


def step(layer: StackedLinear, counts: list[int], **given: Any) -> dict[str, Tensor]:
    """Forward and backward: y, dx and dW."""
    layer.zero_grad()
    x, grad = rows(counts, layer.weight.dtype, **given)
    y = layer(x, Segments(counts))
    y.backward(grad)
    assert x.grad is not None and layer.weight.grad is not None
    return {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad}


Multiply = Callable[[Tensor, Tensor], Tensor]


def one_by_one(layer: StackedLinear, counts: list[int], made: dict[str, Callable[[Tensor, Tensor], Tensor]]) -> Any:
    """y, dx and dW by functions of one expert's operands: rows, weight; gradient, weight; gradient, rows."""
    found: dict[str, list[Tensor]] = {"y": [], "dx": [], "dw": []}
    x, grad = rows(counts, layer.weight.dtype)
    parts = zip(x.detach().split(counts), grad.split(counts), layer.weight.detach(), strict=True)
    for x_e, grad_e, weight in parts:
        found["y"].append(made["y"](x_e, weight.t()))
        found["dx"].append(made["dx"](grad_e, weight))
        found["dw"].append(made["dw"](grad_e.t(), x_e))
    return {name: torch.stack(t) if name == "dw" else torch.cat(t) for name, t in found.items()}


# ---- values ----


@pytest.mark.parametrize("counts", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_outputs_and_gradients_stay_inside_their_bounds(recipe: str, hybrid: bool, counts: list[int]) -> None:
    """The bound is that of a dense layer, with the weight's own largest magnitude: |fp8(a) fp8(b) - a b| <= |a| e(b) +
    e(a) |b| + e(a) e(b), where e is half of the last bit, or half of the smallest number of the format."""
    layer, scaling = experts(recipe, len(counts), hybrid=hybrid)
    x, grad = rows(counts)
    top_x, top_grad = (t.detach().abs().amax() if t.numel() else torch.tensor(0.0) for t in (x, grad))
    form = E5M2 if hybrid else E4M3
    bounds = {
        "y": lambda a, b: product_bound(a, b, (E4M3, E4M3), (top_x, b.abs().amax())),
        "dx": lambda a, b: product_bound(a, b, (form, E4M3), (top_grad, b.abs().amax())),
        "dw": lambda a, b: product_bound(a, b, (form, E4M3), (top_grad, top_x)),
    }
    exact, bound = (one_by_one(layer, counts, made) for made in (dict.fromkeys(bounds, torch.matmul), bounds))
    for number in range(3):  # the first step of `delayed` has no history, the others scale by it
        found = step(layer, counts)
        scaling.end_step()
        for name in exact:
            error = (found[name] - exact[name]).abs()
            assert (error <= bound[name]).all(), (number, name)
            if recipe == "delayed" and not number:
                assert torch.equal(found[name], plain(layer, counts)[name]), "nothing is cast"
            elif sum(counts):
                assert error.norm() > 1e-3 * exact[name].norm(), "something is cast"


def plain(layer: StackedLinear, counts: list[int]) -> dict[str, Tensor]:
    """The same step without fp8."""
    made: dict[str, Any] = {"ep": GROUPS.ep, "etp": GROUPS.etp, "partition_dim": 1, "dtype": layer.weight.dtype}
    without = StackedLinear("experts", "fc1", (len(counts), OUTPUT, INPUT), **made)
    without.load_state_dict(layer.state_dict())
    return step(without, counts)


@pytest.mark.parametrize("counts", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_those_of_the_cast_operands(recipe: str, counts: list[int]) -> None:
    """Rows have one scale and each weight its own; blocks hold the rows of one expert."""
    layer, scaling = experts(recipe, len(counts))
    step(layer, counts)
    scaling.end_step()
    x, grad = rows(counts)
    tops = {E4M3: x.detach().abs().amax() if sum(counts) else None, E5M2: grad.abs().amax() if sum(counts) else None}

    def rounded(t: Tensor, dtype: torch.dtype, block: tuple[int, int], top: Tensor | None) -> Tensor:
        if recipe == "blockwise":
            return through_blocks(t, block, dtype)
        if top is None:
            return t
        scale = scale_of(top, dtype)
        return cast(t, scale, dtype).double() * (1 / scale).double()  # products take the reciprocal, a float32

    weight = lambda w: rounded(w, E4M3, SQUARE, w.abs().amax())  # noqa: E731
    expected = one_by_one(
        layer,
        counts,
        {
            "y": lambda x, w: rounded(x, E4M3, ROWS, tops[E4M3]) @ weight(w),
            "dx": lambda g, w: rounded(g, E5M2, ROWS, tops[E5M2]) @ weight(w),
            "dw": lambda g, x: rounded(g.t(), E5M2, COLUMNS, tops[E5M2]).t() @ rounded(x, E4M3, COLUMNS, tops[E4M3]),
        },
    )
    for name, found in step(layer, counts).items():
        scale = expected[name].abs().amax().item() if found.numel() else 0.0
        # The two reciprocals are multiplied in float32: half of its last bit, 2^-24.
        torch.testing.assert_close(found, expected[name], rtol=2.0**-23, atol=1e-12 * scale)


@pytest.mark.parametrize("recipe", RECIPES)
def test_i_and_w_give_the_gradients_of_b_into_main_grad(recipe: str) -> None:
    counts, found = ROUTINGS["skewed"], []
    for split in (False, True):
        layer, scaling = experts(recipe, fusion=True)
        layer.weight.main_grad = torch.zeros(4, OUTPUT, INPUT)  # type: ignore[attr-defined]
        store = WeightGradStore()
        for number in range(2):
            x, grad = rows(counts)
            record_of(layer.weight).has_gradient = number > 0  # the second step adds
            with store.collecting(0) if split else torch.enable_grad():
                layer(x, Segments(counts)).backward(grad)
            if split:
                store.run(0)
            scaling.end_step()
        assert layer.weight.grad is None
        found.append((x.grad, layer.weight.main_grad))
    assert all(torch.equal(whole, parts) for whole, parts in zip(*found, strict=True))
    assert found[0][1].any() and not found[0][1][2].any(), "an expert without rows gets zeros"


@pytest.mark.parametrize(("recipe", "bytes_per_value"), [("delayed", 1), ("current", 1), ("blockwise", 8)])
def test_what_is_kept_for_backward(recipe: str, bytes_per_value: int) -> None:
    (layer, scaling), kept = experts(recipe), []
    step(layer, [40] * 4)
    scaling.end_step()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(rows([40] * 4)[0], Segments([40] * 4))
    activations = [t for t in kept if t.data_ptr() != layer.weight.data_ptr()]
    scales = 4 if bytes_per_value == 1 else 0
    assert sum(t.nbytes for t in activations) == 160 * INPUT * bytes_per_value + scales


# ---- scales and history ----


def test_each_weight_has_a_scale_and_rows_share_one() -> None:
    layer, scaling = experts("delayed")
    counts = ROUTINGS["skewed"]
    step(layer, counts)
    scaling.end_step()
    x, grad = rows(counts)
    tops = [448 / x.detach().abs().amax(), 1.0, 57344 / grad.abs().amax()]
    expected = torch.tensor([tops, *([1.0, 448 / weight.abs().amax(), 1.0] for weight in layer.weight.detach())])
    torch.testing.assert_close(scaling.scales, expected.float(), rtol=1e-6, atol=0)
    assert scaling.names == ("experts.fc1",)


def test_steps_without_rows_leave_the_scales_of_rows_as_they_are() -> None:
    """Neither an expert nor a whole rank without rows moves the history to zeros; weights still count."""
    layer, scaling = experts("delayed", amax_history_len=1)
    step(layer, ROUTINGS["equal"])
    scaling.end_step()
    before = scaling.scales.clone()
    step(layer, ROUTINGS["one takes all"])
    scaling.end_step()
    assert torch.equal(scaling.scales[1:], before[1:])
    before = scaling.scales.clone()
    for _ in range(2):
        with torch.no_grad():
            layer.weight.mul_(2)
        step(layer, ROUTINGS["nothing"])
        scaling.end_step()
        assert torch.equal(scaling.scales[0], before[0])
    assert torch.equal(scaling.scales[1:, 1], before[1:, 1] / 4)


def test_an_evaluation_and_a_recomputed_forward_note_no_rows() -> None:
    """The first forward of a recomputed part runs without gradients, and only the second counts, once."""
    layer, scaling = experts("delayed")
    with torch.no_grad():
        layer(rows([9] * 4)[0], Segments([9] * 4))
    assert not scaling.state[0][0].any() and scaling.state[0][1:, 1].all()


def test_ranks_of_ep_keep_the_same_state_and_a_checkpoint_fits_any_ep() -> None:
    def half(mine: range) -> Float8Scaling:
        made = Float8Scaling(Float8Recipe("delayed"), GROUPS)
        made.gemms("dense")
        made.grouped_gemms("experts.fc1", 4, mine)
        return made

    layer, whole = experts("delayed")
    step(layer, ROUTINGS["skewed"])
    whole.end_step()
    saved = {f"dense.{name}": torch.ones(shape) for name, shape in (("history", (16, 3)), ("scale", (3,)))}
    saved |= whole.layer_states()
    assert saved["experts.fc1.history"].shape == (16, 5, 3) and saved["experts.fc1.scale"].shape == (5, 3)
    for mine in (range(2), range(2, 4)):
        resumed = half(mine)
        resumed.load_layer_states(saved, steps=1)
        for name, values in resumed.layer_states().items():
            assert torch.equal(values, saved[name]), name
        assert not resumed.calibrates


# ---- a layer ----

MODEL = ModelConfig(layers=1, hidden=INPUT, heads=2, activation="swiglu", bias=False)
MOE = MoEConfig(num_experts=4, ffn_hidden=24, shared_expert_ffn_hidden=40, shared_expert_gate=True)


def moe_layer(recipe: str | None, moe: MoEConfig = MOE) -> tuple[MoELayer, Any]:
    more: dict[str, Any] = {}
    if recipe is not None:
        spec = Float8Spec(Float8Recipe(recipe))
        precision = spec.precision(GROUPS, None)
        more = {"precision": precision, "expert_linear": spec.expert_linear(precision)}
    return MoELayer("layers.0.mlp", MODEL, moe, GROUPS, seed=3, **more), more.get("precision")


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_router_has_the_bits_that_it_has_without_fp8(recipe: str) -> None:
    x = random(9, 2, INPUT, seed=4).float()
    without, _ = moe_layer(None)
    layer, precision = moe_layer(recipe)
    for _ in range(2):
        for found, expected in zip(layer.route(x), without.route(x), strict=True):
            assert torch.equal(found, expected)
        y = layer(x)
        y.sum().backward()
        precision.end_step()
    assert not torch.equal(y, without(x))
    shared = layer.shared_experts, without.shared_experts
    assert all(part is not None for part in shared)
    assert not torch.equal(*(part(x) for part in shared if part is not None)), "shared experts are cast"


@pytest.mark.parametrize("recipe", RECIPES)
def test_shared_experts_while_tokens_travel_compute_the_same(recipe: str) -> None:
    found = []
    for overlap in (False, True):
        layer, precision = moe_layer(recipe, replace(MOE, shared_expert_overlap=overlap))
        for _ in range(2):
            layer.zero_grad()
            y = layer(random(9, 2, INPUT, seed=4).float())
            y.sum().backward()
            precision.end_step()
        found.append([y, *(p.grad for p in layer.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


# ---- forms for GPUs ----


class TensorCores:
    """Tensor cores of Hopper on a CPU: torch's own `_scaled_mm`, and `_scaled_grouped_mm` after its definition, once
    torch's rules for it on a GPU, which it checks on tensors without data, have passed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        for module in (gemms, grouped_gemms):
            monkeypatch.setattr(module, "has_tensor_cores", lambda device: True)
        monkeypatch.setattr(grouped_gemms, "_is_hopper", lambda device: True)
        monkeypatch.setattr(gemms, "_on_tensor_cores", self.takes)
        monkeypatch.setattr(torch, "_scaled_grouped_mm", partial(self.in_one, torch._scaled_grouped_mm))

    def takes(self, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> bool:
        self.calls.append("one by one")
        assert not any(size % 16 for size in (*a.shape, *b.shape)), "not aligned"
        return not a.dtype == b.dtype == E5M2

    def in_one(self, real: Any, a: Tensor, b: Tensor, *scales: Tensor, offs: Tensor, **options: Any) -> Tensor:
        self.calls.append("in one")
        on_meta = [t.to("meta") for t in (a, b, *scales)]
        made = real(*on_meta, offs=offs.to("meta"), **options)
        assert all(t.storage_offset() % 16 == 0 for t in (a, b))
        out, ends = torch.full(made.shape, torch.nan), [0, *offs.tolist()]  # what nothing writes stays undefined
        for expert, part in enumerate(map(slice, ends[:-1], ends[1:])):
            if b.dim() == 3:
                summed = a[part].double() @ b[expert].double()
                out[part] = (summed * scales[0][part, None] * scales[1][expert]).float()
            elif part.start < part.stop:
                assert part.start % 16 == part.stop % 16 == 0, "not aligned"
                of_rows, of_columns = (scale.view(len(offs), -1)[expert] for scale in scales)
                summed = a[:, part].double() @ b[part].double()
                out[expert] = (summed * of_rows[:, None] * of_columns).float()
        return out.to(options["out_dtype"])


FORMS = {
    # forward, input gradient, weight gradient
    "e4m3": (False, False, ["in one"] * 3),
    "e4m3, fp32 weight gradient": (False, True, ["in one"] * 2 + ["one by one"]),
    "hybrid": (True, False, ["in one"] + ["one by one"] * 2),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("counts", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_tensor_cores_get_what_they_take_and_give_what_the_cpu_computes(
    recipe: str, counts: list[int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hybrid, fusion, forms = FORMS[name]

    def second_step(cores: TensorCores | None) -> list[Tensor]:
        layer, scaling = experts(recipe, len(counts), hybrid=hybrid, fusion=fusion, dtype=torch.bfloat16)
        if fusion:
            layer.weight.main_grad = torch.zeros(layer.weight.shape)  # type: ignore[attr-defined]
        for _ in range(2):
            if cores is not None:
                cores.calls.clear()
            x, grad = rows(counts, torch.bfloat16)
            y = layer(x, Segments(counts))
            layer.zero_grad()
            y.backward(grad)
            scaling.end_step()
        assert x.grad is not None
        return [y.detach(), x.grad, layer.weight.main_grad if fusion else layer.weight.grad]  # type: ignore[list-item]

    expected = second_step(None)
    cores = TensorCores(monkeypatch)
    found = second_step(cores)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=2.0**-7, atol=1e-6 * other.abs().amax().item() if len(other) else 0)
    busy = sum(count > 0 for count in counts)
    calls = [form for form in forms for _ in range(1 if form == "in one" else busy)]
    assert cores.calls == (calls if busy else [])


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 16), (torch.float64, 16), (torch.bfloat16, 24)])
def test_what_one_call_does_not_take_goes_one_by_one(
    dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another type of the result, or widths that are no multiples of 16."""
    monkeypatch.setattr(grouped_gemms, "_is_hopper", lambda device: True)
    a, b = torch.ones(16, 32).to(E4M3), torch.ones(2, width, 32).to(E4M3)
    assert not grouped_gemms._in_one(a, b, dtype)
    assert grouped_gemms._in_one(a, torch.ones(2, 16, 32).to(E4M3), torch.bfloat16)
    assert not grouped_gemms._in_one(a.to(E5M2), torch.ones(2, 16, 32).to(E4M3), torch.bfloat16)
    assert not grouped_gemms._in_one(a[:0], torch.ones(2, 16, 32).to(E4M3), torch.bfloat16)
