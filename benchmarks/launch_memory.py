"""What a hundred launches from one notebook cell leave behind in the kernel.

    python benchmarks/launch_memory.py [--runs 100]

A real Jupyter kernel executes the same cell again and again; every tenth run raises in a rank and the error is shown,
so that IPython keeps its traceback. Counted from outside, after ten runs of warming up: resident memory of the kernel,
open descriptors, threads, child processes, entries of /dev/shm and folders of launches. The peer is a second kernel
whose cells call and raise the same without launching anything: what IPython itself keeps. Alternating, so that both
see the same machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness import report
from jupyter_client.manager import KernelManager

WARMUP = 10
SETUP = """
import torch
from labkit.launch import run

def work(x):
    import torch, torch.distributed as dist
    value = torch.full((1000,), float(x))
    if dist.is_initialized():
        dist.all_reduce(value)
    return value

def fail(x):
    raise ValueError(f"run {x}")
"""
CELLS = {
    "launches": ("results = run(work, 2, {0})", "results = run(fail, 2, {0})"),
    "plain calls": ("results = [work({0}), work({0})]", "results = fail({0})"),
}


@dataclass(frozen=True)
class Footprint:
    """What a process holds."""

    memory_kib: int
    descriptors: int
    threads: int
    children: int
    shared: int
    folders: int


def footprint(pid: int) -> Footprint:
    """Look at a process from outside."""
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    tasks = Path(f"/proc/{pid}/task")
    return Footprint(
        memory_kib=int(status["VmRSS"].split()[0]),
        descriptors=len(os.listdir(f"/proc/{pid}/fd")),
        threads=int(status["Threads"]),
        children=sum(len((task / "children").read_text().split()) for task in tasks.iterdir()),
        shared=len(os.listdir("/dev/shm")),
        folders=len(list(Path(tempfile.gettempdir()).glob(f"labkit-launch-{pid}-*"))),
    )


class Kernel:
    """A Jupyter kernel and its client."""

    def __init__(self, manager: KernelManager) -> None:
        self.client = manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.pid: int = manager.provisioner.pid  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]

    def execute(self, code: str) -> str:
        """Run a cell to its end: `ok` or the name of the error."""
        reply = self.client.execute_interactive(code, timeout=120, output_hook=lambda _: None)
        return reply["content"].get("ename", "ok")


@contextlib.contextmanager
def kernel() -> Iterator[Kernel]:
    """A kernel that is gone afterwards."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield Kernel(manager)
    finally:
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()


def measure(runs: int) -> list[dict[str, object]]:
    """One row for each kind of cell."""
    with kernel() as ours, kernel() as peer:
        kernels = dict(zip(CELLS, (ours, peer)))
        for each in kernels.values():
            assert each.execute(SETUP) == "ok"
        before = {}
        for number in range(WARMUP + runs):
            for name, each in kernels.items():
                if number == WARMUP:
                    before[name] = footprint(each.pid)
                good, bad = CELLS[name]
                raises = number % 10 == 9
                shown = each.execute((bad if raises else good).format(number))
                assert (shown == "ok") is not raises, shown
        after = {name: footprint(each.pid) for name, each in kernels.items()}
    return [row(name, before[name], after[name], runs) for name in CELLS]


def row(name: str, before: Footprint, after: Footprint, runs: int) -> dict[str, object]:
    """The differences, memory per run."""
    return {
        "case": f"{name}, {runs} runs of which {runs // 10} raise",
        "kernel memory (KiB a run)": round((after.memory_kib - before.memory_kib) / runs, 2),
        "new descriptors": after.descriptors - before.descriptors,
        "new threads": after.threads - before.threads,
        "new children": after.children - before.children,
        "new shared memory": after.shared - before.shared,
        "new folders": after.folders - before.folders,
    }


def main() -> None:
    """Measure and write results/launch_memory.json."""
    parser = argparse.ArgumentParser(description="Memory of repeated launches")
    parser.add_argument("--runs", type=int, default=100)
    rows = measure(parser.parse_args().runs)
    notes = ["Aim: at most 100 KiB per run, and nothing else new.", "Counts, not times, so a busy machine is fine."]
    report("launch_memory", rows=rows, title="Kernel memory that launches leave behind", notes=notes)


if __name__ == "__main__":
    main()
