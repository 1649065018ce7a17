"""A profile of some steps of a rank, with labkit's names: phases, actions of the pipeline, layers, products, transfers.

    train.profile    what runs around the steps                        result
    pytorch          torch.profiler                                    profile-rank0.json in train.output_dir
    nsys             cudaProfilerStart .. Stop, NVTX ranges, autograd  the report of the `nsys profile` around the run

The fields are Megatron-LM's: `train.profile_step_start` steps come before the profile, `train.profile_step_end` is its
last step, and only `train.profile_ranks` are profiled. A range covers the time in which the host launches the work; the
profiler ties kernels to it. `nsys` has never run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

from labkit.config import TrainConfig
from labkit.events import ranged, ranging


class Profile:
    """The profile of one rank's run: `with Profile(..) as profile:`, and around each step `with profile.step(number):`.

    A run that ends early, also by an exception, still writes what it has profiled.
    """

    def __init__(self, train: TrainConfig, rank: int, chunks: Sequence[nn.Module]) -> None:
        """train: says what is profiled, and where. rank: of the whole run. chunks: this rank's model chunks."""
        chosen = not train.profile_ranks or rank in train.profile_ranks
        self._steps = range(train.profile_step_start + 1, train.profile_step_end + 1) if chosen else range(0)
        self._train, self._rank, self._chunks, self._running = train, rank, chunks, ExitStack()
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
            self._running.enter_context(_ranges_of_modules(self._chunks))
        yield
        if number == self._steps.stop - 1:
            self._running.close()

    @contextmanager
    def _pytorch(self) -> Iterator[None]:
        on_gpu = torch.cuda.is_available()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        profiler = profile(activities=activities, record_shapes=True)
        try:
            with profiler, ranging(record_function):
                yield
        finally:
            folder = Path(self._train.output_dir or ".")
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"profile-rank{self._rank}.json"))


@contextmanager
def _nsys() -> Iterator[None]:
    """Tell Nsight Systems where to record (`--capture-range=cudaProfilerApi`)."""
    cuda: Any = torch.cuda.cudart()
    torch.cuda.synchronize()
    cuda.cudaProfilerStart()
    try:
        with torch.autograd.profiler.emit_nvtx(record_shapes=True), ranging(NvtxRange):
            yield
    finally:
        torch.cuda.synchronize()
        cuda.cudaProfilerStop()


class NvtxRange:
    """An NVTX range. torch's own context reads braces in a name as a format."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        torch.cuda.nvtx.range_push(self._name)

    def __exit__(self, *_: object) -> None:
        torch.cuda.nvtx.range_pop()


@contextmanager
def _ranges_of_modules(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Give the forward of every module a range with its path, such as `layers.0.mlp`.

    The hooks are torch's global ones: a module with a hook of its own could not replay its CUDA graph.
    """
    paths = {id(module): path for chunk in chunks for path, module in chunk.named_modules() if path}
    entered: list[AbstractContextManager[Any]] = []

    def enter(module: nn.Module, _: Any) -> None:
        if (path := paths.get(id(module))) is not None:
            entered.append(ranged(path.removeprefix("module.")))
            entered[-1].__enter__()

    def leave(module: nn.Module, *_: Any) -> None:
        if id(module) in paths:
            entered.pop().__exit__(None, None, None)

    hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
