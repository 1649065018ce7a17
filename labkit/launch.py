"""Run a function on N ranks (first, smallest form; the full launcher takes its place)."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import cloudpickle


def _rank_main(rank: int, world_size: int, store: str, payload: bytes, timeout: float, out: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
    )
    try:
        fn, args = cloudpickle.loads(payload)
        out.send_bytes(cloudpickle.dumps((True, fn(*args))))
        dist.barrier()
    except BaseException:
        out.send_bytes(cloudpickle.dumps((False, traceback.format_exc())))
    os._exit(0)


def run(fn: Callable[..., Any], world_size: int = 4, *args: Any, backend: str = "auto", timeout: float = 60.0) -> list:
    """Run `fn(*args)` on every rank; results by rank."""
    import multiprocessing

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    payload = cloudpickle.dumps((fn, args))
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(rank, world_size, f"{folder}/store", payload, timeout, there), daemon=True
            )
            process.start()
            pipes.append(here)
            processes.append(process)
        results = []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(timeout):
                for process in processes:
                    process.kill()
                raise RuntimeError(f"rank {rank} gave no result in {timeout} s")
            ok, value = cloudpickle.loads(pipe.recv_bytes())
            if not ok:
                for process in processes:
                    process.kill()
                raise RuntimeError(f"rank {rank} failed:\n{value}")
            results.append(value)
        for process in processes:
            process.join()
        return results
