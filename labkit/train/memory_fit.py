"""Whether a run fits the memory of the machine or of its GPUs, with the sum in words where it does not.

The need is arithmetic: `labkit.models.memory_bytes` for each rank, plus what its process takes for itself. It is held
against what `labkit.launch.machine` says is available. Imports torch only on a machine with a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.config import RunConfig
from labkit.launch import info, machine, torchrun
from labkit.launch.launcher import MOST_RANKS
from labkit.launch.machine import GIB
from labkit.models.memory_bytes import RankMemory, rank_memory
from labkit.parallel.rank_generator import rank_generators
from labkit.schedules.ir import Schedule
from labkit.train.schedule_fit import schedule_of

TORCH_BYTES = 115 << 20
"""Private memory of a rank beyond tensors: modules that AdamW imports (100 MB), gloo and its threads. Measured on Linux
with torch 2.13: 118 MB after a step of the `tiny` preset on 4 and on 8 ranks, of which 3 MB are tensors."""
CUDA_BYTES = 500 << 20
"""GPU memory of a process that has made a CUDA context; not measured, 300 to 600 MB by generation and driver."""


NOTHING = RankMemory(0, 0, 0, 0)
"""Of a rank whose tensors are on a GPU, in the memory of the host."""


@dataclass(frozen=True)
class Need:
    """What some processes need together."""

    ranks: Sequence[RankMemory]
    """What each of them needs for its tensors."""
    torch_bytes: int
    """What each process takes for itself."""

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of all of them, by what they hold."""
        names = ("weights", "gradients", "optimizer", "activations")
        sums = {name: sum(getattr(rank, name) for rank in self.ranks) for name in names}
        return sums | {"torch": self.torch_bytes * len(self.ranks)}

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return sum(self.parts.values())

    @property
    def words(self) -> str:
        """`32 ranks need 975.3 GiB, up to 31.2 each (weights 93.1, ..., torch 3.6)`."""
        sums = ", ".join(f"{name} {size / GIB:.1f}" for name, size in self.parts.items())
        count, largest = len(self.ranks), max(rank.total for rank in self.ranks) + self.torch_bytes
        who = "1 rank needs" if count == 1 else f"{count} ranks need"
        each = "" if count == 1 else f", up to {largest / GIB:.1f} GiB each"
        return f"{who} {self.total / GIB:.1f} GiB{each} ({sums})"


def memory_problem(
    config: RunConfig, world_size: int, device: str = "auto", *, schedule: Schedule | None = None
) -> str:
    """Why `world_size` ranks do not fit this machine, or an empty string. Under torchrun, whose ranks may be on several
    machines, the ranks say it themselves; more ranks than one machine starts are the launcher's to refuse."""
    if config.train.allow_oversubscription or torchrun.started_us() or world_size > MOST_RANKS:
        return ""
    schedule, kind = schedule or schedule_of(config, world_size), info.device_kind(device)
    ranks, host = rank_memories(config, world_size, schedule, kind), machine.host_memory()
    in_host = Need(ranks if kind == "cpu" else [NOTHING] * world_size, TORCH_BYTES)
    found = too_much(config, in_host, host.available, host.words)
    if kind == "cpu":
        return found
    free = machine.free_gpu_memory()
    for gpu, available in enumerate(free):
        if on_gpu := ranks[gpu :: len(free)]:  # rank r is on GPU r % count
            found = found or too_much(config, Need(on_gpu, CUDA_BYTES), available, f"GPU {gpu}")
    return found


def rank_memories(config: RunConfig, world_size: int, schedule: Schedule, kind: info.DeviceKind) -> list[RankMemory]:
    """Of every rank; those at one place of the pipeline are alike."""
    parallel = config.parallel
    decoder, _ = rank_generators(
        world_size=world_size, tp=parallel.tp, pp=parallel.pp, cp=parallel.cp, ep=parallel.ep, etp=parallel.etp,
        order=parallel.order,
    )  # fmt: skip
    by_place = [rank_memory(config, world_size, schedule, place, kind) for place in range(schedule.pp)]
    return [by_place[decoder.coordinates(rank).get("pp", 0)] for rank in range(world_size)]


def too_much(config: RunConfig, need: Need, available: int, where: str) -> str:
    """The refusal of a need that is larger than what is available, with the sum; else an empty string."""
    if need.total <= available:
        return ""
    ways = [*_advice(config, need), "--allow-oversubscription (train.allow_oversubscription) to try anyway"]
    return f"{need.words}; {where} has {available / GIB:.1f} GiB available; take {', '.join(ways[:-1])}, or {ways[-1]}"


def _advice(config: RunConfig, need: Need) -> list[str]:
    """What makes the largest part smaller."""
    parts, half = need.parts, need.total / 2
    if parts["torch"] > half:
        return ["fewer ranks"]
    if parts["activations"] > half:
        recomputes = config.model.recompute_granularity == "full"
        return ["a smaller train.micro_batch_size", *([] if recomputes else ["model.recompute_granularity full"])]
    sharded = config.optim.distributed_optimizer or len(need.ranks) == 1
    return ["a smaller model", *([] if sharded else ["optim.distributed_optimizer true with dp above 1"])]
