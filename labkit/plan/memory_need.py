"""Whether a run fits the memory of a place (a machine, or one GPU): the bytes that it needs there, and a way out.

Each rank needs the bytes of its tensors (`memory.py`) and those of its process. `labkit.train.preflight` compares their
sum with the free bytes. Numbers only, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from labkit.comm.rank_generator import rank_generators
from labkit.config import RunConfig
from labkit.launch.available_memory import GIB
from labkit.plan.memory import RankMemory, checkpoint_bytes, rank_memory
from labkit.schedules import Schedule

TORCH_BYTES = 115 << 20
"""Private memory of a rank beyond tensors: modules that AdamW imports (100 MB), gloo and its threads. Measured on Linux
with torch 2.13: 118 MB after a step of the `tiny` preset (4 and 8 ranks), 3 MB of it tensors. On a machine without GPUs
the ranks share the 100 MB with their fork server, so the sum is larger than needed."""
CUDA_BYTES = 500 << 20
"""GPU memory of a process that has a CUDA context; not measured, 300 to 600 MB depending on GPU and driver."""


def rank_memories(
    config: RunConfig, world_size: int, schedule: Schedule, device: Literal["cpu", "cuda"]
) -> list[RankMemory]:
    """Return the memory of every rank on its device. Ranks at one place in the pipeline need equally much."""
    by_place = [rank_memory(config, world_size, schedule, place, device) for place in range(schedule.pp)]
    return _by_rank(config, world_size, by_place)


def host_copies(config: RunConfig, world_size: int, schedule: Schedule, *, saves: bool) -> list[RankMemory]:
    """Return the host memory that each rank on a GPU needs: the tensors of a checkpoint pass through the host.

    saves: the run saves checkpoints at all.
    """
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


def shortage(config: RunConfig, ranks: Sequence[RankMemory], process_bytes: int, available: int, where: str) -> str:
    """Return why these ranks do not fit the `available` bytes of a place, and a way out; an empty string if they do.

    process_bytes: bytes that each process needs there in addition to its tensors. where: the place in words.
    """
    parts = _parts(ranks, process_bytes)
    needed = sum(parts.values())
    if needed <= available:
        return ""
    who, each = "1 rank needs", ""
    if len(ranks) > 1:
        largest = max(rank.total for rank in ranks) + process_bytes
        who, each = f"{len(ranks)} ranks need", f", up to {largest / GIB:.1f} GiB each"
    sums = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
    ways = [
        *_advice(config, parts, len(ranks)),
        "--allow-oversubscription (train.allow_oversubscription) to try anyway",
    ]
    return (
        f"{who} {needed / GIB:.1f} GiB{each} ({sums}); {where} has {available / GIB:.1f} GiB available; take "
        f"{', '.join(ways[:-1])}, or {ways[-1]}"
    )


def _parts(ranks: Sequence[RankMemory], process_bytes: int) -> dict[str, int]:
    """Return the bytes of all ranks together, by use; `torch` are those of their processes."""
    names = ("weights", "gradients", "optimizer", "activations")
    parts = {name: sum(getattr(rank, name) for rank in ranks) for name in (*names, "checkpoint", "workspaces")}
    used = {name: size for name, size in parts.items() if size or name in names}
    return used | {"torch": process_bytes * len(ranks)}


def _advice(config: RunConfig, parts: dict[str, int], ranks: int) -> list[str]:
    """Return settings that make the largest part smaller."""
    half = sum(parts.values()) / 2
    if parts["torch"] > half:
        return ["fewer ranks"]
    if parts["activations"] > half:
        recomputes = config.model.recompute_granularity == "full"
        return ["a smaller train.micro_batch_size", *([] if recomputes else ["model.recompute_granularity full"])]
    sharded = config.optim.distributed_optimizer or ranks == 1
    copied = config.checkpoint.asynchronous and parts["weights"] > 0  # on a GPU each save passes through the host
    return [
        "a smaller model",
        *(["checkpoint.asynchronous false"] if copied else []),
        *([] if sharded else ["optim.distributed_optimizer true with dp above 1"]),
    ]
