"""Rank, device, backend and launcher of this process, and the choice of device and backend."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from labkit.launch import guard

if TYPE_CHECKING:
    import torch

BACKENDS = ("auto", "gloo", "nccl")
DEVICES = ("auto", "cpu", "cuda")
DeviceKind = Literal["cpu", "cuda"]
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""One of these is there where a driver of GPUs is: NVIDIA's on Linux and in WSL, AMD's."""


@dataclass(frozen=True)
class RankInfo:
    """One rank's place."""

    rank: int
    """Global rank, 0 to world_size - 1."""
    world_size: int
    """Number of ranks."""
    local_rank: int
    """Rank among those of this machine."""
    device: torch.device
    """Device of its tensors: `cuda:i`, or `cpu`."""
    backend: str
    """`gloo` or `nccl`; `none` in a process without torch.distributed."""


_current: RankInfo | None = None


def rank_info() -> RankInfo:
    """This process's place; a plain process is the only rank of a world of size 1."""
    if _current is not None:
        return _current
    import torch
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        device = choose_device("auto", rank, local_rank)
        return RankInfo(rank, world_size, local_rank, device, dist.get_backend())
    return RankInfo(0, 1, 0, torch.device("cuda:0" if torch.cuda.is_available() else "cpu"), "none")


def set_rank_info(info: RankInfo) -> None:
    """Fix what `rank_info` answers in this process."""
    global _current
    _current = info


def inside_rank() -> bool:
    """True where this process is a rank that labkit started or took over."""
    return _current is not None


def under_torchrun() -> bool:
    """True where this process is a rank of torchrun or of a launcher that speaks the same environment."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))


_receiver: Callable[[dict[str, Any]], None] | None = None


def report_progress(values: Mapping[str, Any]) -> None:
    """Hand `values` (small and picklable, as {"step": 3, "loss": 2.1}) to the `progress` callback of the launch.

    Only rank 0's reports are delivered; elsewhere, and where nobody listens, it does nothing.
    """
    if _receiver is not None:
        _receiver(dict(values))


def send_progress_to(receiver: Callable[[dict[str, Any]], None] | None) -> None:
    """Make `receiver` get the reports of this process (the launcher calls this)."""
    global _receiver
    _receiver = receiver


def device_kind(device: str) -> DeviceKind:
    """Kind of device: `auto` is cuda where torch sees a GPU. Imports torch only where there is a driver."""
    if device != "auto":
        return "cuda" if device == "cuda" else "cpu"
    if "torch" not in sys.modules and not any(Path(driver).exists() for driver in _DRIVERS):
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def choose_device(device: str, rank: int, local_rank: int) -> torch.device:
    """Device of a rank: GPU `rank % device_count`, as Megatron chooses it, or the CPU where there is none.

    Raises ValueError if that is not the GPU which the launcher's LOCAL_RANK stands for: two ranks would then share one
    GPU while another stays idle.
    """
    import torch

    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise ValueError('device="cuda" was asked for, but torch sees no GPU: use device="cpu" or "auto"')
    index = rank % count
    if index != local_rank % count:
        raise ValueError(
            f"rank {rank} would use GPU {index} (rank % {count} GPUs), but LOCAL_RANK={local_rank} stands for GPU "
            f"{local_rank % count}: start the same number of ranks on every machine, a multiple or a divisor of {count}"
        )
    return torch.device("cuda", index)


def choose_backend(backend: str, device: torch.device, local_world_size: int) -> str:
    """`auto` is nccl where every rank of this machine has a GPU of its own, else gloo (NCCL refuses to share one)."""
    import torch
    import torch.distributed as dist

    own_gpu = device.type == "cuda" and local_world_size <= torch.cuda.device_count()
    if backend == "auto":
        return "nccl" if own_gpu and dist.is_nccl_available() else "gloo"
    if backend == "nccl" and not own_gpu:
        raise ValueError(
            f'backend="nccl" needs a GPU for each of the {local_world_size} ranks on this machine, and torch sees '
            f'{torch.cuda.device_count()}: use backend="gloo" (several ranks may share one GPU) or fewer ranks'
        )
    return backend


_BEHIND = 10.0
"""Seconds by which torch's own limit comes after the launcher's."""
_launcher_limit = math.inf


def set_launcher_limit(seconds: float) -> None:
    """Say how long this rank may wait for others before the launcher, which watches it, calls that a hang."""
    global _launcher_limit
    _launcher_limit = seconds


def torch_timeout(seconds: float, backend: str) -> timedelta:
    """Limit that torch is to put on a collective of a group, for one of `seconds`.

    The launcher explains a hang better, so torch's limit never falls together with that of the launcher. The
    launcher cannot see that a rank of NCCL waits, in its GPU, and without /proc sees only labkit's own collectives:
    there torch's limit follows that of the launcher.
    """
    if seconds >= _launcher_limit and (
        backend == "nccl" or not guard.SEES_USAGE or seconds < _launcher_limit + _BEHIND
    ):
        seconds = _launcher_limit + _BEHIND
    return timedelta(seconds=seconds)


def loopback_interface() -> str:
    """Name of the interface that no other machine can reach; gloo would else listen on whatever the host name means."""
    return "lo0" if sys.platform == "darwin" else "lo"


def join_group(
    *, init_method: str, rank: int, world_size: int, local_rank: int, local_world_size: int, backend: str, device: str,
    timeout: float,
) -> RankInfo:  # fmt: skip
    """Initialise torch.distributed on this rank and remember its place. `timeout` is that of the collectives, in s."""
    import torch
    import torch.distributed as dist

    where = choose_device(device, rank, local_rank)
    backend = choose_backend(backend, where, local_world_size)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group(
        backend,
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=torch_timeout(timeout, backend),
        device_id=where if backend == "nccl" else None,
    )
    info = RankInfo(rank, world_size, local_rank, where, backend)
    set_rank_info(info)
    return info


_before_leaving: list[Callable[[], None]] = []


def before_leaving(undo: Callable[[], None]) -> None:
    """Have `undo` called before this process leaves the process group, once however often it is given: for what holds
    on to communicators, such as CUDA graphs with collectives of NCCL, and would keep them from ending."""
    if undo not in _before_leaving:
        _before_leaving.append(undo)


def let_go_of_communicators() -> None:
    """Call what `before_leaving` was given, also at the end of a process that leaves by an exception."""
    while _before_leaving:
        _before_leaving.pop()()


_between_calls: list[Callable[[], None]] = []
_failed_calls = 0


def between_calls(tidy: Callable[[], None]) -> None:
    """Have `tidy` called before and after each call of the launcher, when no function runs in this rank."""
    if tidy not in _between_calls:
        _between_calls.append(tidy)


def tidy_between_calls(failed_calls: int) -> None:
    """Call what `between_calls` was given. failed_calls: how many calls of this launch have failed on some rank."""
    global _failed_calls
    _failed_calls = failed_calls
    for tidy in _between_calls:
        tidy()


def failed_calls() -> int:
    """Calls of this launch that have failed on some rank, the same on all ranks; 0 where no launcher calls."""
    return _failed_calls


def leave_group() -> None:
    """The clean end: no rank closes its sockets while another still talks (gloo aborts at random otherwise)."""
    import torch.distributed as dist

    let_go_of_communicators()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
