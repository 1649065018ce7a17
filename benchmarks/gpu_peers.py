"""How a part of the GPU benchmark sets peers beside ours: built one by one, compared, weighed, then timed in turn.

A peer that cannot be built or run, or that computes something else than ours, gives a row with the reason. The others
go on without it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from gpu_steps import DEVICE, rates, timed
from harness import Comparison
from torch import Tensor, nn

__all__ = ["DEVICE", "Side", "beside", "difference", "reason"]

WARMUP = 3
"""Steps of each side before its memory is measured: kernels are compiled, graphs captured and states allocated."""
GIB = 2**30
Step = Callable[[], Any]
Row = dict[str, Any]


@dataclass
class Side:
    """One alternative, built on its own."""

    step: Step
    """Timed; does the same work every time."""
    results: Callable[[], Mapping[str, Tensor]] = dict
    """The tensors of the last step that are compared with ours, by name."""
    passes: tuple[Step, Step, Step] | None = None
    """What `step` consists of, where somebody times it apart: drop gradients, forward, backward."""


# ---- what is measured of one side ----


def reason(error: BaseException) -> str:
    """An error in one line, also where it has no text; a compiler's first line says little, so four are joined."""
    text = " ".join(line.strip() for line in str(error).strip().splitlines()[:4])
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def difference(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected| in float64; nan where either holds one, so that it passes no limit."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm().clamp(min=torch.finfo(torch.float64).tiny))


def pools_bytes() -> int:
    """What the private pools of CUDA graphs hold of the GPU."""
    segments = torch.cuda.memory_snapshot()
    return sum(one["total_size"] for one in segments if tuple(one.get("segment_pool_id", (0, 0))) != (0, 0))


def held(device: torch.device) -> tuple[int, int]:
    """(bytes of tensors, bytes of graph pools) on a GPU, after what nobody needs was given back."""
    if device.type != "cuda":
        return 0, 0
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device), pools_bytes()


def memory(step: Step, before: tuple[int, int], device: torch.device) -> dict[str, float]:
    """GiB of a warmed-up side beyond `before`, which was read before it was built: `peak_gib`, what it holds and one
    step of it takes; `graph_pools_gib`, what its graphs hold, which the first number may lack. Empty on the host."""
    if device.type != "cuda":
        return {}
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before[0]
    return {"peak_gib": round(peak / GIB, 3), "graph_pools_gib": round((pools_bytes() - before[1]) / GIB, 3)}


def open_workspaces(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
    """Run products forward and backward: cuBLAS then has its workspaces, which else count to the first side."""
    layer, x = nn.Linear(64, 64, device=device, dtype=dtype), torch.ones(64, 64, device=device, dtype=dtype)
    layer(x.requires_grad_()).sum().backward()


# ---- all sides ----


def warmed_up(build: Callable[[], Side], device: torch.device) -> tuple[Side, dict[str, float]]:
    """A side after its warm-up, and its memory."""
    before = held(device)
    side = build()
    for _ in range(WARMUP):
        side.step()
    return side, memory(side.step, before, device)


def beside(
    case: str,
    builds: Mapping[str, Callable[[], Side]],
    *,
    device: torch.device,
    tolerance: float = 0.0,
    repetitions: int = 15,
    flops: float | None = None,
    describe: Callable[[Side, float | None], Row] | None = None,
    facts: Mapping[str, Any] = MappingProxyType({}),
    **shares: Any,
) -> Iterator[Comparison | Row]:
    """Rows of the peers that drop out, then one Comparison of the rest.

    builds: by name, ours first. Each is built, warmed up and measured in memory while the others stand still.
    tolerance: largest relative difference of a peer's results from ours; a peer beyond it is not timed.
    flops: of a step, for everyone's `rates`, which takes `shares`.
    describe: what else is told of a side, given its median seconds, or None where the times are rejected.
    facts: what else is told of the case.
    """
    forget_compiled()
    open_workspaces(device)
    ready: dict[str, Side] = {}
    weights: dict[str, dict[str, float]] = {}
    differences: dict[str, dict[str, float]] = {}
    expected: dict[str, Tensor] = {}
    for name, build in builds.items():
        try:
            side, weight = warmed_up(build, device)
            results = side.results()
        except Exception as error:
            if not ready:
                raise
            yield {"case": f"{case}: {name}", "could_not_run": reason(error)}
            continue
        found = {key: difference(tensor, expected[key]) for key, tensor in results.items()} if ready else {}
        if not ready:
            expected = {key: tensor.detach().clone() for key, tensor in results.items()}
        if side.passes is not None:  # sides may share weights: the next one starts without gradients
            side.passes[0]()
        if found:
            differences[name] = {key: float(f"{value:.2g}") for key, value in found.items()}
        if not all(value <= tolerance for value in found.values()):
            yield {"case": f"{case}: {name}", "not_the_same": differences.pop(name), "tolerance": tolerance}
            continue
        ready[name], weights[name] = side, weight
        del side, results
    steps = {name: side.step for name, side in ready.items()}
    for step in steps.values():
        step()
    before = compiled_graphs()
    found = timed(case, steps, repetitions=repetitions, warmup=0, device=device)
    facts = dict(facts) | ({"difference_from_ours": differences} if any(differences.values()) else {})
    facts |= {"compiled_while_timed": late} if (late := compiled_graphs() - before) else {}
    for key in ("peak_gib", "graph_pools_gib"):
        by_name = {name: weight[key] for name, weight in weights.items() if key in weight}
        facts |= {key: by_name} if any(by_name.values()) else {}
    if describe is not None:
        medians = {name: None if found.rejected else found.median(name) for name in ready}
        facts["by_name"] = {name: told(describe, side, medians[name]) for name, side in ready.items()}
    found = replace(found, facts=found.facts | facts)
    yield rates(found, flops, device, **shares) if flops else found


def told(describe: Callable[[Side, float | None], Row], side: Side, seconds: float | None) -> Row:
    """What `describe` tells; the reason where it fails, for the times stand without it."""
    try:
        return describe(side, seconds)
    except Exception as error:
        return {"not_described": reason(error)}


def compiled_graphs() -> int:
    """How many graphs torch.compile has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo")
    return 0 if dynamo is None else dynamo.utils.counters["stats"]["unique_graphs"]


def forget_compiled() -> None:
    """Drop what torch.compile keeps of earlier sizes: it would take changed sizes for variable ones."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
