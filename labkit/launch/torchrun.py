"""`labkit.launch.run` on ranks of torchrun (`python -m torch.distributed.run --nproc-per-node N script.py`)."""

from __future__ import annotations

import atexit
import ipaddress
import os
import pickle
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import cloudpickle

from labkit.launch import info, machine


def run_here(
    fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], *, backend: str, device: str, debug: bool,
    group_timeout: float, progress: Callable[[dict[str, Any]], None] | None,
) -> list[Any]:  # fmt: skip
    """Call `fn(*args)` on this rank and gather the results of all ranks. If `fn` raises, torchrun ends the others."""
    started = int(os.environ["WORLD_SIZE"])
    if world_size != started:
        raise ValueError(
            f"run() was asked for {world_size} ranks, but torchrun started {started}: "
            f"start it with --nproc-per-node {world_size} (times --nnodes), or ask for {started}"
        )
    _join(backend, device, debug, group_timeout)
    rank = info.rank_info().rank
    info.send_progress_to(progress if rank == 0 else None)
    try:
        result = fn(*args)
    finally:
        info.send_progress_to(None)
    return _gather(result, world_size)


def join(
    *, backend: str = "auto", device: str = "auto", debug: bool = False, distributed_timeout_minutes: float = 10.0
) -> info.RankInfo:
    """Join the other ranks that torchrun started. The script continues on every rank.

        join()
        print(torch.distributed.get_rank())

    At the end of the script the ranks leave together, as gloo needs. If torch.distributed runs already, `join` only
    returns the place of this rank. Arguments are as in `run`. Raises ValueError in a process that torchrun did not
    start.
    """
    import torch.distributed as dist

    if not dist.is_initialized() and not info.under_torchrun():
        raise ValueError(
            "join() is for the ranks of torchrun (python -m torch.distributed.run --nproc-per-node N script.py); "
            "anywhere else call labkit.launch.run(fn, N)"
        )
    _join(backend, device, debug, 60.0 * distributed_timeout_minutes)
    return info.rank_info()


def _join(backend: str, device: str, debug: bool, group_timeout: float) -> None:
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return
    if _is_loopback(os.environ["MASTER_ADDR"]):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", info.loopback_interface())
        os.environ.setdefault("NCCL_SOCKET_IFNAME", info.loopback_interface())
    if debug:
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()  # pyright: ignore[reportPrivateImportUsage]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if os.environ["LOCAL_RANK"] == "0" and (warning := machine.crowding(here)):
        print(warning, file=sys.stderr, flush=True)
    info.join_group(
        init_method="env://", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ["LOCAL_RANK"]), backend=backend, device=device, timeout=group_timeout,
        local_world_size=here,
    )  # fmt: skip
    atexit.register(_leave)


def _leave() -> None:
    """At the end of the script, wait for all ranks, then close the sockets."""
    import torch.distributed as dist

    info.let_go_of_communicators()
    if not dist.is_initialized() or getattr(sys, "last_value", None) is not None:
        return  # after an uncaught exception nobody waits for this rank
    try:
        if dist.get_backend() == "gloo":
            dist.monitored_barrier(timeout=timedelta(seconds=10))
    except RuntimeError:
        return
    dist.destroy_process_group()


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _gather(result: Any, world_size: int) -> list[Any]:
    """Return the results of all ranks, on every rank. Pickles lie in host memory, so gloo carries them."""
    import torch.distributed as dist

    group: Any = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, cloudpickle.dumps(result), group=group)
    if group is not None:
        dist.destroy_process_group(group)
    return [pickle.loads(piece) for piece in gathered]
