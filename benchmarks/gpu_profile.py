"""What a profile of a step shows; and a part of the GPU benchmark: where the time of a GPT-2 step goes.

Kernels, launches and idle time are read from a profile of the GPU alone. A profiler of the host's operations would slow
the launches, and the GPU would idle where it otherwise does not. Each number is the median over several profiled steps.

The phases need the host's operations. A profile says which kernels each operation launched, and inside which others the
operation ran. So every kernel belongs to a phase of the step, also in the backward, whose operations bear the names of
autograd's nodes. No idle time is read from such a profile: the rest of a step is what its unprofiled time leaves.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpu_peers import DEVICE, Row, open_workspaces
from gpu_plain import GPT2, Training, no_ranges, our_training, plain_training
from gpu_steps import synchronize, timed
from harness import Comparison
from torch.profiler import ProfilerActivity, profile, record_function

from labkit.config import ModelConfig

WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
"""Calls in which the host stands still until the GPU has come so far."""
STEP = "the profiled step"
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
SAMPLES = 5
"""Steps that are profiled for one number."""
REST = "rest of the step"

# ---- a profile as data ----


@dataclass(frozen=True)
class Op:
    """One event of a profile; microseconds."""

    path: tuple[str, ...]
    """Names of the operations around it, the outermost first, and its own."""
    start: float
    end: float
    on_gpu: bool = False
    annotated: bool = False
    """Somebody's range, no operation; the profiler shows it on the GPU as well."""
    own_us: float = 0.0
    """On the host, less the operations inside."""
    kernels: tuple[tuple[str, float], ...] = ()
    """What it launched itself: name and time on the GPU."""


def path_of(event: Any) -> tuple[str, ...]:
    """Names from the outermost operation to this one."""
    names = [event.name]
    while (event := event.cpu_parent) is not None:
        names.append(event.name)
    return tuple(reversed(names))


def profiled(step: Callable[[], Any], device: torch.device, *, operations: bool = False) -> list[Op]:
    """One step, which the caller has warmed up: kernels, and the host's calls of CUDA.

    operations: also torch's operations, with which the host takes longer; the only ones to be seen on a CPU.
    """
    activities = [ProfilerActivity.CUDA] * (device.type == "cuda") + [ProfilerActivity.CPU] * operations
    synchronize(device)
    with profile(activities=activities) as seen:
        with record_function(STEP):
            step()
        synchronize(device)
    events: Any = seen.events() or []
    return [
        Op(
            path_of(e), e.time_range.start, e.time_range.end,
            on_gpu=e.device_type.name == "CUDA", annotated=bool(e.is_user_annotation),
            own_us=e.self_cpu_time_total, kernels=tuple((k.name, k.duration) for k in e.kernels),
        )
        for e in events
    ]  # fmt: skip


def medians(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each number; one that a sample lacks is 0 there."""
    names = dict.fromkeys(name for sample in samples for name in sample)
    return {name: statistics.median(sample.get(name, 0.0) for sample in samples) for name in names}


def ranges_in(ops: Sequence[Op]) -> set[str]:
    """Names of annotated ranges: on the GPU they cover kernels and are none."""
    return {op.path[-1] for op in ops if op.annotated}


def on_the_gpu(ops: Sequence[Op]) -> list[Op]:
    """Kernels, copies and fills."""
    ranges = ranges_in(ops)
    return [op for op in ops if op.on_gpu and op.path[-1] not in ranges]


def kernels_in(ops: Sequence[Op]) -> list[Op]:
    """Kernels alone."""
    return [op for op in on_the_gpu(ops) if not op.path[-1].startswith(("Memcpy", "Memset"))]


def work_of(ops: Sequence[Op]) -> dict[str, float]:
    """Kernels on the GPU, the sum of their times, and the host's calls that start kernels; a graph is one call."""
    found = kernels_in(ops)
    launches = sum(not op.on_gpu and op.path[-1] in LAUNCHES for op in ops)
    return {"kernels": len(found), "launches": launches, "kernel_us": sum(op.end - op.start for op in found)}


def work_facts(step: Callable[[], Any], seconds: float | None, device: torch.device) -> Row:
    """What the GPU does in a step: its kernels, and with `seconds`, the step's time without a profiler, that time over
    the sum of theirs and the share of it that they leave."""
    if device.type != "cuda":
        return {}
    work = medians([work_of(profiled(step, device)) for _ in range(SAMPLES)])
    row: Row = {"kernels": int(work["kernels"]), "launches": int(work["launches"])}
    row["kernel_ms"] = round(work["kernel_us"] / 1e3, 3)
    if seconds is None:
        return row
    busy = work["kernel_us"] / 1e6
    return row | {"over_kernels": round(seconds / busy, 3), "idle": round(1 - busy / seconds, 3)}


def waits(ops: Sequence[Op]) -> tuple[int, float]:
    """(how often, microseconds) the host waited for the GPU inside the step."""
    ends = [op.end for op in ops if op.path[-1] == STEP and not op.on_gpu]
    found = [op for op in ops if not op.on_gpu and op.path[-1] in WAITS and op.start < max(ends, default=0.0)]
    return len(found), sum(op.end - op.start for op in found)


# ---- phases ----


def phase(path: Sequence[str]) -> str:
    """To which phase of a step an operation belongs. labkit's loss computes the output layer's products too."""
    if any("_LinearCrossEntropy" in name for name in path):
        return "output layer and loss"
    if any(word in name for name in path for word in ("cross_entropy", "nll_loss", "NllLoss", "LogSoftmax")):
        return "loss"
    if "update" in path:
        return "optimizer"
    if "finalize-grads" in path:
        return "gradients: norm, check"
    if "optimizer" in path:
        return "gradients: clip"
    if any(name.startswith("autograd::engine::evaluate_function") for name in path):
        return "backward"
    return "forward" if "forward-backward" in path else "other"


def by_phase(ops: Sequence[Op], *, on_gpu: bool) -> dict[str, float]:
    """Milliseconds of kernels and copies by phase, `other` where nobody is known to have launched them; without a GPU,
    of the host."""
    found: dict[str, float] = defaultdict(float)
    ranges = ranges_in(ops)
    for op in ops:
        if not op.on_gpu:
            us = sum(us for name, us in op.kernels if name not in ranges) if on_gpu else op.own_us
            found[phase(op.path)] += us / 1e3
    if on_gpu:
        found["other"] += max(0.0, sum(op.end - op.start for op in on_the_gpu(ops)) / 1e3 - sum(found.values()))
    return {name: ms for name, ms in found.items() if round(ms, 6)}


def shares(phases: dict[str, float], step_ms: float) -> Row:
    """Rows of a table: milliseconds and shares of the step. Where the phases take longer than the step (they
    overlapped, or the profiler slowed them), shares are of their sum and there is no rest."""
    busy = sum(phases.values())
    total = max(step_ms, busy)
    parts = phases | {REST: total - busy}
    return {
        "step_ms": round(step_ms, 3),
        "ms": {name: round(ms, 3) for name, ms in parts.items()},
        "share": {name: round(ms / total, 3) for name, ms in parts.items()},
    }


def table_row(case: str, training: Training, step_ms: float, device: torch.device) -> Row:
    """Phases of one side's step."""

    def step() -> None:
        training.step(lambda name, log_level=1: record_function(name))

    samples = [profiled(step, device, operations=True) for _ in range(SAMPLES)]
    phases = medians([by_phase(ops, on_gpu=device.type == "cuda") for ops in samples])
    counts, us = zip(*(waits(ops) for ops in samples), strict=True)
    row: Row = {"case": case} | shares(phases, step_ms)
    row |= {"host_waits": statistics.median(counts), "host_waits_ms": round(statistics.median(us) / 1e3, 3)}
    return row | {"idle": "not measured: the profiler of the operations slows the launches"}


def where(
    model: ModelConfig = GPT2,
    micro_batch: int = 16,
    *,
    device: torch.device = DEVICE,
    precision: str = "bf16",
    repetitions: int = 15,
) -> Iterator[Comparison | Row]:
    """G2 in parts: forward, backward, loss, norm, clip, optimizer, rest, and waits of the host in a step, eager."""
    open_workspaces(device)
    made: dict[str, Any] = {"device": device, "precision": precision}
    sides = {
        "labkit": our_training(model, micro_batch, **made),
        "plain, eager": plain_training(model, micro_batch, **made),
    }
    for one in sides.values():
        for _ in range(3):
            one.step(no_ranges)
    case = f"G2: GPT, {model.layers} layers h{model.hidden} s{model.seq_length} b{micro_batch}, whole step in phases"
    steps = {name: one.side().step for name, one in sides.items()}
    found = timed(case, steps, repetitions=repetitions, warmup=1, device=device)
    yield found
    for name, one in sides.items():
        ms = 1e3 * found.median(name)
        row = table_row(f"{case}, {name}", one, ms, device)
        yield row | ({"step_rejected": found.rejected} if found.rejected else {})
