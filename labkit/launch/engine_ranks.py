"""Ranks on several machines, from a notebook: each engine of an ipyparallel cluster starts one rank.

    ipcluster start --profile=slurm -n 16        # the profile says how Slurm starts engines
    run_on_engines(engines("slurm"), fn)         # in the notebook

An engine is a process that waits for work on a node. A rank is a process of its own that the engine starts for one call
and ends with it, so that a rank that fails or hangs leaves nothing behind. The ranks find one another as under torchrun
(`torchrun.run_here`), on a port of the first engine's machine. What `Ranks` keeps between calls isn't kept here.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from labkit.config.errors import counted
from labkit.launch import pickling, torchrun
from labkit.launch.failure_report import RankError

GRACE = 5.0
"""Seconds in which the others may end by themselves when a rank has failed."""
_FOLLOWED = ("Connection closed by peer", "Connection reset by peer", "KeyboardInterrupt")
"""Words of a rank that ended because another one had."""
_TOLD = 12
"""Last lines of a failed rank's output that an error quotes."""


def engines(profile: str = "slurm") -> Any | None:
    """Return an `ipyparallel.Client` of the running cluster of this profile; None where there is no cluster of it, or
    no ipyparallel."""
    try:
        import ipyparallel
        from IPython.paths import locate_profile

        address = Path(locate_profile(profile), "security", "ipcontroller-client.json")
        return ipyparallel.Client(str(address), timeout=10) if address.exists() else None
    except (ImportError, OSError, TimeoutError):
        return None


def run_on_engines(
    client: Any, fn: Callable[..., Any], *args: Any, backend: str = "auto", device: str = "auto", timeout: float = 600.0
) -> list[Any]:
    """Call `fn(*args)` on one rank for each engine of an `ipyparallel.Client`, and return the results by rank.

    Ranks on one machine are neighbours. Their output is shown afterwards, with the rank before each line. Engines need
    the same labkit and torch as the notebook, and names of machines that resolve on all of them. `timeout` is torch's
    limit of a collective in seconds; `backend` and `device` are those of `labkit.launch.run`.

    Raises ValueError if there is no engine, TypeError if the function can't be sent, and RankError if a rank fails,
    with its machine and the end of its output. Ranks that go on after that are ended.
    """
    if not client.ids:
        raise ValueError("the cluster has no engines yet; wait until `ipcluster` says that they have started")
    packed = pickling.pack(fn, args)
    hosts: dict[int, str] = dict(zip(client.ids, client[:].apply_sync(socket.gethostname), strict=True))
    first_of = {host: number for number, host in reversed(hosts.items())}
    order = sorted(hosts, key=lambda number: (first_of[hosts[number]], number))
    address = hosts[order[0]] if len(first_of) > 1 else "127.0.0.1"
    shared = {"MASTER_ADDR": address, "MASTER_PORT": str(client[order[0]].apply_sync(_free_port))}
    settings = {"backend": backend, "device": device, "debug": False, "group_timeout": timeout}
    running: list[Any] = []
    for rank, number in enumerate(order):
        here = [other for other in order if hosts[other] == hosts[number]]
        numbers = {
            "RANK": rank,
            "WORLD_SIZE": len(order),
            "LOCAL_RANK": here.index(number),
            "LOCAL_WORLD_SIZE": len(here),
        }
        variables = {name: str(value) for name, value in numbers.items()} | shared
        running.append(client[number].apply_async(_rank, variables, cloudpickle.dumps((packed, settings))))
    try:
        _wait(running)
    finally:
        if left := [number for number, each in zip(order, running, strict=True) if not each.ready()]:
            client.send_signal(signal.SIGINT, targets=left)  # an engine then ends its rank
    return _results([_end(each) for each in running], [hosts[number] for number in order])


def _wait(running: list[Any]) -> None:
    """Wait for all ranks, or for `GRACE` seconds more when one of them has failed."""
    failed: float | None = None
    while not all(each.ready() for each in running) and (failed is None or time.monotonic() < failed + GRACE):
        if failed is None and any(_end(each)[0] for each in running if each.ready()):
            failed = time.monotonic()
        time.sleep(0.05)


def _end(started: Any) -> tuple[int, str, bytes]:
    """Wait for a rank. Return its exit code, its output and the pickled results; code -1 where its engine broke off."""
    try:
        return started.get()
    except Exception as error:
        return -1, f"{type(error).__name__}: {error}", b""


def _results(ended: list[tuple[int, str, bytes]], hosts: list[str]) -> list[Any]:
    failed = [rank for rank, (code, _, _) in enumerate(ended) if code]
    alone = [rank for rank in failed if not any(word in ended[rank][1] for word in _FOLLOWED)] or failed
    for rank, (_, text, _) in enumerate(ended):
        if rank not in failed:
            sys.stdout.writelines(f"[rank {rank}] {line}\n" for line in text.splitlines())
    if not failed:
        return pickle.loads(ended[0][2])
    said = "\n".join(ended[alone[0]][1].splitlines()[-_TOLD:])
    raise RankError(
        f"rank {alone[0]} of {counted(len(ended), 'rank')} on {hosts[alone[0]]} ended with code {ended[alone[0]][0]}:\n"
        f"{said}",
        ranks=alone,
        kind="raised",
    )


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]


# ---- on an engine ----


def _rank(variables: dict[str, str], packed: bytes) -> tuple[int, str, bytes]:
    """Start a rank, wait for it, and return exit code, output and, of rank 0, the pickled results of all."""
    with tempfile.TemporaryDirectory() as folder:
        given, result = Path(folder, "call"), Path(folder, "result")
        given.write_bytes(packed)
        rank = subprocess.Popen(
            [sys.executable, "-m", "labkit.launch.engine_ranks", str(given), str(result)],
            env=os.environ | variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            text, _ = rank.communicate()
        finally:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()
        return rank.returncode, text.decode(errors="replace"), result.read_bytes() if result.exists() else b""


def _main(given: Path, result: Path) -> None:
    """Be the rank: read the call, run it with the others, and write the results of all where this is rank 0."""
    packed, settings = pickle.loads(given.read_bytes())
    fn, args = pickling.unpacked_elsewhere(packed)
    found = torchrun.run_here(fn, int(os.environ["WORLD_SIZE"]), args, progress=None, **settings)
    if os.environ["RANK"] == "0":
        result.write_bytes(cloudpickle.dumps(found))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
