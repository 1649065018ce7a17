"""Does a run fit the memory of a place: a machine, or one GPU? The bytes that its ranks need there, and a way out.

Each rank needs the bytes of its tensors (`memory.py`) and those of its process. `labkit.train.preflight` compares their
sum with the bytes that are free. Numbers only, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from labkit.comm.rank_generator import rank_generators
from labkit.config import RunConfig
from labkit.launch.machine import GIB
from labkit.plan.memory import RankMemory, checkpoint_bytes, rank_memory
from labkit.schedules import Schedule

TORCH_BYTES = 115 << 20
"""Private memory of a rank beyond tensors: modules that AdamW imports (100 MB), gloo and its threads. Measured on Linux
with torch 2.13: 118 MB after a step of the `tiny` preset (4 and 8 ranks), 3 MB of it tensors. On a machine without GPUs
the ranks share the 100 MB with their fork server, so the sum is larger than needed."""
CUDA_BYTES = 500 << 20
"""GPU memory of a process that has made a CUDA context; not measured, 300 to 600 MB by generation and driver."""


@dataclass(frozen=True)
class Need:
    """The memory that the processes at one place need together."""

    ranks: Sequence[RankMemory]
    """Memory of each process's tensors."""
    torch_bytes: int
    """Bytes of each process beside its tensors."""

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of all processes, by use."""
        names = ("weights", "gradients", "optimizer", "activations", "checkpoint")
        sums = {name: sum(getattr(rank, name) for rank in self.ranks) for name in names}
        if not sums["checkpoint"]:
            del sums["checkpoint"]
        return sums | {"torch": self.torch_bytes * len(self.ranks)}

    @property
    def total(self) -> int:
        """Bytes of all processes."""
        return sum(self.parts.values())

    @property
    def words(self) -> str:
        """`32 ranks need 975.3 GiB, up to 31.2 each (weights 93.1, ..., torch 3.6)`."""
        sums = ", ".join(f"{name} {size / GIB:.1f}" for name, size in self.parts.items())
        count, largest = len(self.ranks), max(rank.total for rank in self.ranks) + self.torch_bytes
        who = "1 rank needs" if count == 1 else f"{count} ranks need"
        each = "" if count == 1 else f", up to {largest / GIB:.1f} GiB each"
        return f"{who} {self.total / GIB:.1f} GiB{each} ({sums})"


def rank_memories(
    config: RunConfig, world_size: int, schedule: Schedule, device: Literal["cpu", "cuda"]
) -> list[RankMemory]:
    """Return the memory of every rank on its device. Ranks at one place of the pipeline need the same."""
    by_place = [rank_memory(config, world_size, schedule, place, device) for place in range(schedule.pp)]
    return _by_rank(config, world_size, by_place)


def host_copies(config: RunConfig, world_size: int, schedule: Schedule) -> list[RankMemory]:
    """Return the host memory that each rank on a GPU needs: the tensors of a checkpoint pass through the host."""
    saves = config.checkpoint.dir is not None
    saved = [checkpoint_bytes(config, world_size, schedule, place) if saves else 0 for place in range(schedule.pp)]
    return _by_rank(config, world_size, [RankMemory(0, 0, 0, 0, size) for size in saved])


def _by_rank(config: RunConfig, world_size: int, by_place: Sequence[RankMemory]) -> list[RankMemory]:
    """Return the memory of every rank from that of each place in the pipeline."""
    parallel = config.parallel
    decoder, _ = rank_generators(
        world_size=world_size, tp=parallel.tp, pp=parallel.pp, cp=parallel.cp, ep=parallel.ep, etp=parallel.etp,
        order=parallel.order,
    )  # fmt: skip
    return [by_place[decoder.coordinates(rank).get("pp", 0)] for rank in range(world_size)]


def shortage(config: RunConfig, need: Need, available: int, where: str) -> str:
    """Return a sentence with the sum and a way out if `need` is larger than `available` bytes, else an empty string."""
    if need.total <= available:
        return ""
    ways = [*_advice(config, need), "--allow-oversubscription (train.allow_oversubscription) to try anyway"]
    return f"{need.words}; {where} has {available / GIB:.1f} GiB available; take {', '.join(ways[:-1])}, or {ways[-1]}"


def _advice(config: RunConfig, need: Need) -> list[str]:
    """Return settings that make the largest part smaller."""
    parts, half = need.parts, need.total / 2
    if parts["torch"] > half:
        return ["fewer ranks"]
    if parts["activations"] > half:
        recomputes = config.model.recompute_granularity == "full"
        return ["a smaller train.micro_batch_size", *([] if recomputes else ["model.recompute_granularity full"])]
    sharded = config.optim.distributed_optimizer or len(need.ranks) == 1
    copied = config.checkpoint.asynchronous and parts["weights"] > 0  # on a GPU each save passes through the host
    return [
        "a smaller model",
        *(["checkpoint.asynchronous false"] if copied else []),
        *([] if sharded else ["optim.distributed_optimizer true with dp above 1"]),
    ]
