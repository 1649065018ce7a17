"""What the scaling benchmark runs: models that fit, and a point for each number of ranks of each series. No torch.

A series has one parallel axis, from 1 rank to all of them in powers of two.

    strong      the same model and the same global batch on every number of ranks
    weak        the work of a rank stays about the same: tp widens the model by the root of n, pp takes n times as many
                layers, dp n times the samples, cp n times the sequence, ep n times the experts and the samples

Weak scaling of tp widens the model as arXiv 1909.08053, Table 1, does, and that of pp lengthens it as arXiv 2104.04473,
section 5.4.1, does. Work doesn't grow by exactly n (under cp that of attention grows with the square of the sequence),
so efficiency is always a ratio of FLOP/s, never of seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from labkit import plan
from labkit.config import ConfigError, RunConfig
from labkit.plan.device_memory import gpu_memory
from labkit.plan.fitting import RESERVE, ends_first
from labkit.plan.machine import Machine
from labkit.plan.stages import configured_schedule
from labkit.plan.step_time import StepPrediction, predict_step
from labkit.plan.workload import Workload

AXES = ("tp", "pp", "dp", "cp", "ep")
TRANSPORTS = {"posted": None, "batched": True, "even_odd": False}
"""Labkit's transports between stages -> `schedule.batch_p2p_comm`."""
COMMON: dict[str, Any] = {"train.record_events": False, "model.use_cpu_initialization": False}
ON_GPU = COMMON | {
    "model.layers": 32, "model.heads": 32, "model.seq_length": 2048, "model.vocab_size": 51200,
    "train.micro_batch_size": 1, "train.global_batch_size": 16, "optim.precision": "bf16",
}  # fmt: skip
ON_CPU = COMMON | {
    "model.layers": 4, "model.heads": 4, "model.seq_length": 64, "model.vocab_size": 256,
    "train.micro_batch_size": 1, "train.global_batch_size": 4,
}  # fmt: skip
HIDDEN = {"cuda": (4096, 3072, 2048, 1024, 512), "cpu": (64,)}
"""Hidden sizes, of which a series takes the first that fits one rank: of 32 layers 6.7, 3.8, 1.7, 0.5 and 0.1 billion
parameters."""
EXPERTS_PER_RANK = 2
"""Experts of a rank under weak scaling of ep, each as wide as twice the hidden size."""


class Point(NamedTuple):
    """One training configuration on one number of ranks."""

    axis: str
    kind: str
    """strong, weak, or one of `TRANSPORTS`."""
    ranks: int
    config: RunConfig

    @property
    def series(self) -> tuple[str, str]:
        """Points of the same series are compared."""
        return self.axis, self.kind

    @property
    def case(self) -> str:
        """The point in words."""
        if self.kind in TRANSPORTS:
            return f"pp {self.ranks}, transport {self.kind}"
        return f"{self.axis} {self.ranks}, {self.kind}"

    @property
    def flops(self) -> float:
        """Operations of a step of the model on each rank, without recomputation."""
        config = self.config
        total = plan.step_flops(config.model, samples=config.train.global_batch_size, moe=config.moe).total
        return total / self.ranks

    def predicted(self, machine: Machine) -> StepPrediction:
        """Return the plan's step; ValueError for what the machine has no times for."""
        return predict_step(Workload(self.config, self.ranks, software=machine.default_software), machine)

    def peak_bytes(self) -> int:
        """Return the plan's peak of the fullest rank on a GPU."""
        schedule = configured_schedule(self.config, self.ranks)
        workload = Workload(self.config, self.ranks)
        return max(gpu_memory(workload, place, schedule).peak for place in ends_first(schedule))

    def forbidden(self) -> str:
        """Return the rule that forbids this layout, or an empty string."""
        try:
            self.config.validate(self.ranks)
        except ConfigError as error:
            return "; ".join(str(error).splitlines())
        return ""


def counts(ranks: int) -> list[int]:
    """Return 1, 2, 4, ..., ranks."""
    return [1 << power for power in range(ranks.bit_length())]


def points(parts: Sequence[str], ranks: int, device: str, memory: float) -> list[Point]:
    """Return the points of these parts, series by series.

    memory: bytes of a GPU; on a CPU it is not asked.

    Raises:
        ValueError: a GPU has too little memory for the smallest model of a series.
    """
    found = []
    for axis in (axis for axis in AXES if axis in parts):
        found += _series(axis, ranks, device, memory)
    if "transports" in parts:
        pipeline = next(point for point in _series("pp", ranks, device, memory) if point.ranks == ranks)
        for name, batched in TRANSPORTS.items():
            config = pipeline.config.replaced({"schedule.batch_p2p_comm": batched})
            found.append(Point("pp", name, ranks, config))
    return found


def _series(axis: str, ranks: int, device: str, memory: float) -> list[Point]:
    """Return strong and weak scaling of an axis, with the largest model that fits all of their points."""
    for hidden in HIDDEN[device]:
        base = _base(axis, ranks, device, hidden)
        found = [_point(base, axis, kind, count) for kind in ("strong", "weak") for count in counts(ranks)]
        fits = device == "cpu" or all(
            point.peak_bytes() <= memory - RESERVE for point in found if not point.forbidden()
        )
        if fits:
            return found
    raise ValueError(f"{axis}: even hidden {HIDDEN[device][-1]} needs more than the {memory / 1e9:.1f} GB of a GPU")


def _base(axis: str, ranks: int, device: str, hidden: int) -> RunConfig:
    """Return a series' model on one rank. All ranks of dp get at least two microbatches."""
    base = RunConfig().replaced((ON_GPU if device == "cuda" else ON_CPU) | {"model.hidden": hidden})
    base = base.replaced({"train.global_batch_size": max(base.train.global_batch_size, 2 * ranks)})
    if axis != "ep":
        return base
    return base.replaced({
        "model.layers": base.model.layers // 2, "moe.num_experts": max(8, ranks), "moe.top_k": 2,
        "moe.ffn_hidden": 2 * hidden,
    })  # fmt: skip


def _point(base: RunConfig, axis: str, kind: str, ranks: int) -> Point:
    """Return a series' point on `ranks` ranks."""
    changes: dict[str, Any] = {}
    if axis == "dp":
        changes = {"optim.distributed_optimizer": True} if ranks > 1 else {}
    elif ranks > 1:
        changes = {f"parallel.{axis}": ranks}
    if axis == "tp" and ranks > 1:
        changes["parallel.sequence_parallel"] = True
    if kind == "weak":
        changes |= _grown(base, axis, ranks)
    return Point(axis, kind, ranks, base.replaced(changes))


def _grown(base: RunConfig, axis: str, ranks: int) -> dict[str, Any]:
    """Return what grows with the ranks under weak scaling."""
    model = base.model
    if axis == "tp":  # 1, 1.5, 2, 3, 4 ... times as wide, in heads of the same size
        power = ranks.bit_length() - 1
        halves = 2 ** (power // 2) * (3 if power % 2 else 2)
        return {"model.hidden": model.hidden * halves // 2, "model.heads": model.heads * halves // 2}
    if axis == "pp":
        return {"model.layers": model.layers * ranks}
    if axis == "cp":
        return {"model.seq_length": model.seq_length * ranks}
    samples = {"train.global_batch_size": base.train.global_batch_size * ranks}
    return samples | {"moe.num_experts": EXPERTS_PER_RANK * ranks} if axis == "ep" else samples
