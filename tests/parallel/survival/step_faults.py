"""Faults at one moment of a step: a rank is killed, stopped, or does not go on.

`KillAtCall` numbers all Python and C functions that a rank calls from the end of its first step to the end of its
second: report and checkpoint of the first, then forward, backward, communication and update of the second. So n moments
can be spread over a step evenly, and a killed run says in which part of the step it died.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from survival_runs import listening
from torch import nn

from labkit.config import RunConfig
from labkit.train import pretrain
from labkit.train.forward_step import gpt_forward_step

PARTS = {
    "the save": ("labkit/train/checkpoint/",),
    "communication": (
        "labkit/comm/capturing",
        "labkit/comm/collectives",
        "labkit/comm/gloo",
        "labkit/comm/group_mesh",
        "labkit/comm/group_registry",
        "labkit/comm/in_flight",
        "labkit/comm/nccl",
        "labkit/comm/p2p",
        "labkit/comm/pending",
        "labkit/comm/stream_clock",
        "torch/distributed/",
    ),
    "the update": (
        "labkit/parallel/data_parallel/optimizer",
        "labkit/parallel/data_parallel/distributed_optimizer",
        "torch/optim/",
    ),
    "the report": ("labkit/train/reporting/",),
}
"""Part of a step -> files whose functions belong to it; what is left is forward, backward or the loop."""


class KillAtCall:
    """An observer of `pretrain` that kills its rank by SIGKILL before call number `at`; None only counts."""

    def __init__(self, rank: int, at: int | None, told: str) -> None:
        """told: a folder for the time and place of the kill, process ids, and ports."""
        self.rank, self.at, self.told, self.calls, self.updates = rank, at, told, 0, 0
        self._file = -1

    def on_model(self, groups: Any, chunks: Sequence[nn.Module], schedule: Any) -> None:
        """Say who this is."""
        rank = groups.world.rank
        ports = " ".join(map(str, listening()))
        Path(self.told, f"rank-{rank}").write_text(f"{os.getpid()} {ports}")
        if rank == self.rank:
            self._file = os.open(Path(self.told, "died"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def on_gradients(self, step: int, chunks: Sequence[nn.Module]) -> None:
        """Nothing to do."""

    def on_update(self, step: int, chunks: Sequence[nn.Module]) -> None:
        """Count from the end of this process's first step to the end of its second."""
        self.updates += 1
        if self._file >= 0:
            sys.setprofile(self._count if self.updates == 1 else None)

    def _count(self, frame: Any, event: str, _: Any) -> None:
        if event in ("call", "c_call"):
            if self.calls == self.at:
                os.write(self._file, f"{time.monotonic()} {part_of_step(frame)}".encode())
                os.kill(os.getpid(), signal.SIGKILL)
            self.calls += 1


def part_of_step(frame: Any) -> str:
    """The part of a step in which a frame runs."""
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        for part, files in PARTS.items():
            if any(one in file for one in files):
                return part
        if "torch/autograd/graph" in file or name in ("backward", "_engine_run_backward"):
            return "backward"
        if name in ("forward", "gpt_forward_step"):
            return "forward"
        frame = frame.f_back
    return "the loop"


def count_calls(config: RunConfig, rank: int, told: str) -> int:
    """Calls of the step on `rank`; 0 on the others."""
    observer = KillAtCall(rank, None, told)
    pretrain(config, observer=observer)
    return observer.calls


def killed_at_call(config: RunConfig, rank: int, at: int, told: str) -> list[float]:
    """`pretrain`, in which `rank` is killed before the call. Returns the losses if it never came so far."""
    return pretrain(config, observer=KillAtCall(rank, at, told)).losses


@dataclass(frozen=True)
class Plant:
    """A fault of one rank at the beginning of a forward pass."""

    fault: Callable[[], None]
    rank: int
    told: str
    """A folder: the file `died` gets the time of the fault."""
    forward: int = 3
    """Number of the forward pass, from 0."""


def planted_run(config: RunConfig, plant: Plant) -> list[float]:
    """`pretrain` with the fault planted in its forward step. Returns the losses."""
    calls, rank = iter(range(10_000)), dist.get_rank() if dist.is_initialized() else 0
    Path(plant.told, f"rank-{rank}").write_text(str(os.getpid()))

    def forward_step(batches: Any, model: nn.Module) -> Any:
        if rank == plant.rank and next(calls) == plant.forward:
            Path(plant.told, "died").write_text(f"{time.monotonic()} {plant.fault.__name__}")
            plant.fault()
        return gpt_forward_step(batches, model)

    return pretrain(config, forward_step=forward_step).losses


def is_stopped() -> None:
    """Stop this process."""
    os.kill(os.getpid(), signal.SIGSTOP)


def holds_the_gil() -> None:
    """Sleep in C with the lock of the interpreter held; a signal ends only one such sleep."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        ctypes.PyDLL(None).sleep(120)


def loader_sleeps() -> None:
    """Wait for data that never come."""
    time.sleep(120)


def kills_the_one_that_waits(plant_told: str, victim: int) -> Callable[[], None]:
    """Kill another rank while it waits for this one in a collective."""

    def late() -> None:
        time.sleep(0.3)
        Path(plant_told, "died").write_text(f"{time.monotonic()} communication")
        os.kill(int(Path(plant_told, f"rank-{victim}").read_text().split()[0]), signal.SIGKILL)
        time.sleep(60)

    return late
