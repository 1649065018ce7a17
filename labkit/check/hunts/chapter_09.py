"""Hunt of chapter 09: an optimizer that is sharded over the replicas."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from labkit.check.hunts.hunting import FIRST_TENSOR, MESSAGES_AND_NUMBERS, Fault, Hunt
from labkit.comm.fault_injection import dropped
from labkit.parallel.data_parallel import distributed_optimizer
from labkit.parallel.data_parallel.param_gather import ParamGather

# ---- the faults ----


def _own_norm() -> AbstractContextManager[Any]:
    """Each rank clips by the norm of its own part of the gradient."""
    return dropped(operation="all_gather", layer="norm")


def _gather_left_out() -> AbstractContextManager[Any]:
    """The first bucket of the buffer is never gathered."""
    return dropped(operation="all_gather", phase="parameters", layer="buckets.0")


def _gathered_again() -> AbstractContextManager[Any]:
    """Hooks gather a module's buckets before each forward, and not only before the first one after an update."""

    def hook(self: ParamGather, places: list[int]) -> Any:
        def wait(*_: object) -> None:
            if self.is_ready:
                self._stale.update(places)
            for place in places:
                self._need(place)

        return wait

    return patch.object(ParamGather, "_hook", hook)


def _waits_at_once() -> AbstractContextManager[Any]:
    """The optimizer waits for all gathers, so the hooks find nothing left to do."""
    honest = ParamGather.updated

    def updated(self: ParamGather) -> None:
        honest(self)
        self.finish()

    return patch.object(ParamGather, "updated", updated)


def _masters_reread() -> AbstractContextManager[Any]:
    """After each step the masters are made anew from the rounded weights."""

    def write_back(self: distributed_optimizer._Shard) -> None:
        for weight, master in zip(self.weights, self.masters):
            if master is not weight:
                weight.copy_(master)
                master.copy_(weight)

    return patch.object(distributed_optimizer._Shard, "write_back", write_back)


# ---- what a verdict says ----

_NUMBERS_AGREE = "In 64 bits loss, gradients and parameters agree with one process to 1e-10, so say 'none'."
_RUN_SHARDED = "Every number of the microscope is right. Compare all lines of show(...) with the healthy ones."

HUNT = Hunt(
    chapter="09",
    scene=(
        "Train with it (compare(..., pretrain=suspect.around(pretrain))), and run suspect.around(sharded) on the "
        "ranks: one of the two shows it."
    ),
    questions={
        "family": "What kind of fault is it?",
        "place": "Which operation, message or copy is at fault?",
        "first": FIRST_TENSOR,
    },
    families=(*MESSAGES_AND_NUMBERS, "reused memory", "slow work"),
    faults=(
        Fault(
            "own norm",
            _own_norm,
            {
                "family": "missing communication",
                "place": "norm|clip|square",
                "first": "embedding.word.weight parameter",
            },
            {
                "family": {
                    "wrong scale": "The scale is wrong, but why? Each rank has another one. Whom did it not ask?",
                    "": "Every gradient is right, and the weights after the update are not. What is between the two?",
                },
                "place": {
                    "reduce.?scatter|gradient": "Without the reduce-scatter a gradient would differ. All agree.",
                    "all.?gather|param|weight": "Weights are compared as their owners hold them, so no gather of "
                    "weights can make one differ in step 1.",
                    "adam|moment|optimizer": "Adam only sees what it is given: a gradient, times the factor of the "
                    "clip.",
                    "": "It happens once per step, after the reduction and before the update.",
                },
                "first": {
                    "loss": "Run two steps: a weight differs after the first update.",
                    "": "Take its first name.",
                },
            },
            "The ranks didn't add up their sums of squares, so each of them clipped by the norm of its own part of the "
            "gradient. That is smaller than the whole norm, and another one on each rank. Every gradient was right, "
            "every weight was off by a little after the update, and the loss of the first step could not know.",
        ),
        Fault(
            "gather left out",
            _gather_left_out,
            {"family": "missing communication", "place": "gather|param|bucket|weight", "first": "loss of step 2"},
            {
                "family": {
                    "wrong data|wrong order|reused memory": "Old weights were read, that's true. But not because "
                    "somebody read too early: at no later time would they have been there.",
                    "": "Gradients are right, and weights are right where their owners hold them. Who else holds them?",
                },
                "place": {
                    "reduce.?scatter|gradient|norm|clip": "Gradients and the owners' weights agree, so all that leads "
                    "up to the update is right.",
                    "": "What has to happen between the update of a slice and the next forward?",
                },
                "first": {
                    "parameter": "Weights are compared as their owners hold them, and those agree.",
                    "": "Run two steps: in the first one nothing has been updated yet.",
                },
            },
            "One bucket was never gathered, so each rank kept computing with its own slice new and all others as they "
            "were at the beginning. Owners had the right weights, which is why no parameter differed, and a checkpoint "
            "written from the owners would be fine. The first to notice was the loss of step 2.",
        ),
        Fault(
            "gathered again",
            _gathered_again,
            {"family": "extra communication", "place": "gather|param|weight|hook", "first": "none"},
            {
                "family": {
                    "slow work": "It costs time, that's true. The ledger says what for.",
                    "": _RUN_SHARDED,
                },
                "place": {
                    "reduce.?scatter|gradient": "The reduce-scatters have the bytes that they had.",
                    "": "Which operation has more bytes than in the healthy run?",
                },
                "first": {"": _NUMBERS_AGREE},
            },
            "The hook before a layer's forward gathered its weights each time, for every microbatch, as if they were "
            "sharded as in stage 3. In stage 1 they stay whole until the next update, so all gathers but the first "
            "of a step brought what every rank already had. Only the bytes of the all-gathers show it.",
        ),
        Fault(
            "waits at once",
            _waits_at_once,
            {"family": "slow work|wrong order", "place": "gather|hook|overlap|wait|updated", "first": "none"},
            {
                "family": {
                    "communication": "Neither a byte more nor a byte fewer: the ledger is the same.",
                    "": _RUN_SHARDED,
                },
                "place": {"": "Which messages of the healthy run start inside of a forward, and where are they now?"},
                "first": {"": _NUMBERS_AGREE},
            },
            "The optimizer waited for all gathers before it returned, so the hooks in the forward found nothing left "
            "to wait for. The same messages with the same bytes, and none of them beside a computation: the overlap "
            "that somebody switched on had been switched off again. Only the time line shows it.",
        ),
        Fault(
            "masters made anew",
            _masters_reread,
            {
                "family": "wrong data",
                "place": "master|write.?back|fp32|float32|round|copy|bf16",
                "first": "none",
            },
            {
                "family": {
                    "wrong scale": "No factor is wrong. What is lost is what is smaller than a rounding step.",
                    "": _RUN_SHARDED,
                },
                "place": {
                    "moment|adam": "The moments are kept from step to step. What else does a rank keep in fp32?",
                    "": "What is zero that should not be?",
                },
                "first": {"": _NUMBERS_AGREE + " There are no masters in 64 bits."},
            },
            "After each update the fp32 masters were made anew from the bf16 weights. A bf16 number has 8 significant "
            "bits, so an update of less than a 512th of a weight is rounded away, every time, where the master would "
            "have added it up. In 64 bits a weight is its own master, so the microscope can't see it. Only the "
            "difference between master and weight does: it was zero.",
        ),
    ),
)
