"""The fp8 kernels on a GPU: the hardware's rounding beside torch's, captures, streams, and a machine without a C
compiler. All else about them is shown on a CPU (tests/unit/test_fp8_triton.py)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from labkit.fp8 import Float8Recipe, Float8Scaling
from labkit.fp8 import operands as fp8_operands
from labkit.fp8.casting import E4M3, E5M2, cast
from labkit.parallel import single_process_groups
from labkit.parallel.layers import ColumnParallelLinear, RowParallelLinear

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def kernels() -> ModuleType:
    """The module of the kernels, where this GPU runs them."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip(f"{torch.cuda.get_device_name()} is left to torch: needs Hopper or later (compute capability 9.0)")
    found = fp8_operands.kernels_for(torch.ones(1, 1, device="cuda"))
    assert found is not None and not found.INTERPRETED
    return found


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda()


def same_bytes(found: Tensor, expected: Tensor) -> None:
    """Equal bit by bit, but for the sign and payload of NaN."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    nan = expected.float().isnan()
    assert torch.equal(found.float().isnan(), nan)
    ours, theirs = (x.contiguous().view(torch.uint8).masked_fill(nan, 0) for x in (found, expected))
    assert torch.equal(ours, theirs), f"{(ours != theirs).sum().item()} of {ours.numel()} differ"


def every_16_bits(dtype: torch.dtype) -> Tensor:
    """All 65,536 values of a type of 16 bits, [256, 256]."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).short().view(dtype).view(256, 256).cuda()


def around_midpoints(dtype: torch.dtype) -> Tensor:
    """float32: each midpoint between neighbours of `dtype`, and the numbers next to it on both sides, [3, ...]."""
    grid = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    grid = grid[grid.isfinite()]
    middle = (grid[1:] + grid[:-1]) / 2
    near = [middle, torch.nextafter(middle, torch.tensor(0.0)), torch.nextafter(middle, torch.tensor(1e9))]
    return torch.cat([torch.stack(near), -torch.stack(near)], dim=1).cuda()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_hardware_rounds_as_torch_does(kernels: ModuleType, dtype: torch.dtype) -> None:
    one = torch.ones((), device="cuda")
    for x in (
        every_16_bits(torch.bfloat16), every_16_bits(torch.float16), around_midpoints(dtype),
        100 * random(1000, 1037), random(513, 70).t(),
    ):  # fmt: skip
        for scale in (one, one * 0.37, one * 2.0**20):
            _, rows, columns = kernels.sweep(x, scale, dtype, transposed=True)
            on_gpu, on_cpu = cast(x, scale, dtype), cast(x.cpu(), scale.cpu(), dtype)
            finite = ~x.isinf()
            same_bytes(rows[finite], on_gpu[finite])
            same_bytes(rows[finite].cpu(), on_cpu[finite.cpu()])
            assert rows.float()[~finite].isnan().all(), "an infinity does not saturate"
            same_bytes(columns, rows.t())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_amax_and_scales_are_torchs(dtype: torch.dtype) -> None:
    contents = [random(300, 130), random(1, 1), 1e-41 * random(5, 5), 1e38 * random(70, 70), torch.zeros(3, 3).cuda()]
    contents += [torch.tensor([[1.0, bad]], device="cuda") for bad in (float("inf"), float("-inf"), float("nan"))]
    contents += [random(20_000, 4096).bfloat16()]  # more peaks than one round of the second kernel takes
    for x in contents:
        made = []
        for alone in (False, True):
            with fp8_operands.torch_alone() if alone else nullcontext():
                peaks, so_far = fp8_operands.peaks(x), torch.zeros(3, device="cuda")[1]
                scale, inverse = fp8_operands.scales(peaks, dtype, 2, so_far=so_far)
                known = fp8_operands.operand_by_history(x, scale[None][0], dtype, transposed=False, so_far=so_far)
                made.append(torch.stack([peaks.amax(), scale, inverse, so_far, known[1]]))
        torch.testing.assert_close(*made, rtol=0, atol=0, equal_nan=True)


def layer_of(kind: type, recipe: str) -> Any:
    groups = single_process_groups(device="cuda")
    scaling = Float8Scaling(Float8Recipe(recipe), groups)
    shared: dict[str, Any] = {"group": groups.tp, "std": 0.1, "dtype": torch.bfloat16, "device": "cuda"}
    return kind("fc", 256, 384, precision=scaling, **shared)


def step(layer: Any, seed: int) -> tuple[Tensor, ...]:
    """(y, dx, dW) of one step."""
    x, grad = (random(64, 4, size, seed=seed + size).bfloat16() for size in (256, 384))
    x.requires_grad_()
    layer.zero_grad()
    y, _ = layer(x)
    y.backward(grad / 1000)
    layer.plan.gemms._scaling.end_step()
    assert x.grad is not None
    return y.detach(), x.grad, layer.weight.grad.clone()


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_layers_give_the_bits_that_they_give_with_torch(kind: type, recipe: str) -> None:
    ours, theirs = layer_of(kind, recipe), layer_of(kind, recipe)
    for seed in range(3):
        found = step(ours, seed)
        with fp8_operands.torch_alone():
            expected = step(theirs, seed)
        assert all(torch.equal(mine, other) for mine, other in zip(found, expected)), seed
    assert len(ours.plan.gemms._weight) == 4, "the kernels have transposed the weight"


def test_a_replay_casts_the_new_values_on_another_stream() -> None:
    x, scale, so_far = random(300, 130).bfloat16(), torch.full((), 30.0, device="cuda"), torch.zeros((), device="cuda")

    def made() -> fp8_operands.Operand:
        return fp8_operands.operand_by_history(x, scale, E4M3, transposed=True, so_far=so_far)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        made()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values, inverse, columns = made()
    assert columns is not None
    for seed in (5, 6):
        x.copy_(random(300, 130, seed=seed))
        so_far.zero_()
        graph.replay()
        same_bytes(values, cast(x, scale, E4M3))
        same_bytes(columns, cast(x, scale, E4M3).t())
        assert so_far == x.abs().amax().float() and inverse == 1 / scale


def test_a_kernel_that_has_not_run_is_not_compiled_in_a_capture() -> None:
    x, scale = random(77, 91), torch.full((), 30.0, device="cuda")
    cast(x, scale, E4M3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values, _, columns = fp8_operands.operand_by_history(x, scale, E4M3, transposed=True, so_far=None)
    assert columns is None
    graph.replay()
    same_bytes(values, cast(x, scale, E4M3))


def test_no_kernel_waits_for_the_gpu() -> None:
    x, scale, so_far = random(64, 64), torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    for mode in ("default", "error"):  # compiled in the first round
        torch.cuda.set_sync_debug_mode(mode)
        try:
            made = fp8_operands.scales(fp8_operands.peaks(x), E4M3, so_far=so_far)
            fp8_operands.operand(x, *made, E4M3, transposed=True)
            fp8_operands.operand_by_history(x, scale, E4M3, transposed=True, so_far=so_far)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_without_a_c_compiler_torch_takes_over(tmp_path: Path) -> None:
    """Triton compiles its launcher with one; nothing of an earlier compilation is found in an empty cache."""
    code = """if True:
        import torch, warnings
        from labkit.fp8 import operands as fp8_operands
        from labkit.fp8.casting import E4M3, cast
        x, scale = torch.randn(64, 64, device="cuda"), torch.full((), 30.0, device="cuda")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                values, inverse, columns = fp8_operands.operand_by_history(x, scale, E4M3, transposed=True, so_far=None)
        assert torch.equal(values.float(), cast(x, scale, E4M3).float()) and columns is None
        print(len([w for w in said if "made by torch, in more passes over memory: Triton:" in str(w.message)]))
    """
    missing = {"CC": str(tmp_path / "no-compiler"), "TRITON_CACHE_DIR": str(tmp_path)}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | missing | {"PYTHONPATH": path},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "1"
