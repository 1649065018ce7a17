"""Hunt of chapter 13: a training step in mixed precision on two ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch

from labkit.check.hunts.hunting import Fault, Hunt
from labkit.parallel.data_parallel.optimizer import Optimizer
from labkit.parallel.parameters import parameter_record
from labkit.train import stepping
from labkit.train.loss_scaler import LossScaler

# ---- the faults ----


def _alone() -> AbstractContextManager[Any]:
    """A rank whose own gradients are finite updates with them, clipped to norm 1, though another rank's are not."""
    honest = stepping._norm_and_finite

    def own(optimizer: Any, *rest: Any) -> Any:
        found = honest(optimizer, *rest)
        held = [*optimizer.gradient_pieces(), *optimizer.uncounted_pieces()]
        if not found.finite and all(bool(gradient.isfinite().all()) for gradient in held):
            norm = torch.stack([gradient.norm() for gradient in held]).norm()
            optimizer.step(optimizer.adamw.param_groups[0]["lr"], 1.0 / float(norm))
        return found

    return patch.object(stepping, "_norm_and_finite", own)


def _scaled_twice() -> AbstractContextManager[Any]:
    """The loss is multiplied by 16 times its scale."""

    def scale_loss(self: LossScaler, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.scale * 16.0

    return patch.object(LossScaler, "scale_loss", scale_loss)


def _sum_in_16_bits() -> AbstractContextManager[Any]:
    """The sum over microbatches is rounded to bf16 after each of them."""
    honest = parameter_record.put_gradient

    def put_gradient(gradient: torch.Tensor, main_grad: torch.Tensor, *, replace: bool) -> None:
        honest(gradient, main_grad, replace=replace)
        main_grad.copy_(main_grad.bfloat16())

    return patch.object(parameter_record, "put_gradient", put_gradient)


def _after_step(change: Any) -> AbstractContextManager[Any]:
    """Let `change(optimizer)` follow each update."""
    honest = Optimizer.step

    def step(self: Optimizer, lr: float, factor: float = 1.0) -> None:
        honest(self, lr, factor)
        with torch.no_grad():
            change(self)

    return patch.object(Optimizer, "step", step)


def _moment_in_16_bits() -> AbstractContextManager[Any]:
    """Adam's second moment is rounded to bf16 after each update."""

    def change(optimizer: Optimizer) -> None:
        for state in optimizer.adamw.state.values():
            state["exp_avg_sq"].copy_(state["exp_avg_sq"].bfloat16())

    return _after_step(change)


def _chopped() -> AbstractContextManager[Any]:
    """A weight is its main weight with the low bits cut off, so rounded towards 0."""

    def change(optimizer: Optimizer) -> None:
        for group, masters in zip(optimizer.groups, optimizer.masters):
            for weight, main in zip(group.params, masters):
                near = weight.float()
                beyond = near.abs() > main.abs()
                toward = torch.nextafter(weight, torch.zeros_like(weight))
                weight.copy_(torch.where(beyond, toward, weight))

    return _after_step(change)


# ---- what a verdict says ----

_COLUMNS = {
    "": "Lay the two tables side by side. One column differs in kind, not in the last digit; in a step before the "
    "first update, if you can.",
}

HUNT = Hunt(
    chapter="13",
    scene="Run suspect.around(examined) on the ranks, and hold its table against the healthy one.",
    questions={
        "tensor": "Which tensor or number of the round is treated wrongly?",
        "column": "Which column of the table shows it first?",
        "what": "What is done to it, in a few words?",
    },
    choices={
        "tensor": ("loss", "summed gradient", "skipped steps", "moments", "main weight", "weight"),
        "column": ("scale", "loss", "norm", "copies", "sum", "second moment", "bias"),
    },
    faults=(
        Fault(
            "sum in 16 bits",
            _sum_in_16_bits,
            {"tensor": "summed gradient", "column": "sum", "what": r"16|bf16|bfloat|round|precision|half"},
            {
                "tensor": {
                    "moments": "A moment that is made of rounded gradients still has its own 32 bits, and it does.",
                    "": "What is it that has 16 bits too many zeros?",
                },
                "column": _COLUMNS,
                "what": {"": "Which numbers can the sum hold, and which should it be able to hold?"},
            },
            "The sum of gradients over microbatches was rounded to bf16 each time one was added. With two microbatches "
            "that is an error of a few thousandths. With 64 of them, later ones are rounded away against the sum, as "
            "0.001 was against 1 in section 2.",
        ),
        Fault(
            "alone",
            _alone,
            {"tensor": "skipped steps", "column": "copies", "what": r"own|alone|each|flag|agree|share|local|exchang"},
            {
                "tensor": {
                    "weight": "Copies of weights are apart, that's what you see. What did one rank do with its weights "
                    "in that step, and the other one not?",
                    "": "Compare what the two ranks did in the steps that overflow.",
                },
                "column": _COLUMNS,
                "what": {"": "Who knows that a gradient overflowed on one rank, and who has to?"},
            },
            "Each rank decided by its own gradients whether to skip. In a step in which only one of them overflowed, "
            "the other one updated: copies that must be equal were apart from then on, and the parts of each layer "
            "belonged to different steps. The flag has to be everybody's; in labkit it travels with the norm.",
        ),
        Fault(
            "scaled twice",
            _scaled_twice,
            {"tensor": "loss", "column": "norm", "what": r"scal|factor|16|twice|multipl"},
            {
                "tensor": {
                    "summed gradient": "It's too large by one factor in every element. Where does the factor come in?",
                    "": "Divide the norm of a step that updates in both runs by the healthy one.",
                },
                "column": _COLUMNS,
                "what": {"": "Which factor lies between the two norms of the first step that both update in?"},
            },
            "The loss was multiplied by 16 times the scale and the gradients were divided by the scale alone. Adam "
            "divides a gradient by its own size and clipping takes the rest, so the losses look healthy. The norm was "
            "16 times too large, and the scaler had to go 4 halvings lower.",
        ),
        Fault(
            "moment in 16 bits",
            _moment_in_16_bits,
            {"tensor": "moments", "column": "second moment", "what": r"16|bf16|bfloat|round|precision|half"},
            {
                "tensor": {"": "Everything that goes into it has 32 bits."},
                "column": _COLUMNS,
                "what": {"": "How many of its numbers could be written in 16 bits, and how many should?"},
            },
            "Adam's second moment was kept in bf16. With this beta2 that is an error of thousandths. With 0.999 a "
            "step can lower it by a thousandth at most, and that is less than half of the distance between two bf16 "
            "numbers: such a moment can rise and never fall.",
        ),
        Fault(
            "chopped",
            _chopped,
            {"tensor": "weight", "column": "bias", "what": r"toward|zero|0|cut|trunc|chop|down|round"},
            {
                "tensor": {"": "Main weights are right. What is made of them?"},
                "column": _COLUMNS,
                "what": {"": "By how much is a weight off its main weight, and on which side of it?"},
            },
            "Weights were cut off instead of rounded. Every one of them is then closer to 0 than its main weight, by "
            "about 3 ten-thousandths of its size on average in fp16: a small error, but all in one direction. Rounding "
            "to the nearest errs on both sides.",
        ),
    ),
)
