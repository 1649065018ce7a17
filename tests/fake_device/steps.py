"""Training steps of labkit on the fake device: two optimizer steps of each case, by `train_step` itself.

The second step is looked at for waits and copies: what is made once, such as a table of angles, was made in the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fake_device.audit import Audit
from fake_device.cases import SAMPLES, Case, config_of
from fake_device.fake_groups import fake_groups
from labkit.config import RunConfig
from labkit.moe.dispatch import host_copy
from labkit.parallel.parameters import weights
from labkit.train.forward_step import forward_step_of
from labkit.train.pipeline import Pipeline
from labkit.train.preflight import schedule_of
from labkit.train.pretraining import Run, setup_model_and_optimizer
from labkit.train.reporting.metrics import Timers
from labkit.train.stepping import train_step


def batches(config: RunConfig) -> Iterator[dict[str, Tensor]]:
    """Endless microbatches of one rank."""
    model, device = config.model, torch.device("cuda", 0)
    shape = SAMPLES, model.seq_length // config.parallel.cp

    def ids() -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    def ones(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    while True:
        if model.family == "bert":
            yield {
                "tokens_BS": ids(), "types_BS": ids(), "labels_BS": ids(), "loss_mask_BS": ones(),
                "is_random_B": ids()[:, 0].contiguous(), "padding_mask_BS": ones(torch.int64),
            }  # fmt: skip
        elif model.family == "t5":
            yield {
                "text_enc": ids(), "text_dec": ids(), "labels": ids(), "loss_mask": ones(),
                "enc_mask": ones(torch.int64),
            }  # fmt: skip
        else:
            yield {"tokens_BS": ids(), "labels_BS": ids(), "loss_mask_BS": ones()}


@contextmanager
def without_numbers(audit: Audit, rows: int) -> Iterator[None]:
    """Inside the block weights are not drawn, and the counts of a router share `rows` equally."""
    arrived = host_copy.HostCopy.wait

    def zeros(name: str, shape: Sequence[int], *, dtype: torch.dtype = torch.float32, device: Any = None, **_: Any):
        kept = torch.float64 if dtype == torch.float64 else torch.float32
        return torch.zeros(tuple(shape), dtype=kept, device=device or "cpu")

    def equal(copy: host_copy.HostCopy) -> Tensor:
        counts = arrived(copy)
        audit.host_uses(counts, "counts of a router")
        with unset_fake_temporarily():
            return torch.full(counts.shape, rows // counts.shape[-1], dtype=counts.dtype)

    with patch.object(weights, "draw", zeros), patch.object(host_copy.HostCopy, "wait", equal):
        yield


def two_steps(case: Case, audit: Audit) -> dict[str, Any]:
    """Build the model of the case and train it for two steps; the audit then knows the second.

    Returns what the case allows."""
    config, world = config_of(case)
    config.validate(world)
    schedule = schedule_of(config, world)
    tokens = SAMPLES * config.model.seq_length // config.parallel.cp
    rows = tokens // (config.parallel.tp if config.parallel.sequence_parallel else 1) * config.moe.top_k
    with ExitStack() as stack:
        stack.enter_context(without_numbers(audit, rows))
        groups = stack.enter_context(fake_groups(audit, config.parallel, world, case.rank))
        chunks, optimizer, _ = setup_model_and_optimizer(Run(config, groups, schedule, Timers(0)))
        pipeline = Pipeline(config, groups, chunks, forward_step_of(config.model.family), schedule)
        given = batches(config)
        for step in range(2):
            audit.begin()
            train_step(pipeline, optimizer, Timers(0), given, step=step, lr=1e-3, clip_grad=0.5)
    return {"allowed": {"waits": case.waits, "copies": case.copies}}
