"""The fp8 kernels on a machine without a GPU: run in Triton's interpreter, and compiled for Hopper without running.

The rounding of the cast is compared on a GPU (tests/gpu/test_fp8_triton_gpu.py): the interpreter has it wrong
(triton#8322), so there the kernels write what is to be cast.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from labkit.fp8 import operands as fp8_operands
from labkit.fp8.casting import E4M3, cast

ROOT = Path(__file__).parents[2]
CHECKS = ROOT / "tests" / "interpreted_fp8.py"
NAMES = re.findall(r"^def check_(\w+)", CHECKS.read_text(), re.MULTILINE)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def run_python(*arguments: str, **environment: str) -> str:
    """Standard output of a process of its own."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    known = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *arguments], env=known | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def raised() -> dict[str, str]:
    """What each check raised in the interpreter; one process runs them all."""
    return json.loads(run_python(str(CHECKS), TRITON_INTERPRET="1").splitlines()[-1])


@pytest.mark.sweep
@needs_triton
@pytest.mark.parametrize("name", NAMES)
def test_in_the_interpreter(name: str, raised: dict[str, str]) -> None:
    assert raised[f"check_{name}"] == ""


def test_on_a_cpu_triton_is_not_imported() -> None:
    code = """if True:
        import sys, torch
        from labkit.parallel import single_process_groups
        from labkit.fp8 import Float8Recipe, Float8Scaling
        from labkit.parallel.layers import ColumnParallelLinear
        groups = single_process_groups()
        scaling = Float8Scaling(Float8Recipe("current"), groups)
        layer = ColumnParallelLinear("fc", 32, 32, group=groups.tp, precision=scaling)
        layer(torch.ones(4, 1, 32))[0].sum().backward()
        print([name for name in sys.modules if name.split(".")[0] == "triton" or name == "labkit.fp8.kernels"])
    """
    assert run_python("-c", code) == "[]\n"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The module of the kernels, compiled and not interpreted."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from labkit.fp8 import kernels

    return kernels


TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def for_hopper(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int) -> str:
    """PTX of the kernel for sm_90, with every pointer and integer but those that it must not count on aligned to 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    free = kernel.do_not_specialize_on_alignment, kernel.do_not_specialize
    aligned = [name for name, kind in types.items() if kind != "fp32" and not any(name in names for names in free)]
    source = ASTSource(
        kernel, {name: types.get(name, "constexpr") for name in kernel.arg_names}, constants,
        {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )  # fmt: skip
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"]


def resources(assembly: str, tmp_path: Path) -> tuple[int, int]:
    """(registers of a thread, bytes that it spills), as NVIDIA's assembler reports them."""
    from triton import knobs

    (path := tmp_path / "kernel.ptx").write_text(assembly)
    told = subprocess.run(
        [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(path), "-o", str(path.with_suffix(".cubin"))],
        capture_output=True, text=True, timeout=120, check=True,
    ).stderr  # fmt: skip
    spilled = re.findall(r"(\d+) bytes spill", told)
    assert len(spilled) == 2, told
    [registers] = re.findall(r"Used (\d+) registers", told)
    return int(registers), sum(map(int, spilled))


@needs_triton
@pytest.mark.parametrize(("form", "instruction"), [("fp8e4nv", "e4m3x2"), ("fp8e5", "e5m2x2")])
@pytest.mark.parametrize("kind", TYPES)
def test_for_hopper_the_hardware_rounds_once_and_moves_whole_sectors(
    kernels: ModuleType, kind: str, form: str, instruction: str, tmp_path: Path
) -> None:
    """Every cast is one instruction from float32, none goes through float16 (which would round twice); float32 keeps
    its denormal numbers; loads and stores are of 16 bytes. 64 registers a thread leave room for 1,024 threads of the
    65,536 registers of a multiprocessor, and nothing is spilled to memory."""
    assert len(TYPES) == len(fp8_operands.KINDS) and TYPES[kind] in fp8_operands.KINDS
    types = {"x": f"*{kind}", "rows": f"*{form}", "columns": f"*{form}", "scale": "*fp32", "peaks": "*fp32"}
    types |= {"height": "i32", "width": "i32", "row_step": "i32", "limit": "fp32"}
    constants = {"column_step": 1, "CAST": True, "COLUMNS": True, "R": kernels.TILE_R, "C": kernels.TILE_C}
    assembly = for_hopper(kernels._sweep_tile, types, constants, kernels.WARPS)
    assert set(re.findall(r"cvt\.[\w.]*f8\w*|cvt\.[\w.]*e[45]m[32]\w*\.\w+", assembly)) == {
        f"cvt.rn.satfinite.{instruction}.f32"
    }
    assert ".ftz" not in assembly
    accesses = re.findall(r"(?:ld|st)\.global\.\S+", assembly)
    narrow = [access for access in accesses if "v4.b32" not in access]
    assert len(narrow) == 2, f"the scale read, a peak written, nothing else: {narrow}"
    registers, spilled = resources(assembly, tmp_path)
    assert registers <= 64 and spilled == 0


@needs_triton
def test_for_hopper_the_scale_is_made_without_a_spill(kernels: ModuleType, tmp_path: Path) -> None:
    """One program of 256 threads: each may have all 255 registers, and the quotients are rounded to nearest."""
    pointers = dict.fromkeys(("peaks", "scale", "inverse", "so_far"), "*fp32")
    numbers = dict.fromkeys(("count", "known", "noted"), "i32") | dict.fromkeys(
        ("limit", "largest_scale", "shrink"), "fp32"
    )
    constants = {"AT_ONCE": kernels.PEAKS_AT_ONCE}
    assembly = for_hopper(kernels._settle, pointers | numbers, constants, kernels.WARPS)
    assert set(re.findall(r"(?:div|rcp)\.\S+", assembly)) <= {"div.rn.f32", "rcp.rn.f32"}
    registers, spilled = resources(assembly, tmp_path)
    assert registers <= 255 and spilled == 0


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a machine where no kernel can start")
def test_where_no_kernel_starts_torch_makes_the_operand(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    x, scale = torch.randn(40, 30, generator=torch.Generator().manual_seed(1)), torch.tensor(7.0)
    with pytest.raises(kernels.NoKernel, match="driver"):
        kernels.sweep(x)
    monkeypatch.setattr(fp8_operands, "kernels_for", lambda x: None if fp8_operands._State.torch_alone else kernels)
    monkeypatch.setattr(fp8_operands._State, "torch_alone", False)

    def made() -> Any:
        return fp8_operands.operand_by_history(x, scale, E4M3, transposed=True, so_far=None)

    with pytest.warns(UserWarning, match=r"made by torch, in more passes over memory: Triton: RuntimeError: .*driver"):
        values, inverse, columns = made()
    assert torch.equal(values.float(), cast(x, scale, E4M3).float()) and inverse == 1 / scale and columns is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made()
