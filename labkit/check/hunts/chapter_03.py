"""Hunt of chapter 03: f, g and the biases of tensor-parallel layers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest.mock import patch

from torch import Tensor

from labkit.check.hunts.hunting import FIRST_TENSOR, Fault, Hunt
from labkit.comm import collectives
from labkit.comm.fault_injection import dropped
from labkit.comm.pending import Pending
from labkit.parallel import layers

# ---- the faults ----


def _g_both_ways() -> AbstractContextManager[Any]:
    """g is an all-reduce whose backward is an all-reduce, too: every rank's dy, which all have whole, is added up."""
    honest = layers._RowLinear.backward

    def backward(ctx: Any, *grads: Tensor) -> Any:
        with ctx.plan.booked("backward"):
            total = collectives.all_reduce(grads[0], ctx.plan.group, in_place=False)
        return honest(ctx, total, *grads[1:])

    return patch.object(layers._RowLinear, "backward", staticmethod(backward))


def _mean_in_f() -> AbstractContextManager[Any]:
    """f takes the mean over the ranks, as data-parallel gradients do."""
    honest = layers._ColumnLinear.backward

    def backward(ctx: Any, *grads: Any) -> Any:
        grad_x, *others = honest(ctx, *grads)
        return None if grad_x is None else grad_x / ctx.plan.group.size, *others

    return patch.object(layers._ColumnLinear, "backward", staticmethod(backward))


def _early_bias() -> AbstractContextManager[Any]:
    """Every rank adds the row-parallel layer's bias to its term, before g adds up the terms."""

    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: Any, trains: bool) -> Tensor:
        ctx.plan, ctx.parameters = plan, (weight, bias)
        with plan.booked():
            packed = plan.gemms.pack(x, "input", None, trains=trains)
            ctx.save_for_backward(weight, *plan.gemms.for_wgrad(packed))
            return collectives.all_reduce(plan.gemms.fprop(packed, weight, bias), plan.group)

    return patch.object(layers._RowLinear, "forward", staticmethod(forward))


def _awaited_f() -> AbstractContextManager[Any]:
    """f's all-reduce is awaited where it is started, so nothing is computed meanwhile."""
    honest = collectives.all_reduce_async

    def all_reduce_async(*args: Any, **options: Any) -> Pending:
        pending = honest(*args, **options)
        pending.wait(event=False)
        return pending

    return patch.object(collectives, "all_reduce_async", all_reduce_async)


# ---- what a verdict says ----

_NUMBERS_AGREE = "Loss, gradients and parameters of two steps agree with one process: say 'none'."
_TAKE_THE_NAME = "The microscope goes in the order of a step. Take row.first_difference as it is printed."
_ALL_SENT = "The messages are as many as they should be, with the bytes that they should have."

HUNT = Hunt(
    chapter="03",
    scene=(
        "Train two steps with it under the microscope (compare(..., pretrain=suspect.around(pretrain))), draw the "
        "gradients of one_step, count its messages, look at the timeline of an MLP: what one of these shows, the loss "
        "of the first step does not."
    ),
    questions={
        "family": "What kind of fault is it?",
        "place": "Which operator or parameter is at fault, or which part of the layer?",
        "first": FIRST_TENSOR,
    },
    choices={
        "family": (
            "missing communication",
            "extra communication",
            "wrong data",
            "wrong scale",
            "wrong order",
            "random numbers",
            "slow work",
        ),
    },
    faults=(
        Fault(
            "g both ways",
            _g_both_ways,
            {
                "family": "extra communication|wrong scale",
                "place": r"\bg\b|row|proj|fc2|end of",
                "first": r"layers\.1\.mlp\.fc2\.bias gradient",
            },
            {
                "family": {
                    "missing": "Count the messages of one_step: there are more than four per layer.",
                    "": "The gradient of the last fc2 is exactly t times too large. What multiplies by t?",
                },
                "place": {
                    r"\bf\b|column|norm|qkv|fc1": "The gradients of fc2 are wrong before backward arrives at f.",
                    "": "Which is the first wrong gradient, and through which operator did backward reach it?",
                },
                "first": {"": _TAKE_THE_NAME},
            },
            "g was an all-reduce whose backward is an all-reduce as well. That is right where the ranks go on with "
            "different things (chapter 01). Here all of them hold the same dy, so its sum is t times too large, and "
            "once more in each sublayer. The loss doesn't show it, and the ledger does: two messages more per "
            "layer in backward.",
        ),
        Fault(
            "f lost",
            partial(dropped, operation="all_reduce", phase="backward", layer="layers.0.attention"),
            {
                "family": "missing communication",
                "place": r"\bf\b|attention|qkv",
                "first": r"layers\.0\.attention\.norm\.\w+ gradient",
            },
            {
                "family": {
                    "wrong scale": "A wrong scale has the same ratio in all numbers of a tensor. And count the "
                    "messages of one_step.",
                    "": "Count the messages of one_step in backward.",
                },
                "place": {
                    r"\bg\b|forward": "All outputs are right, and the loss of the first step is.",
                    "mlp": "The gradients of all MLPs are right.",
                    "": "Which gradients are right, and which are on the other side of an operator?",
                },
                "first": {"": _TAKE_THE_NAME},
            },
            "f before the attention of layer 0 sent nothing in backward. Everything after it is right, and only what "
            "comes before it is wrong: the first norm, and the input, which in a model means the embedding. As it is "
            "the last message of backward, no fault of this kind spoils fewer gradients.",
        ),
        Fault(
            "early bias",
            _early_bias,
            {"family": "wrong scale|wrong order", "place": "bias", "first": "loss of step 2"},
            {
                "family": {
                    "missing|extra": _ALL_SENT,
                    "": "The first step is right in every digit, and the second isn't. Which numbers were 0 in the "
                    "first?",
                },
                "place": {
                    r"\bf\b": "All gradients of the first step are right, so f did its work.",
                    "": "Which parameters are 0 until the first update, and have the right gradient all the same?",
                },
                "first": {"none": "Train two steps.", "": _TAKE_THE_NAME},
            },
            "The bias of proj and fc2 was added by every rank before g, so y had it t times. Biases start at 0, and t "
            "times 0 is 0. Their gradient is right, too. So a test of one step passes, whatever it compares, and from "
            "the second step on the loss is wrong.",
        ),
        Fault(
            "awaited f",
            _awaited_f,
            {
                "family": "slow work|wrong order",
                "place": r"\bf\b|wait|overlap|asynchron|weight.?grad|\bdA\b|column|fc1",
                "first": "none",
            },
            {
                "family": {"": "Every number is right, and so is every byte. What is left is the time."},
                "place": {
                    r"\bg\b|row|fc2": "After g a healthy rank waits as well. Look at backward.",
                    "": "Compare the timelines: what is computed during a message of the healthy run?",
                },
                "first": {"": _NUMBERS_AGREE},
            },
            "f's all-reduce was awaited where it was started, and dA was computed afterwards. No number changes, and "
            "no byte. Each layer only waits longer in backward, twice, and that shows in the timeline alone.",
        ),
        Fault(
            "mean in f",
            _mean_in_f,
            {
                "family": "wrong scale",
                "place": r"\bf\b|column|fc1|qkv|mean|before",
                "first": r"(final_norm|layers\.1\.mlp\.norm)\.\w+ gradient",
            },
            {
                "family": {
                    "missing|extra": _ALL_SENT,
                    "slow": "A slow run computes the right numbers. This one doesn't.",
                    "": "Divide the gradient of the last layer's mlp.norm by the right one.",
                },
                "place": {
                    r"\bg\b|row|fc2|proj": "Outputs are right, and the last layer's fc2 and fc1 have right gradients.",
                    "": "Which gradients are right, and which operator does backward meet after them?",
                },
                "first": {"": _TAKE_THE_NAME},
            },
            "f took the mean over the ranks, as one does with data-parallel gradients. But here the ranks have no "
            "samples of their own: each has a term of one sum. All messages were sent, with the right bytes, and what "
            "left each f was t times too small. At the last layer's mlp.norm that is the exact ratio; further up the "
            "residual, which was right, is added to it.",
        ),
    ),
)
