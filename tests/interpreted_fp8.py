"""Checks of the fp8 kernels in Triton's interpreter, run by tests/unit/test_fp8_triton.py in a process of its own: the
interpreter is chosen by TRITON_INTERPRET=1 when triton is imported, and holds for the whole process.

Prints one line of JSON: what each function `check_...` raised, or an empty string.
"""

from __future__ import annotations

import itertools
import json
import math
import traceback
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from labkit.comm.capturing import graph_capturing
from labkit.fp8 import Float8Recipe, Float8Scaling, kernels
from labkit.fp8 import operands as fp8_operands
from labkit.fp8.casting import E4M3, E5M2, cast, scale_of
from labkit.graphs.emulated.emulated_backend import EmulatedBackend
from labkit.moe.experts import StackedLinear
from labkit.moe.grouped_gemm import Segments
from labkit.parallel import WeightGradStore, single_process_groups
from labkit.parallel.layers import ColumnParallelLinear, RowParallelLinear

FORMATS = (E4M3, E5M2)
SHAPES = ((1, 1), (64, 64), (63, 65), (130, 70), (1, 200), (200, 1))
"""Below, at and above the sides of a tile."""
SPECIAL = {
    "ordinary": (),
    "zeros": None,
    "denormal": (1e-45, -1e-41),
    "largest": (3e38, -1e38),
    "infinite": (math.inf,),
    "minus infinite": (-math.inf, 1.0),
    "not a number": (math.nan,),
    "both": (math.nan, -math.inf),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tensors() -> Iterator[tuple[str, Tensor]]:
    """Every shape, every type with every content, and several orders of strides."""
    for shape in SHAPES:
        yield f"{shape}", random(*shape).bfloat16()
    for dtype, (name, values) in itertools.product(fp8_operands.KINDS, SPECIAL.items()):
        x = random(63, 65)
        if values is None:
            x.zero_()
        elif values:
            x.mul_(0 if name == "denormal" else 1).view(-1)[-len(values) :] = torch.tensor(values)
        yield f"{name}, {dtype}", x.to(dtype)
    yield "transposed", random(70, 130).t()
    yield "part of a larger one", random(200, 200)[3:140, 5:170:2]
    yield "repeated", random(1, 70).expand(90, 70)


def same(found: Tensor | None, expected: Tensor, what: str) -> None:
    assert found is not None and found.shape == expected.shape and found.dtype == expected.dtype, what
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=0, equal_nan=True, msg=what)


def check_amax_scale_clamp_and_transpose_equal_torch() -> None:
    for (what, x), dtype in itertools.product(tensors(), FORMATS):
        limit, margin = torch.finfo(dtype).max, 3
        with fp8_operands.torch_alone():
            expected = fp8_operands.scales(fp8_operands.peaks(x), dtype, margin)
        found, rows, columns = kernels.sweep(x)
        same(found.amax(), x.abs().amax().float(), f"amax, {what}")
        assert rows is None and columns is None
        for name, ours, theirs in zip(("scale", "1 / scale"), kernels.scales(found, dtype, margin), expected):
            same(ours, theirs, f"{name}, {what}")
        for scale in (expected[0], torch.tensor(1e3)):  # the second saturates
            again, rows, columns = kernels.sweep(x, scale, dtype, transposed=True, written=torch.float32)
            same(again, found, f"amax beside the cast, {what}")
            clamped = (x.float() * scale).clamp(-limit, limit)
            clamped = torch.where(x.isinf(), torch.nan, clamped)
            same(rows, clamped, f"clamped, {what}")
            same(columns, clamped.t(), f"transposed, {what}")


def check_operands_equal_those_of_torch() -> None:
    ways = (5.0, True), (5.0, False), (0.0, True)  # a scale of 0 comes from an infinity in the history
    for (what, x), dtype, (given, transposed) in itertools.product(tensors(), FORMATS, ways):
        scale, inverse = torch.tensor(given), torch.tensor(0.2)
        made, totals = [], []
        for alone in (False, True):
            with fp8_operands.torch_alone() if alone else nullcontext():
                so_far = torch.tensor([2.0, 0.5])[1]
                known = fp8_operands.operand_by_history(x, scale, dtype, transposed=transposed, so_far=so_far)
                own = fp8_operands.operand(x, scale, inverse, dtype, transposed=transposed)
                made.append((known, own))
                totals.append(so_far)
        same(totals[0], totals[1], f"largest so far, {what}")
        assert scale == given, "a known scale stays"
        for ours, theirs in zip(*made):
            same(ours[1], theirs[1], f"1 / scale, {what}")
            if x.isfinite().all():
                same(ours[0], theirs[0], what)
            assert ours[0].float()[~x.isfinite()].isnan().all(), f"not finite, {what}"
            assert (ours[2] is not None) == transposed and theirs[2] is None
            if ours[2] is not None:
                same(ours[2], ours[0].t(), f"transposed, {what}")


def check_an_empty_tensor_and_float64_are_left_to_torch() -> None:
    for x in (torch.empty(0, 4), random(4, 4).double(), torch.nn.Parameter(random(4, 4))):
        assert fp8_operands.kernels_for(x) is None
    scale, inverse = fp8_operands.scales(fp8_operands.peaks(torch.empty(0, 4)), E4M3)
    assert scale == inverse == 1
    values, _, _ = fp8_operands.operand(torch.empty(0, 4), scale, inverse, E4M3, transposed=True)
    assert values.shape == (0, 4) and values.dtype == E4M3


# ---- layers ----


def layer_of(kind: type, recipe: str, dtype: torch.dtype) -> Any:
    groups = single_process_groups()
    scaling = Float8Scaling(Float8Recipe(recipe), groups)
    return kind("fc", 96, 80, group=groups.tp, std=0.1, dtype=dtype, precision=scaling)


def step(layer: Any, number: int) -> tuple[Tensor, ...]:
    """(y, dx, dW) of one step."""
    dtype = layer.weight.dtype
    x, grad = random(35, 2, 96, seed=number).to(dtype).requires_grad_(), random(35, 2, 80, seed=number + 1).to(dtype)
    layer.zero_grad()
    y, _ = layer(x)
    y.backward(grad / 1000)
    layer.plan.gemms._scaling.end_step()
    assert x.grad is not None
    return y.detach(), x.grad, layer.weight.grad.clone()


def check_layers_compute_what_they_compute_with_torch() -> None:
    """Operands are the same bits; the order of a product's summation depends on how they lie."""
    kinds = ColumnParallelLinear, RowParallelLinear
    for kind, recipe, dtype in itertools.product(kinds, ("delayed", "current"), (torch.float32, torch.bfloat16)):
        ours, theirs = layer_of(kind, recipe, dtype), layer_of(kind, recipe, dtype)
        for number in range(3):
            found = step(ours, number)
            with fp8_operands.torch_alone():
                expected = step(theirs, number)
            bound = 1e-5 if dtype == torch.float32 else 2**-7
            for mine, other in zip(found, expected):
                assert ((mine - other).norm() <= bound * other.norm()).item(), (kind, recipe, dtype, number)
        assert torch.equal(ours.plan.gemms._scaling.scales, theirs.plan.gemms._scaling.scales)


def check_experts_compute_what_they_compute_with_torch() -> None:
    """Weights of experts are stacked with their transposes."""
    groups, counts = single_process_groups(), [40, 0, 1, 29]
    for recipe, dtype in itertools.product(("delayed", "current"), (torch.float32, torch.bfloat16)):
        found: list[list[Tensor]] = []
        for alone in (False, True):
            scaling = Float8Scaling(Float8Recipe(recipe), groups)
            made: dict[str, Any] = {"ep": groups.ep, "etp": groups.etp, "partition_dim": 1, "std": 0.1, "dtype": dtype}
            layer = StackedLinear("experts", "fc1", (4, 80, 96), gemms=scaling.grouped_gemms, **made)
            found.append([])
            with fp8_operands.torch_alone() if alone else nullcontext():
                for number in range(3):
                    x = random(70, 96, seed=number).to(dtype).requires_grad_()
                    layer.zero_grad()
                    y = layer(x, Segments(counts))
                    y.backward(random(70, 80, seed=number + 1).to(dtype) / 1000)
                    assert x.grad is not None and layer.weight.grad is not None
                    found[-1] += [y.detach(), x.grad, layer.weight.grad]
                    if number or recipe == "current":
                        assert len(layer.plan.gemms._weight) == (3 if alone else 4), "without transposes"  # type: ignore
                    scaling.end_step()
        for mine, other in zip(*found):
            assert ((mine - other).norm() <= (1e-5 if dtype == torch.float32 else 2**-7) * other.norm()).item(), recipe


def check_backward_keeps_a_byte_for_a_value_and_only_the_transposed() -> None:
    layer, kept = layer_of(ColumnParallelLinear, "delayed", torch.bfloat16), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(random(35, 2, 96).bfloat16())
    activations = [t for t in kept if t.data_ptr() != layer.weight.data_ptr()]
    assert sum(t.nbytes for t in activations) == 70 * 96 + 4
    assert [tuple(t.shape) for t in activations if t.nbytes > 4] == [(96, 70)]
    with torch.no_grad():
        packed = layer.plan.gemms.pack(random(35, 2, 96).bfloat16(), "input", None, trains=False)
    assert len(packed) == 2, "an evaluation transposes nothing"


def check_w_gives_the_weight_gradient_that_b_gives() -> None:
    whole, parts = (layer_of(ColumnParallelLinear, "current", torch.float32) for _ in range(2))
    expected, store = step(whole, 1)[2], WeightGradStore()
    x, grad = random(35, 2, 96, seed=1).requires_grad_(), random(35, 2, 80, seed=2)
    with store.collecting(0):
        parts(x)[0].backward(grad / 1000)
    assert parts.weight.grad is None
    store.run(0)
    assert torch.equal(parts.weight.grad, expected)


def check_the_weight_that_graphs_read_keeps_its_places_and_follows() -> None:
    layer = layer_of(ColumnParallelLinear, "current", torch.float32)
    gemms = layer.plan.gemms
    gemms.keep_weight(layer.weight)
    places = [t.data_ptr() for t in gemms._kept]
    for alone in (False, True):  # torch may take over between two steps
        with torch.no_grad():
            layer.weight.copy_(random(80, 96, seed=5 + alone))
        with fp8_operands.torch_alone() if alone else nullcontext():
            gemms.refresh_weight(layer.weight)
        assert [t.data_ptr() for t in gemms._kept] == places and len(places) == 3
        fresh = cast(layer.weight.detach(), scale_of(layer.weight.abs().amax(), E4M3), E4M3)
        same(gemms._kept[0], fresh, "rows")
        same(gemms._kept[2], fresh.t(), "columns")


# ---- where the kernels do not run ----


def check_a_compiler_that_fails_is_named_once_and_torch_takes_over() -> None:
    class Broken:
        __name__ = "broken"
        launches = 0

        def __getitem__(self, grid: Any) -> Any:
            self.launches += 1
            raise RuntimeError("Failed to find C compiler.")

    real = kernels._settle
    kernels._settle = broken = Broken()  # the second launch fails: the first one's work must leave nothing behind
    x, so_far = random(40, 30), torch.tensor(0.0)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                found = fp8_operands.operand_by_history(x, torch.tensor(5.0), E4M3, transposed=True, so_far=so_far)
        assert len(said) == 1 and str(said[0].message).endswith("Triton: RuntimeError: Failed to find C compiler.")
        same(found[0], cast(x, torch.tensor(5.0), E4M3), "values")
        assert found[2] is None and so_far == x.abs().amax() and broken.launches == 1
    finally:
        kernels._settle, fp8_operands._State.torch_alone = real, False


def check_a_failure_of_a_kernel_that_has_run_is_not_hidden() -> None:
    class Failing:
        __name__ = kernels._settle.__name__

        def __getitem__(self, grid: Any) -> Any:
            raise RuntimeError("an illegal memory access")

    x = random(40, 30)
    fp8_operands.scales(fp8_operands.peaks(x), E4M3)
    real, kernels._settle = kernels._settle, Failing()
    try:
        fp8_operands.scales(fp8_operands.peaks(x), E4M3)
        raise AssertionError("the error is lost")
    except RuntimeError as error:
        assert str(error) == "an illegal memory access"
    finally:
        kernels._settle = real


def check_nothing_is_compiled_inside_a_capture() -> None:
    known, new = random(40, 30), random(41, 30)
    scale = torch.tensor(5.0)
    made = {"transposed": True, "so_far": None}
    fp8_operands.operand_by_history(known, scale, E4M3, **made)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with graph_capturing():
            assert fp8_operands.operand_by_history(known, scale, E4M3, **made)[2] is not None
            values, _, columns = fp8_operands.operand_by_history(new, scale, E4M3, **made)
    assert columns is None
    same(values, cast(new, scale, E4M3), "values")
    assert fp8_operands.operand_by_history(new, scale, E4M3, **made)[2] is not None, "the kernels are not given up"


def check_an_emulated_capture_records_what_torch_does() -> None:
    """Its recorder sees torch's operations; a replay must compute with the new input."""
    x, scale = random(40, 30), torch.tensor(5.0)
    backend = EmulatedBackend()
    with backend.capturing(backend.new_pool(), "cast") as graph:
        values, _, columns = fp8_operands.operand_by_history(x, scale, E4M3, transposed=True, so_far=None)
    assert columns is None
    x.copy_(random(40, 30, seed=9))
    graph.replay()
    same(values, cast(x, scale, E4M3), "values")


if __name__ == "__main__":
    assert kernels.INTERPRETED, "run with TRITON_INTERPRET=1"
    raised = {}
    for name, check in [(name, value) for name, value in globals().items() if name.startswith("check_")]:
        try:
            check()
            raised[name] = ""
        except Exception:
            raised[name] = traceback.format_exc()
    print(json.dumps(raised))
