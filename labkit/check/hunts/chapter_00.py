"""Hunt of chapter 00: a first taste, with a lost message or a slow stage."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest.mock import patch

from labkit.check.hunts.hunting import FIRST_TENSOR, Fault, Hunt
from labkit.comm.fault_injection import dropped
from labkit.schedules.execution import RankStep

# ---- the faults ----


def _slow_forward() -> AbstractContextManager[Any]:
    """A forward of the last stage takes four times as long."""
    honest = RankStep._forward

    def forward(self: RankStep, step: Any, received: Any) -> Any:
        start = time.perf_counter()
        made = honest(self, step, received)
        if step.action.stage == self.setup.num_stages - 1:
            time.sleep(3 * (time.perf_counter() - start))
        return made

    return patch.object(RankStep, "_forward", forward)


# ---- what a verdict says ----

_MICROSCOPE = {"none": "The microscope names one. Read row.first_difference.", "": "Take the name as it is printed."}

HUNT = Hunt(
    chapter="00",
    scene="Train with it under the microscope, and run a step of it for the timeline: one of the two shows the fault.",
    questions={
        "family": "What kind of fault is it?",
        "when": "When does it happen?",
        "first": FIRST_TENSOR,
    },
    choices={
        "family": ("missing communication", "slow work"),
        "when": ("forward", "backward", "end of the step"),
    },
    faults=(
        Fault(
            "backward sum",
            partial(dropped, operation="all_reduce", layer="layers.2.mlp", phase="backward"),
            {"family": "missing communication", "when": "backward", "first": r"layers\.2\.mlp\.norm\.bias gradient"},
            {
                "family": {"": "A slow run computes the right gradients. This one doesn't."},
                "when": {
                    "forward": "All outputs are right, and the loss of the first step is. Forward did its work.",
                    "": "The gradients of layer 2's own matrices are right, and that of the norm before them is not.",
                },
                "first": _MICROSCOPE,
            },
            "In backward the MLP of layer 2 did not add up the two halves of its input's gradient. Outputs and the "
            "first loss are right, and so are the gradients of everything above. The first thing that the wrong "
            "gradient meets is the norm in front of the MLP.",
        ),
        Fault(
            "forward sum",
            partial(dropped, operation="all_reduce", layer="layers.2.mlp", phase="forward"),
            {"family": "missing communication", "when": "forward", "first": r"layers\.2\b.*output"},
            {
                "family": {"": "A slow run computes the right outputs. This one doesn't."},
                "when": {"": "An output differs, before any gradient exists."},
                "first": _MICROSCOPE,
            },
            "In forward the MLP of layer 2 did not add up its two halves, so each rank went on with its own half. The "
            "layer's output is the first to differ, and everything after it only passes that on.",
        ),
        Fault(
            "slow forward",
            _slow_forward,
            {"family": "slow work", "when": "forward", "first": "none"},
            {
                "family": {"": "Loss, gradients and weights agree with one process, so every message arrived."},
                "when": {"": "Compare the boxes of each color with the healthy prediction."},
                "first": {"": "Loss, gradients and weights all agree: say 'none'."},
            },
            "Each forward of the last stage took four times as long: a straggler. The numbers are right in every "
            "digit, so no test of the numbers can find it. The timeline does: the last stage has long forwards, and "
            "the others wait for it.",
        ),
        Fault(
            "embeddings' sum",
            partial(dropped, operation="all_reduce", group="embd"),
            {
                "family": "missing communication",
                "when": "end of the step",
                "first": r"embedding\.word\.weight gradient",
            },
            {
                "family": {"": "A slow run computes the right gradients. This one doesn't."},
                "when": {
                    "forward": "All outputs are right, and the loss of the first step is.",
                    "": "Backward got all the way down: the gradients of every layer are right. What comes after it?",
                },
                "first": _MICROSCOPE,
            },
            "The first and the last stage each have a copy of the word embedding, and at the end of a step both must "
            "get the sum of their gradients. Here they kept their own. All layers are right, and the two copies drift "
            "apart from the first step on.",
        ),
    ),
)
