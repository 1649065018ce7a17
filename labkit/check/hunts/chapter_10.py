"""Hunt of chapter 10: a pipeline of one stage per rank under 1F1B."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from labkit.check.hunts.hunting import FIRST_TENSOR, MESSAGES_AND_NUMBERS, NUMBERS_AGREE, Fault, Hunt
from labkit.schedules.builders import gpipe
from labkit.schedules.execution import RankStep
from labkit.schedules.lowering import Communication, Compute, Instruction, Program
from labkit.schedules.runtime import PipelineRuntime

# ---- the faults ----


def _sum_for_mean() -> AbstractContextManager[Any]:
    """Losses go backward without the factor 1/m."""
    honest = PipelineRuntime.run

    def run(self: PipelineRuntime, *data: Any, **how: Any) -> Any:
        count, given = self.schedule.num_microbatches, self.setup
        self.setup = replace(given, grad_scaler=lambda loss: loss * count)
        try:
            return honest(self, *data, **how)
        finally:
            self.setup = given

    return patch.object(PipelineRuntime, "run", run)


def _labels_out_of_step() -> AbstractContextManager[Any]:
    """The last rank reads its microbatches one ahead of the first rank."""
    honest = PipelineRuntime.run

    def run(self: PipelineRuntime, data: Any, *args: Any, **how: Any) -> Any:
        if self.groups.pp.rank < self.groups.pp.size - 1:
            return honest(self, data, *args, **how)
        (source,) = data if isinstance(data, list | tuple) else [data]
        read = [next(source) for _ in range(self.schedule.num_microbatches)]
        return honest(self, [iter(read[1:] + read[:1])], *args, **how)

    return patch.object(PipelineRuntime, "run", run)


def _rounded_on_the_wire() -> AbstractContextManager[Any]:
    """Activations are rounded to bfloat16 before they are sent."""
    honest = RankStep._keep

    def keep(self: RankStep, message: Any, made: Any) -> None:
        honest(self, message, made)
        if message.kind == "F" and not message.is_local:
            self.messages[message] = tuple([x.to(torch.bfloat16).to(x.dtype) for x in self.messages[message]])

    return patch.object(RankStep, "_keep", keep)


def _all_forwards_first() -> AbstractContextManager[Any]:
    """Every rank warms up with all its forwards: GPipe under the name of 1F1B."""
    honest = PipelineRuntime._program

    def program(self: PipelineRuntime, forward_only: bool) -> Program:
        given = self.schedule
        if not forward_only and given.num_stages == given.pp:
            self.schedule = gpipe(given.pp, given.num_microbatches)
        try:
            return honest(self, forward_only)
        finally:
            self.schedule = given

    return patch.object(PipelineRuntime, "_program", program)


def _late_gradients() -> AbstractContextManager[Any]:
    """A gradient is sent only after the next action has been computed."""
    honest = PipelineRuntime._program

    def program(self: PipelineRuntime, forward_only: bool) -> Program:
        given = honest(self, forward_only)
        instructions: list[Instruction] = []
        held: list[Instruction] = []
        left = len(given.steps)
        for each in given.instructions:
            is_gradient = (
                isinstance(each, Communication) and each.verb == "send" and each.transfers[0].message.kind == "B"
            )
            if is_gradient and left:
                held.append(each)
                continue
            instructions.append(each)
            if isinstance(each, Compute):
                left -= 1
                instructions += held
                held.clear()
        return Program(instructions, given.incoming)

    return patch.object(PipelineRuntime, "_program", program)


# ---- what a verdict says ----

HUNT = Hunt(
    chapter="10",
    scene=(
        "The microscope (microscope(suspect.around(train.pretrain))) speaks of the numbers, and the timeline "
        "(timeline(suspect.around(asleep))) of order, memory and time: one of them shows it. A busy machine makes all "
        "ranks a little late; run the timeline again before you believe in lost time."
    ),
    questions={
        "family": "What kind of fault is it?",
        "place": "Which data, message, factor or order is at fault?",
        "first": FIRST_TENSOR,
    },
    families=(*MESSAGES_AND_NUMBERS, "kept memory", "slow work"),
    faults=(
        Fault(
            "sum for mean",
            _sum_for_mean,
            {
                "family": "wrong scale",
                "place": r"1/m|factor|mean|scal|divi|num_microbatches|number of microbatches",
                "first": r"final_norm\.(bias|weight) gradient",
            },
            {
                "family": {
                    "(missing|extra) communication": "A lost or doubled message would spoil some stages, not all.",
                    "wrong data": "The loss is right, so every label met its own activation.",
                    "": "Compare the size of several gradients with the right ones. Is there one ratio?",
                },
                "place": {
                    "message|send|recv|activation": "The last stage is wrong as well, and no message of another stage "
                    "is in its first gradient.",
                    "": "Every gradient is too large by the same number. Which number of this run is it?",
                },
                "first": {"": "The microscope begins backward at the top: take its first name."},
            },
            "Each microbatch's loss went backward without the factor 1/m, so every gradient was the sum over "
            "microbatches and m times too large. The logged loss is taken before the factor, and it's right. Adam "
            "divides a gradient by its own size, so even the training looks healthy; clipping and SGD would not "
            "forgive it.",
        ),
        Fault(
            "labels out of step",
            _labels_out_of_step,
            {"family": "wrong data", "place": "label|target|iterator|data|microbatch", "first": "^loss|loss"},
            {
                "family": {
                    "wrong order": "Every rank ran its row in the right order. What did the last one read?",
                    "wrong scale": "The loss itself is wrong, before any factor.",
                    "": "All outputs of all stages are right, and the loss isn't. What else goes into the loss?",
                },
                "place": {
                    "activation|message|send|recv": "Outputs agree on every stage, so every activation arrived.",
                    "": "The loss reads two things: the last stage's output, and something that no rank sends.",
                },
                "first": {"": "The microscope reads outputs, then the loss, then gradients: take its first name."},
            },
            "The last rank read its data one microbatch ahead of the first rank, so each prediction was compared "
            "with the labels of another sample. No message carries labels: first and last rank each have an "
            "iterator, and nothing but discipline keeps the two in step. At the beginning of a training the loss is "
            "nearly the same for all labels, so it looks plausible.",
        ),
        Fault(
            "rounded on the wire",
            _rounded_on_the_wire,
            {
                "family": "wrong data",
                "place": "activation|message|wire|dtype|bf16|bfloat|precision|round|pipeline_dtype",
                "first": r"layers\.\d+.* output",
            },
            {
                "family": {
                    "wrong scale": "The error has no common ratio: it differs from element to element.",
                    "(missing|extra) communication": "As many messages as on a healthy run, and none is lost.",
                    "": "The loss is off in a late digit. Where is the first output that differs, at which border?",
                },
                "place": {
                    "gradient": "Outputs differ, before any gradient exists.",
                    "label|iterator": "The first stage's outputs agree and the second's don't, before any label is "
                    "read.",
                    "": "The last layer before the border is right, the first one after it is wrong by a few "
                    "thousandths.",
                },
                "first": {"": "The microscope reads in the order of the forward: take its first name."},
            },
            "Activations were rounded to bfloat16 before they were sent. The first stage is right, and from the "
            "second on everything is off by a few thousandths. In Megatron pipeline_dtype decides in which type "
            "tensors travel, and a wrong one says nothing.",
        ),
        Fault(
            "all forwards first",
            _all_forwards_first,
            {
                "family": "kept memory|wrong order",
                "place": "warm|forward|order|gpipe|row|schedule|table|in flight",
                "first": "none",
            },
            {
                "family": {
                    "slow": "The step takes as long as it should.",
                    "wrong": "Every number is right. Compare the order of each rank's bars with its row.",
                    "": "No message is missing or too much. What do the rows under the timeline count?",
                },
                "place": {"": "Read rank 0's bars from left to right, next to its row in the table."},
                "first": {"": NUMBERS_AGREE},
            },
            "Every rank ran all its forwards before its first backward: GPipe, whatever the table said. Loss, "
            "gradients and time are those of 1F1B. Only the microbatches in flight give it away, m on every rank, "
            "and on 512 GPUs that is the difference between a job that fits and one that doesn't.",
        ),
        Fault(
            "late gradients",
            _late_gradients,
            {
                "family": "slow work|wrong order",
                "place": "gradient|send|backward|message",
                "first": "none",
            },
            {
                "family": {
                    "kept": "The peak is the one of the table.",
                    "wrong": "Every number is right. How long does the step take, and what does a rank wait for?",
                    "": "As many messages as on a healthy run. When does each of them arrive?",
                },
                "place": {
                    "activation|forward": "Forwards follow each other as in the prediction. Look at the Bs.",
                    "": "Every bar has the right length. Which bar starts late, and what is it waiting for?",
                },
                "first": {"": NUMBERS_AGREE},
            },
            "A gradient was sent only after the next forward had been computed, so the stage before waited for each "
            "of them by a forward too long. Order, numbers and memory are right. A send costs nothing if it starts "
            "at once, and a whole forward for each stage if somebody puts it at the end of the loop.",
        ),
    ),
)
