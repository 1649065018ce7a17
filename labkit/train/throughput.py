"""How fast steps are and how much memory they took, in the terms of Megatron's log."""

from __future__ import annotations

import resource
import sys
import time

import torch

from labkit.config import RunConfig
from labkit.models.counts import step_flops


class Throughput:
    """Turns the seconds of a step into rates, and knows when a run will end."""

    def __init__(self, config: RunConfig, world_size: int) -> None:
        train = config.train
        self._steps = train.steps
        self._tokens = train.global_batch_size * config.model.seq_length
        flops = step_flops(config.model, samples=train.global_batch_size, moe=config.moe).total
        self._teraflops = flops / 1e12 / world_size
        self._first: tuple[int, float] | None = None

    def rates(self, seconds: float) -> dict[str, float]:
        """Of steps that took `seconds` each.

        `tokens_per_second` is of the whole run. `tflops_per_rank` is what Megatron calls TFLOP/s/GPU: the operations of
        `labkit.models.counts.step_flops`, which counts what the model needs, nothing that is recomputed, and all S^2
        pairs of attention. It is of the configured GPT, also where a model provider builds another model.
        """
        return {
            "step_time": seconds,
            "tokens_per_second": self._tokens / seconds,
            "tflops_per_rank": self._teraflops / seconds,
        }

    def time_left(self, step: int, step_time: float) -> float:
        """Seconds from now, where `step` (counted from 1) has just finished, to the end of the last step.

        By the mean wall time since the end of the first step, validations included: the first step also warms up.
        """
        now = time.perf_counter()
        if self._first is None:
            self._first = step, now
            return (self._steps - step) * step_time
        first, then = self._first
        return (self._steps - step) * (now - then) / (step - first)


def peak_memory_bytes(device: torch.device) -> int:
    """Most bytes so far: of a GPU what torch allocated on it in this process, else the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) counts bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
