"""Hunt of chapter 08: replicas whose gradients are reduced in buckets."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from labkit.check.hunts.hunting import FIRST_TENSOR, MESSAGES_AND_NUMBERS, NUMBERS_AGREE, Fault, Hunt
from labkit.comm.pending import Pending
from labkit.data import batches
from labkit.parallel.data_parallel import distributed_data_parallel
from labkit.parallel.data_parallel.grad_buffers import GradBucket, GradBuffer, Reduction
from labkit.parallel.parameters.parameter_record import main_grad_of, put_gradient, record_of

# ---- the faults ----


def _other_order() -> AbstractContextManager[Any]:
    """Odd ranks start the last two buckets of one size in the opposite order."""
    honest = distributed_data_parallel.in_backward_order

    def in_backward_order(module: nn.Module, buffers: Sequence[GradBuffer]) -> list[GradBucket]:
        buckets = honest(module, buffers)
        if buffers[0].group.rank % 2:
            sizes = [bucket.plan.numel for bucket in buckets]
            first = max(place for place, size in enumerate(sizes) if size in sizes[place + 1 :])
            second = sizes.index(sizes[first], first + 1)
            buckets[first], buckets[second] = buckets[second], buckets[first]
        return buckets

    return patch.object(distributed_data_parallel, "in_backward_order", in_backward_order)


def _same_samples() -> AbstractContextManager[Any]:
    """Every replica reads the samples of the first one."""
    honest = batches.microbatch_positions

    def microbatch_positions(config: Any, *, dp: int, dp_rank: int, step: int) -> Any:
        return honest(config, dp=dp, dp_rank=0 * dp_rank, step=step)

    return patch.object(batches, "microbatch_positions", microbatch_positions)


def _overwritten() -> AbstractContextManager[Any]:
    """Each microbatch writes its gradients over those of the one before."""

    def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
        put_gradient(gradient, main_grad_of(parameter), replace=True)
        record_of(parameter).has_gradient = True

    return patch.object(distributed_data_parallel, "add_gradient", add_gradient)


def _twice() -> AbstractContextManager[Any]:
    """Each bucket is reduced, and then reduced once more."""
    honest = Reduction.run

    def run(self: Reduction, data: Tensor) -> Generator[Pending, Tensor, None]:
        yield from honest(self, data)
        self.prepare(data)
        yield from honest(self, data)

    return patch.object(Reduction, "run", run)


def _late() -> AbstractContextManager[Any]:
    """Hooks count the gradients, but start no bucket."""
    return patch.object(distributed_data_parallel.DistributedDataParallel, "_start_complete", lambda self: None)


# ---- what a verdict says ----

_TAKE_THE_NAME = "Run one step under the microscope, and take the name as it is printed."

HUNT = Hunt(
    chapter="08",
    scene=(
        "Train with it under the microscope, and look at a step of sleeping layers: which buckets each rank starts, "
        "and when. One of these shows it, or two of them together."
    ),
    questions={
        "family": "What kind of fault is it?",
        "place": "What is at fault: which part of the run, or which decision?",
        "first": FIRST_TENSOR,
    },
    families=(*MESSAGES_AND_NUMBERS, "reused memory", "slow work"),
    faults=(
        Fault(
            "other order",
            _other_order,
            {
                "family": "wrong order",
                "place": "order|bucket|start|swap|launch",
                "first": r"layers\.0\.mlp\.fc1\.\S+ gradient",
            },
            {
                "family": {
                    "missing": "Every rank starts as many all-reduces as it should. Compare the ranks' lists.",
                    "wrong data": "Each rank's own gradients are right. What were they added to?",
                    "": "The loss of the first step is right, and so are the gradients of layer 1. Compare what the "
                    "two ranks start, place by place.",
                },
                "place": {"": "The two ranks' lists of buckets differ. In what?"},
                "first": {"final_norm|layers.1": "These agree: their buckets met themselves.", "": _TAKE_THE_NAME},
            },
            "Odd ranks started two buckets of the same size in the opposite order. So each of the two all-reduces "
            "added gradients of some weights to those of others: fc1 of layer 0 and its attention. All messages "
            "were there, with the right bytes; only the order of the two lists tells.",
        ),
        Fault(
            "same samples",
            _same_samples,
            {"family": "wrong data", "place": "sampl|data|batch|shard", "first": r"\bloss\b"},
            {
                "family": {
                    "missing|extra": "Both ranks start every bucket once.",
                    "": "The loss of the very first step differs, before any gradient counts. Of what is it the loss?",
                },
                "place": {
                    "bucket|reduc|gradient": "The loss is another before anything is reduced.",
                    "loss": "It is the right loss of what the ranks have read.",
                    "": "What does the very first operation of the model read?",
                },
                "first": {"": _TAKE_THE_NAME},
            },
            "All replicas read the samples of the first one, as with a DistributedSampler that was forgotten. Each "
            "of them trains, the loss falls, the replicas agree to the bit, and d GPUs do the work of one.",
        ),
        Fault(
            "overwritten",
            _overwritten,
            {
                "family": "reused memory",
                "place": "main_grad|accumul|microbatch|overwr|add",
                "first": r"final_norm\.\S+ gradient",
            },
            {
                "family": {
                    "missing": "Both ranks start every bucket once, in one order. What was in the buckets?",
                    "wrong scale": "Gradients aren't off by one factor. Compare a run with a single microbatch per "
                    "rank.",
                    "wrong data": "The loss is right, so the samples are. What happens to the first microbatch's "
                    "gradient?",
                    "wrong order": "The ranks' lists are equal. Try another number of microbatches.",
                    "": "The loss is right, and all gradients are wrong. Does it also happen with one microbatch?",
                },
                "place": {
                    "bucket|reduc|hook": "They are reduced once, in one order. Look at what they contain.",
                    "": "With one microbatch per rank the run is right. So what is it that several microbatches share?",
                },
                "first": {"": _TAKE_THE_NAME},
            },
            "Each microbatch wrote its gradients over those of the one before, so a step used its last microbatch "
            "only. It trains, more noisily. With one microbatch per rank nothing is wrong, which is how such a "
            "fault survives its tests.",
        ),
        Fault(
            "reduced twice",
            _twice,
            {"family": "extra communication", "place": "reduc|twice|bucket|finish|sync", "first": "none"},
            {
                "family": {"wrong|missing": "Every number is right. Count the messages.", "": "Count the messages."},
                "place": {"": "Which messages does a healthy step not have?"},
                "first": {"": NUMBERS_AGREE},
            },
            "Each bucket was reduced twice. The mean of d equal means is that mean, so no number tells, and the "
            "step sent twice the bytes. Megatron-LM issue 775 is such a report.",
        ),
        Fault(
            "late start",
            _late,
            {"family": "slow work", "place": "hook|overlap|start|late|end|hid", "first": "none"},
            {
                "family": {
                    "extra|missing": "The ledger is that of a healthy run, line by line.",
                    "wrong": "Numbers, messages and their order are right. What is left is the time.",
                    "": "Numbers and messages are right. Look at the timeline.",
                },
                "place": {"": "When does the first bucket leave, and when could it?"},
                "first": {"": NUMBERS_AGREE},
            },
            "The hooks counted and started nothing, so all buckets left at the end of the backward. Everything is "
            "right but the time, and only the timeline shows it. One parameter that never gets a gradient, in the "
            "first bucket, does the same.",
        ),
    ),
)
