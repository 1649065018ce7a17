"""How long a person waits: `import labkit`, two ranks to their first training step, sixteen warm ranks.

    python benchmarks/start.py [--repetitions 15]

Every program is started afresh for each repetition, ours and the peers' in turn. The first step is the same in all:
two gloo ranks, a small MLP, forward, backward, all-reduce of the gradients, one SGD step. Peers are
`torch.multiprocessing.spawn` and torchrun, both as their documentation shows them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from harness import Comparison, interleave, report

from labkit.launch import run

STEP = """
import torch
import torch.distributed as dist

def first_step():
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(32, 64)).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
"""
PROGRAMS = {
    "labkit": (
        "from labkit.launch import run\ndef task():\n    from step import first_step\n    first_step()\nrun(task, 2)\n",
        (),
    ),
    "torch.multiprocessing.spawn": (
        """
import os, socket, torch.distributed as dist, torch.multiprocessing as mp
from step import first_step
def task(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    first_step()
    dist.barrier()  # else gloo may abort the rank that ends last
    dist.destroy_process_group()
if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(task, (port,), nprocs=2)
""",
        (),
    ),
    "torchrun": (
        """
import torch.distributed as dist
from step import first_step
dist.init_process_group("gloo")
first_step()
dist.barrier()
dist.destroy_process_group()
""",
        ("-m", "torch.distributed.run", "--nproc-per-node", "2"),
    ),
}


class ProgramFailed(RuntimeError):
    """One of the programs ended with an error."""


def program(folder: Path, name: str) -> Callable[[], None]:
    """Write one of the programs; what runs it in a fresh interpreter."""
    text, launcher = PROGRAMS[name]
    path = folder / f"with_{name.replace('.', '_')}.py"  # labkit.py would hide the package
    path.write_text(text)

    def start() -> None:
        done = subprocess.run([sys.executable, *launcher, path.name], cwd=folder, capture_output=True, text=True)
        if done.returncode != 0:
            raise ProgramFailed(f"{name} failed:\n{done.stderr}")

    return start


def interpreter(code: str) -> Callable[[], None]:
    """What runs `code` in a fresh interpreter."""
    return lambda: subprocess.run([sys.executable, "-c", code], check=True) and None


def import_time(repetitions: int) -> Comparison:
    """`import labkit` beside `import torch` and an empty interpreter; the modules are looked at, too."""
    code = (
        "import sys, time; t = time.perf_counter(); import labkit; t = time.perf_counter() - t; "
        "print(t, 'torch' in sys.modules)"
    )
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    comparison = interleave(
        "a fresh interpreter that imports it and exits",
        {
            "import labkit": interpreter("import labkit"),
            "nothing": interpreter("pass"),
            "import torch": interpreter("import torch"),
        },
        repetitions=repetitions,
        warmup=1,
    )
    comparison.facts["import statement alone (ms)"] = round(1e3 * float(listed[0]), 2)
    comparison.facts["torch imported"] = listed[1] == "True"
    return comparison


def two_ranks(repetitions: int, attempts: int = 4) -> Comparison:
    """From the start of a fresh interpreter to its end, with one training step on two ranks in between.

    Processes of torchrun abort now and then while they end: then the measurement begins anew and says so.
    """
    for left in reversed(range(attempts)):
        try:
            return _two_ranks(repetitions)
        except ProgramFailed as error:
            if not left or str(error).startswith("labkit"):
                raise
            print(f"begun anew: {str(error).splitlines()[0]} {str(error).splitlines()[1]}", flush=True)
    raise AssertionError("each attempt returns or raises")


def _two_ranks(repetitions: int) -> Comparison:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "step.py").write_text(STEP)
        programs = {name: program(folder, name) for name in PROGRAMS}
        return interleave(
            "two ranks: fresh process to the end of a first step",
            programs,
            repetitions=repetitions,
            warmup=1,
        )


def all_reduce_once() -> float:
    """What each warm rank does."""
    import torch
    import torch.distributed as dist

    value = torch.ones(1)
    dist.all_reduce(value)
    return value.item()


def warm_ranks(world_size: int, repetitions: int) -> Comparison:
    """`run` with the fork server already there: start, all-reduce, return."""

    def start() -> None:
        assert run(all_reduce_once, world_size) == [float(world_size)] * world_size

    case = f"{world_size} warm ranks: start, all-reduce, return"
    return interleave(case, {"labkit": start}, repetitions=repetitions, warmup=2)


def main() -> None:
    """Measure and write results/start.json."""
    parser = argparse.ArgumentParser(description="Start-up times")
    parser.add_argument("--repetitions", type=int, default=15)
    repetitions = parser.parse_args().repetitions
    comparisons = [
        import_time(repetitions),
        *(warm_ranks(size, repetitions) for size in (2, 4, 16)),
        two_ranks(repetitions),
    ]
    notes = [
        "Aims: `import labkit` 50 ms at most, without torch; 16 warm ranks 1 s; two ranks to a first step 3 s.",
    ]
    report("start", comparisons, title="Start-up", notes=notes)


if __name__ == "__main__":
    main()
