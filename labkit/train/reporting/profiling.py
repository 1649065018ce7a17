"""A profile of some steps of a rank, with labkit's names of phases, pipeline actions, gradient GEMMs and transfers.

    train.profile    what runs around the steps                        result
    pytorch          torch.profiler                                    profile-rank0.json in train.output_dir
    nsys             cudaProfilerStart .. Stop, NVTX ranges, autograd  the report of the `nsys profile` around the run

The fields are named as in Megatron-LM: `train.profile_step_start` steps come before the profile,
`train.profile_step_end` is its last step, and only `train.profile_ranks` are profiled. The names are those of Events
(`labkit.events`). A range covers the time in which the host launches the work; the profiler ties kernels to it. A
module has no range, because hooks would prevent the capture of CUDA graphs. docs/running.md has the command for `nsys`,
which has never run on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from labkit.config import TrainConfig
from labkit.events import ranging


class Profile:
    """The profile of one rank's run: `with Profile(..) as profile:`, and around each step `with profile.step(number):`.

    A run that ends early, also by an exception, still writes what it has profiled.
    """

    def __init__(self, train: TrainConfig, rank: int, device: torch.device) -> None:
        """train: what is profiled, and where. rank: rank in the whole run. device: device of this rank's tensors."""
        chosen = not train.profile_ranks or rank in train.profile_ranks
        last = min(train.profile_step_end, train.steps)
        self._steps = range(train.profile_step_start + 1, last + 1) if chosen else range(0)
        self._train, self._rank, self._device, self._running = train, rank, device, ExitStack()
        self._started = False

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile the block if `number` is that of a chosen step, counted from 1."""
        if number in self._steps and not self._started:
            self._started = True
            self._running.enter_context(_nsys() if self._train.profile == "nsys" else self._pytorch())
        yield
        if number == self._steps.stop - 1:
            self._running.close()

    @contextmanager
    def _pytorch(self) -> Iterator[None]:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
        profiler = profile(activities=activities, record_shapes=True)
        with _quiet():
            profiler.start()
        try:
            with ranging(record_function):
                yield
        finally:
            with _quiet():
                profiler.stop()
            folder = Path(self._train.output_dir or ".")
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"profile-rank{self._rank}.json"))


@contextmanager
def _nsys() -> Iterator[None]:
    """Tell Nsight Systems where to record (`--capture-range=cudaProfilerApi`)."""
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    try:
        named = partial(torch.cuda.nvtx.range, "{}")  # it formats its first argument: names may have braces
        with torch.autograd.profiler.emit_nvtx(record_shapes=True), ranging(named):
            yield
    finally:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence standard error, because some builds of the profiler write a line to it at start and stop."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
