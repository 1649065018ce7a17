"""Hunt of chapter 26: linear layers in eight bits over tensor-parallel ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from labkit.check.hunts.hunting import Fault, Hunt
from labkit.comm.fault_injection import dropped
from labkit.fp8.gemms import CastOperands, Float8Gemms
from labkit.fp8.recipe import Float8Recipe
from labkit.fp8.scaling import Float8Scaling

# ---- the faults ----


def _first_scales() -> AbstractContextManager[Any]:
    """The scales that follow the first step stay for good."""
    honest = Float8Scaling.end_step

    def end_step(self: Float8Scaling) -> None:
        known, calibrates = self.scales.clone(), self.calibrates
        honest(self)
        if not calibrates:
            self.scales.copy_(known)

    return patch.object(Float8Scaling, "end_step", end_step)


def _three_bits() -> AbstractContextManager[Any]:
    """Inputs and weights are cast to e5m2, as gradients are."""
    return patch.object(Float8Recipe, "dtype", lambda self, kind: torch.float8_e5m2)


def _first_weights() -> AbstractContextManager[Any]:
    """A weight is cast at its first use and never again."""
    honest = CastOperands._cast_weight

    def cast_weight(self: CastOperands, weight: Tensor) -> tuple[Tensor, ...]:
        kept: tuple[Tensor, ...] = self.__dict__.setdefault("_first_cast", None) or honest(self, weight)
        self.__dict__["_first_cast"] = kept
        return kept

    return patch.object(CastOperands, "_cast_weight", cast_weight)


def _cast_again() -> AbstractContextManager[Any]:
    """The weight gradient's operands are cast a second time, from the bytes, with a scale that is 0.7 of the first."""
    honest = Float8Gemms.wgrad

    def again(packed: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
        values = packed[0].view(dtype)
        return (0.7 * values.float()).to(dtype).view(torch.uint8), packed[1] / 0.7

    def wgrad(self: Float8Gemms, grad: Any, x: Any, weight: Tensor, main_grad: Any, **named: Any) -> Any:
        kinds = (self._recipe.dtype(kind) for kind in ("grad", "input"))
        grad, x = (again(packed, dtype) for packed, dtype in zip((grad, x), kinds))
        return honest(self, grad, x, weight, main_grad, **named)

    return patch.object(Float8Gemms, "wgrad", wgrad)


# ---- what a verdict says ----

_COLUMNS = {
    "loss": "The losses are so close that one step's samples move them more. Which other column is of another kind?",
    "": "Lay the two tables side by side, and look for a column that is off from the first step in which it can be, or "
    "that moves away step by step.",
}

HUNT = Hunt(
    chapter="26",
    scene="Run suspect.around(examined) on the ranks, and hold its table against the healthy one.",
    questions={
        "operand": "Which operands are treated wrongly?",
        "column": "Which column of the table says so?",
        "what": "What is wrong with them, in a few words?",
    },
    choices={
        "operand": ("inputs", "weights", "gradients", "inputs and weights", "inputs and gradients", "all"),
        "column": ("loss", "ranks", "peak x", "peak w", "peak g", "y", "dx", "dw"),
    },
    faults=(
        Fault(
            "first scales",
            _first_scales,
            {"operand": "all", "column": "peak", "what": r"stale|old|first|histor|never|fix|not updat|stay|stuck|same"},
            {
                "operand": {"": "Look at all three peaks. Is only one of them off?"},
                "column": _COLUMNS,
                "what": {"": "A peak is the largest magnitude times the scale. One of the two has changed."},
            },
            "The scales that followed from the first step were kept for good. Gradients shrink as the model learns, so "
            "their peak went down to a tenth, while inputs and weights grew and went beyond 1, step by step. The error "
            "hardly depends on the place in the range, so for a few steps nothing else shows. Then the largest values "
            "are held, dw gets worse, and no loss says so.",
        ),
        Fault(
            "three bits forward",
            _three_bits,
            {"operand": "inputs and weights", "column": "y", "what": r"e5m2|format|bit|mantissa|precision|coarse"},
            {
                "operand": {
                    "gradients|inputs and gradients|all": "Gradients are cast as in the healthy run: their peaks are "
                    "alike. dx has two operands, and so has dw.",
                    "": "Both operands of y count. What would one alone do to the error?",
                },
                "column": _COLUMNS,
                "what": {"": "The error of y is twice what it should be, from the first step on, and stays there."},
            },
            "Inputs and weights were cast to e5m2. It has one bit less, so their rounding errors are twice as large: y "
            "is off by twice as much, dx and dw by a little more than in a healthy run. The scales fit, nothing is "
            "held and nothing lost.",
        ),
        Fault(
            "own history",
            partial(dropped, operation="all_reduce", layer="fp8", phase="amax"),
            {"operand": "all", "column": "ranks", "what": r"rank|own|alone|agree|reduc|share|local|sum|max"},
            {
                "operand": {"": "The column has the largest disagreement over all scales of both layers."},
                "column": _COLUMNS,
                "what": {"": "Why would two ranks have two scales for one tensor?"},
            },
            "The maximum over the ranks was left out, so each scales by what it has seen itself. Every product is as "
            "exact as before. But the ranks no longer compute what one process computes, nor what another layout "
            "does; and whoever gathers bytes of two ranks reads half of them with a wrong scale.",
        ),
        Fault(
            "first weights",
            _first_weights,
            {
                "operand": "weights",
                "column": "y|dx",
                "what": r"stale|old|first|never|again|cache|once|updat|refresh|new",
            },
            {
                "operand": {
                    "": "y and dx get worse with every step, and dw does not. Which operand is in both of them and not "
                    "in dw?"
                },
                "column": _COLUMNS
                | {"dw": "dw is made of inputs and gradients, and it is as good as before. Look at its neighbours."},
                "what": {"": "The error is right in the first step and grows with each update."},
            },
            "Weights were cast once and never again: the optimizer moved the weight, and the products went on with the "
            "bytes of the first step. y and dx get worse from step to step, dw has no weight in it and stays right. "
            "With a small learning rate the loss would take long to say so.",
        ),
        Fault(
            "cast again",
            _cast_again,
            {"operand": "inputs and gradients", "column": "dw", "what": r"twice|again|second|two|double|re-?cast|cast"},
            {
                "operand": {
                    "weights|inputs and weights|all": "There is no weight among the operands of dw.",
                    "": "dw has two operands.",
                },
                "column": _COLUMNS,
                "what": {"": "Scales and formats are right. What makes an operand of the right format worse?"},
            },
            "The operands of the weight gradient were cast a second time, from the bytes and with another scale, as "
            "somebody does who needs a transposed copy and no longer has the original. Two roundings add up: dw is off "
            "by more than in the healthy run, and nothing else is.",
        ),
    ),
)
