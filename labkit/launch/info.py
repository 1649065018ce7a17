"""Which rank, device, backend and launcher this process has, and how device and backend are chosen."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from labkit.launch import processes
from labkit.launch.shared_cores import do_not_interrupt

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

    from labkit.config import ConfigError, ParallelConfig

BACKENDS = ("auto", "gloo", "nccl")
DEVICES = ("auto", "cpu", "cuda")
DeviceKind = Literal["cpu", "cuda"]
LAUNCHERS_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that torchrun gives each rank."""
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Device files of GPU drivers: NVIDIA's on Linux, NVIDIA's in WSL, AMD's."""


@dataclass(frozen=True)
class RankInfo:
    """The place of one rank: its numbers, device and backend."""

    rank: int
    """Global rank, 0 to world_size - 1."""
    world_size: int
    """Number of ranks."""
    local_rank: int
    """Rank among the ranks of this machine."""
    device: torch.device
    """Device of this rank's tensors: `cuda:i` or `cpu`."""
    backend: str
    """`gloo` or `nccl`; `none` in a process without torch.distributed."""


_current: RankInfo | None = None


def rank_info() -> RankInfo:
    """Return the place of this process. A plain process is the only rank of a world of size 1."""
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
    """Set the value that `rank_info` returns in this process."""
    global _current
    _current = info


def inside_rank() -> bool:
    """Return True if this process is a rank that labkit started or took over."""
    return _current is not None


def under_torchrun() -> bool:
    """Return True in a rank of torchrun, or of another launcher that sets the same environment variables."""
    return all(name in os.environ for name in LAUNCHERS_VARIABLES)


def launchers_numbers() -> tuple[int, int, int]:
    """Return RANK, WORLD_SIZE and LOCAL_RANK. Raises ConfigError for values that no launcher sets."""
    *numbers, address, port = (os.environ[name] for name in LAUNCHERS_VARIABLES)
    with contextlib.suppress(ValueError):
        rank, world_size, local_rank = map(int, numbers)
        if 0 <= local_rank <= rank < world_size and address and 0 < int(port) < 1 << 16:
            return rank, world_size, local_rank
    raise launch_refused("RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR or MASTER_PORT has a value that no launcher sets")


def launch_refused(problem: str) -> ConfigError:
    """Return the error of a launch that does not fit the variables of `under_torchrun`."""
    from labkit.config import ConfigError

    return ConfigError([problem + leftover_advice()], source="the launch")


def leftover_advice() -> str:
    """Return the variables by which `under_torchrun` decides, with their values, and what to do where they are old."""
    given = " ".join(f"{name}={os.environ.get(name)}" for name in LAUNCHERS_VARIABLES)
    return f" (the environment has {given}; if they are left over there: unset {' '.join(LAUNCHERS_VARIABLES)})"


_receiver: Callable[[dict[str, Any]], None] | None = None


def report_progress(values: Mapping[str, Any]) -> None:
    """Send `values` (small and picklable, such as {"step": 3, "loss": 2.1}) to the `progress` callback of the launch.

    Only rank 0 sends. On other ranks, and without a callback, the call does nothing.
    """
    if _receiver is not None:
        _receiver(dict(values))


def announce(sentence: str) -> None:
    """Tell the user a sentence during the run: the launch's `progress` callback gets it as `{"message": sentence}`.

    Without a callback the sentence goes to standard error.
    """
    if _receiver is not None:
        _receiver({"message": sentence})
    else:
        print(sentence, file=sys.stderr, flush=True)


def send_progress_to(receiver: Callable[[dict[str, Any]], None] | None) -> None:
    """Send the reports of this process to `receiver`. The launcher calls this."""
    global _receiver
    _receiver = receiver


def device_kind(device: str) -> DeviceKind:
    """Return the kind of device: for `auto` cuda if torch sees a GPU. Imports torch only if there is a GPU driver."""
    if device != "auto":
        return "cuda" if device == "cuda" else "cpu"
    if "torch" not in sys.modules and not any(Path(driver).exists() for driver in _DRIVERS):
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def choose_device(device: str, rank: int, local_rank: int) -> torch.device:
    """Return the device of a rank: GPU `rank % device_count`, as in Megatron, or the CPU without a GPU.

    Raises ValueError if the launcher's LOCAL_RANK means another GPU, because two ranks would then share one GPU while
    another GPU stays idle.
    """
    import torch

    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise ValueError("device = cuda: torch sees no GPU; set it to cpu or auto")
    index = rank % count
    if index != local_rank % count:
        raise ValueError(
            f"rank {rank} would use GPU {index} (rank % {count} GPUs), but LOCAL_RANK={local_rank} means GPU "
            f"{local_rank % count}: start the same number of ranks on every machine, a multiple or a divisor of {count}"
        )
    return torch.device("cuda", index)


def choose_backend(backend: str, device: torch.device, local_world_size: int) -> str:
    """Return the backend: for `auto` nccl if each rank of this machine has its own GPU, as NCCL demands, else gloo."""
    import torch
    import torch.distributed as dist

    own_gpu = device.type == "cuda" and local_world_size <= torch.cuda.device_count()
    if backend == "auto":
        return "nccl" if own_gpu and dist.is_nccl_available() else "gloo"
    if backend == "nccl" and not own_gpu:
        ranks = f"each of the {local_world_size} ranks" if local_world_size > 1 else "its rank"
        there = "the device is the CPU" if device.type == "cpu" else f"torch sees {torch.cuda.device_count()}"
        raise ValueError(
            f"backend = nccl: needs a GPU for {ranks} on this machine, and {there}; set it to gloo (several ranks may "
            "share one GPU), or start fewer ranks"
        )
    return backend


CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Variable of CUDA: queues through which a process hands kernels to its GPU. CUDA reads it when it starts."""


def needs_one_connection(parallel: ParallelConfig) -> bool:
    """Return True for a layout whose layers launch a transfer and then the GEMM that hides it.

    Up to Hopper, only a single queue (CUDA_DEVICE_MAX_CONNECTIONS=1) makes the GPU start them in this order. Otherwise
    the GEMM may occupy all SMs first, so that the transfer runs only after it. Megatron-LM asks for the same setting.
    This has never run on a GPU.
    """
    return parallel.tp > 1 or parallel.cp > 1


def variables_of(arguments: Iterable[Any]) -> dict[str, str]:
    """Return the variables that a rank needs before CUDA starts, by the layout among the arguments of its function.

    A layout is a RunConfig or a ParallelConfig. Nothing here asks whether there is a GPU, because that might start
    CUDA; on a CPU the variables have no effect.
    """
    from labkit.config import ParallelConfig, RunConfig

    given = [each.parallel if isinstance(each, RunConfig) else each for each in arguments]
    layouts = [each for each in given if isinstance(each, ParallelConfig)]
    return {CONNECTIONS: "1"} if any(map(needs_one_connection, layouts)) else {}


def take_variables(variables: Mapping[str, str]) -> None:
    """Give this process, a rank of torchrun, those `variables` that it lacks, unless CUDA is already running."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        os.environ.update({**variables, **os.environ})


def announce_connections(parallel: ParallelConfig) -> None:
    """Tell the user once if the ranks use NCCL, their layout needs CONNECTIONS, and CUDA started without it."""
    rank = rank_info()
    if rank.rank == 0 and rank.backend == "nccl" and CONNECTIONS not in os.environ and needs_one_connection(parallel):
        announce(
            f"{CONNECTIONS} was not set when CUDA started, so transfers of tp and cp may not overlap with GEMMs; set "
            "it to 1 in the environment of the launch"
        )


_BEHIND = 10.0
"""Seconds by which torch's own limit ends after the launcher's."""
_launcher_limit = math.inf


def set_launcher_limit(seconds: float) -> None:
    """Set how long this rank may wait for others before the launcher reports a hang."""
    global _launcher_limit
    _launcher_limit = seconds


def torch_timeout(seconds: float, backend: str) -> timedelta:
    """Return the time limit that torch gets for collectives of a group whose limit is `seconds`.

    The launcher explains a hang better than torch does, so the two limits must not end at the same time. But the
    launcher cannot see that a rank waits inside its GPU for NCCL, and without /proc it sees only labkit's own
    collectives. In both cases torch's limit ends after the launcher's.
    """
    if seconds >= _launcher_limit and (
        backend == "nccl" or not processes.SEES_USAGE or seconds < _launcher_limit + _BEHIND
    ):
        seconds = _launcher_limit + _BEHIND
    return timedelta(seconds=seconds)


def loopback_interface() -> str:
    """Return the interface that no other machine can reach; gloo by itself would take the one of the host name."""
    return "lo0" if sys.platform == "darwin" else "lo"


def loopback_problem() -> str:
    """Return why the ranks of this machine cannot connect, or an empty string. Sends nothing."""
    name, advice = loopback_interface(), "gloo connects the ranks of a machine by it"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("127.0.0.1", 9))
    except OSError as error:
        return f"network interface {name} is not up ({error.strerror or error}), and {advice}: ip link set {name} up"
    return ""


def join_group(
    *, meeting: Store, rank: int, world_size: int, local_rank: int, local_world_size: int, backend: str,
    device: str, timeout: float,
) -> RankInfo:  # fmt: skip
    """Initialise torch.distributed on this rank and store its place.

    meeting: the store in which the ranks find each other. timeout: limit of a collective, in seconds.
    """
    import torch
    import torch.distributed as dist

    where = choose_device(device, rank, local_rank)
    backend = choose_backend(backend, where, local_world_size)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if backend == "gloo":
        do_not_interrupt()  # the threads that gloo starts inherit it
    meeting.set_timeout(torch_timeout(timeout, backend))
    dist.init_process_group(
        backend,
        store=meeting,
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
    """Call `undo` once before this process leaves the process group, even if it is given several times.

    CUDA graphs with NCCL collectives need this, because they keep communicators in use, which could then not end.
    """
    if undo not in _before_leaving:
        _before_leaving.append(undo)


def let_go_of_communicators() -> None:
    """Call all functions given to `before_leaving`, also if an exception ends the process."""
    while _before_leaving:
        _before_leaving.pop()()


_between_calls: list[Callable[[], None]] = []
_failed_calls = 0


def between_calls(tidy: Callable[[], None]) -> None:
    """Call `tidy` before and after each call of the launcher, when no function runs in this rank."""
    if tidy not in _between_calls:
        _between_calls.append(tidy)


def tidy_between_calls(failed_calls: int) -> None:
    """Call all functions given to `between_calls`. failed_calls: earlier calls of this launch that failed on a rank."""
    global _failed_calls
    _failed_calls = failed_calls
    for tidy in _between_calls:
        tidy()


def failed_calls() -> int:
    """Return how many calls of this launch failed on some rank, equal on all ranks; 0 without a launcher."""
    return _failed_calls


def leave_group() -> None:
    """Leave the process group once all ranks have arrived: gloo aborts at random if a peer closes its sockets early."""
    import torch.distributed as dist

    let_go_of_communicators()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
