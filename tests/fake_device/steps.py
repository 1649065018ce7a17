"""Training steps of labkit on the fake device: a few optimizer steps of each case, by `train_step` itself.

The last step is looked at for waits and copies: what is made once, such as a table of angles, was made before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import torch
from torch import Tensor

from fake_device.audit import Audit
from fake_device.cases import SAMPLES, Case, config_of
from fake_device.fake_groups import fake_groups
from fake_device.stand_ins import without_numbers
from labkit.config import RunConfig
from labkit.plan.stages import configured_schedule
from labkit.train.forward_step import forward_step_of
from labkit.train.pipeline import Pipeline
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


def train(case: Case, audit: Audit) -> None:
    """Build the model of the case and train it. The audit then holds the races of all steps, and the waits, copies and
    GEMMs of the last one."""
    config, world = config_of(case)
    config.validate(world)
    schedule = configured_schedule(config, world)
    with ExitStack() as stack:
        stack.enter_context(without_numbers(audit))
        groups = stack.enter_context(fake_groups(audit, config.parallel, world, case.rank))
        chunks, optimizer, _ = setup_model_and_optimizer(Run(config, groups, schedule, Timers(0)))
        pipeline = Pipeline(config, groups, chunks, forward_step_of(config.model.family), schedule)
        given = batches(config)
        for step in range(case.steps):
            audit.begin()
            train_step(pipeline, optimizer, Timers(0), given, step=step, lr=1e-3, clip_grad=0.5)
