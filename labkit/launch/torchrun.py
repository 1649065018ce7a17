"""`labkit.launch.run` on ranks of torchrun (`python -m torch.distributed.run --nproc-per-node N script.py`).

torchrun starts all ranks again after one has died (`--max-restarts`). An *attempt* is one such set of ranks. All
attempts talk to the same store, which still holds the addresses of dead ranks. So the ranks of an attempt agree on a
name of its own (`attempt_store`), and their process groups use only keys under this name.
"""

from __future__ import annotations

import atexit
import faulthandler
import ipaddress
import os
import pickle
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import cloudpickle

from labkit.config.errors import counted
from labkit.launch import info, machine, status
from labkit.launch.failure_report import RankError

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

_ADVICE = "; torchrun's output on each machine says why (parallel.distributed_timeout_minutes is the limit)"


def run_here(
    fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], *, backend: str, device: str, debug: bool,
    group_timeout: float, progress: Callable[[dict[str, Any]], None] | None,
) -> list[Any]:  # fmt: skip
    """Call `fn(*args)` on this rank and gather the results of all ranks. If `fn` raises, torchrun ends the others."""
    started = info.launchers_numbers()[1]
    if world_size != started:
        raise info.launch_refused(
            f"run() was asked for {counted(world_size, 'rank')}, but torchrun started {started}: "
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

    At the end of the script the ranks leave together, because gloo needs that. If torch.distributed runs already,
    `join` only returns the place of this rank. The arguments are those of `run`. Raises ValueError in a process that
    torchrun did not start.
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
    from torch.distributed.rendezvous import rendezvous

    if dist.is_initialized():
        return
    rank, world_size, local_rank = info.launchers_numbers()
    _answer_for_stacks()
    status.attach(status.StatusSlot(None, 0))
    if _is_loopback(os.environ["MASTER_ADDR"]):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", info.loopback_interface())
        os.environ.setdefault("NCCL_SOCKET_IFNAME", info.loopback_interface())
    if debug:
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()  # pyright: ignore[reportPrivateImportUsage]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if local_rank == 0 and (warning := machine.crowding(here)):
        print(warning, file=sys.stderr, flush=True)
    try:
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timedelta(seconds=group_timeout)))
    except dist.DistError as error:
        said = f"the ranks of the launcher did not meet: {str(error).splitlines()[0]}{info.leftover_advice()}"
        raise RankError(said, ranks=[rank], kind="start") from error
    info.join_group(
        meeting=attempt_store(store, rank, world_size, group_timeout), rank=rank, world_size=world_size,
        local_rank=local_rank, backend=backend, device=device, timeout=group_timeout,
        local_world_size=here,
    )  # fmt: skip
    atexit.register(_leave)


def attempt_store(store: Store, rank: int, world_size: int, limit: float) -> Store:
    """Return the part of `store` that belongs to this attempt. All ranks call this within `limit` seconds.

    TORCHELASTIC_RESTART_COUNT cannot be the name, because each machine counts its own restarts and two machines may
    differ. So rank 0 draws a name and publishes it, each other rank greets under the published name with a token of its
    own, and rank 0 lists the tokens of all ranks. A rank that does not find its token in the list has read the name of
    an earlier attempt, and looks for a newer one. torchrun ends all ranks of an attempt before it starts the next.

    Raises TimeoutError that names the missing ranks.
    """
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

    base = PrefixStore(f"labkit/{os.environ.get('TORCHELASTIC_RUN_ID', '')}", store)
    name = _open_attempt(base, world_size, limit) if rank == 0 else _join_attempt(base, rank, limit)
    return PrefixStore(name, base)


def _open_attempt(base: Store, world_size: int, limit: float) -> str:
    """Publish a new name, wait for the greetings of all other ranks, and list their tokens."""
    name, others = uuid.uuid4().hex, range(1, world_size)
    base.set("newest", name)
    missing = list(others)
    for _ in _looks(limit):
        missing = [rank for rank in missing if not base.check([f"{name}/{rank}"])]
        if not missing:
            base.set(f"{name}/all", " ".join(base.get(f"{name}/{rank}").decode() for rank in others))
            return name
    words = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    raise TimeoutError(f"{words} of {world_size} did not join rank 0 within {limit:g} s{_ADVICE}")


def _join_attempt(base: Store, rank: int, limit: float) -> str:
    """Greet under each name that appears, until one lists this rank's token."""
    name, token = "", uuid.uuid4().hex
    for _ in _looks(limit):
        newest = base.get("newest").decode() if base.check(["newest"]) else ""
        if newest != name:
            name = newest
            base.set(f"{name}/{rank}", token)
        if name and base.check([f"{name}/all"]) and token in base.get(f"{name}/all").decode().split():
            return name
    raise TimeoutError(f"rank {rank} waited {limit:g} s for rank 0 and all other ranks to join{_ADVICE}")


def _looks(limit: float) -> Iterator[None]:
    """Yield until `limit` seconds have passed, with pauses that grow to a quarter of a second."""
    deadline, pause = time.monotonic() + limit, 0.005
    while time.monotonic() < deadline:
        yield
        time.sleep(pause)
        pause = min(2 * pause, 0.25)


def _answer_for_stacks() -> None:
    """Have SIGUSR1 print the stacks of all threads to stderr, as in the ranks of labkit's own launcher."""
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        faulthandler.register(signal.SIGUSR1, all_threads=True)


def _leave() -> None:
    """Wait for all ranks at the end of the script, then close the sockets."""
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
    """Return the results of all ranks, on every rank. Pickles are in host memory, so gloo carries them."""
    import torch.distributed as dist

    group: Any = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, cloudpickle.dumps(result), group=group)
    if group is not None:
        dist.destroy_process_group(group)
    return [pickle.loads(piece) for piece in gathered]
