"""1F1B of sleeping stages written by hand on bare process groups: what the machine leaves to any runtime.

The loop does what a schedule of one stage a rank cannot do without, and nothing else: it posts its receives, waits for
data, calls the stage, calls autograd, sends. No check, no name, no option. It is

- measured beside the runtimes (`pipeline_sleep.py`), so that a reader can tell machinery from machine;
- the clock of the stages. A pass takes its sleep and what autograd, and on the last stage the loss, take around it: the
  bound of a step is that of these passes. One that follows another at once would take a third of that: a rank that has
  slept finds its code in no cache. So passes are timed in their place in a pipeline, beside what is compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.comm.p2p import second_communicator
from labkit.models import SleepingStage
from labkit.parallel import ParallelGroups
from labkit.parallel.deallocation import custom_backward
from labkit.parallel.weight_grad_store import WeightGradStore

Passes = dict[str, list[float]]
"""Seconds of each forward, backward, input_grad and weight_grad."""


def one_f_one_b_by_hand(
    groups: ParallelGroups,
    stage: SleepingStage,
    microbatches: int,
    shape: tuple[int, ...],
    *,
    passes: Passes,
    split: bool = False,
) -> Callable[[], None]:
    """One step, to be called on every rank of the pipeline.

    passes: takes the seconds of each pass.
    split: computes each backward as input gradient, send, weight gradient.
    """
    rank, last = groups.pp.rank, groups.pp.size - 1
    down, up = groups.pp.process_group, second_communicator(groups).process_group
    clock, data = time.perf_counter, torch.zeros(microbatches, *shape).unbind()

    def receives(process_group: dist.ProcessGroup, source: int) -> list[tuple[Tensor, dist.Work]]:
        buffers = [torch.empty(shape) for _ in range(microbatches)]
        return [(buffer, process_group.recv([buffer], source, 0)) for buffer in buffers]

    def step() -> None:
        arriving = receives(down, rank - 1) if rank > 0 else []
        returning = receives(up, rank + 1) if rank < last else []
        saved: dict[int, tuple[Tensor, Tensor]] = {}
        sent, store = [], WeightGradStore()

        def forward(i: int) -> None:
            x = data[i]
            if arriving:
                x, work = arriving[i]
                work.wait()
                x.requires_grad_()
            start = clock()
            stage.set_input_tensor(x)
            y = stage(x) if returning else stage(x).mean()
            passes["forward"].append(clock() - start)
            if returning:
                sent.append(down.send([y.detach()], rank + 1, 0))
            saved[i] = x, y

        def backward(i: int) -> None:
            x, y = saved.pop(i)
            dy = None
            if returning:
                dy, work = returning[i]
                work.wait()
            start = clock()
            if split:
                with store.collecting(i):
                    custom_backward(y, dy)
            else:
                custom_backward(y, dy)
            passes["input_grad" if split else "backward"].append(clock() - start)
            if arriving:
                assert x.grad is not None
                sent.append(up.send([x.grad], rank - 1, 0))
            if split:
                start = clock()
                store.run(i)
                passes["weight_grad"].append(clock() - start)

        ahead = min(last - rank, microbatches)
        for i in range(ahead):
            forward(i)
        for i in range(microbatches):
            if ahead + i < microbatches:
                forward(ahead + i)
            backward(i)
        for work in sent:
            work.wait()

    return step


def hop_seconds(groups: ParallelGroups, *, pause: float = 0.010, count: int = 60) -> float:
    """Median time of a message from rank 0 of the pipeline to rank 1, both of which have slept; called on every rank.

    It tells what a machine is worth for this benchmark, whatever runs on it: on one and the same it was seen between
    160 and 460 us within half an hour, because other machines share its caches and its cores.
    """
    rank, process_group = groups.pp.rank, groups.pp.process_group
    stamp, times = torch.zeros(1, dtype=torch.float64), []
    dist.barrier()
    for _ in range(count):
        if rank == 0:
            time.sleep(pause)
            stamp[0] = time.perf_counter()
            process_group.send([stamp], 1, 0).wait()
        elif rank == 1:
            process_group.recv([stamp], 0, 0).wait()
            times.append(time.perf_counter() - stamp.item())
    seconds = torch.tensor(statistics.median(times) if times else 0.0, dtype=torch.float64)
    dist.broadcast(seconds, groups.pp.ranks[1])
    return seconds.item()
