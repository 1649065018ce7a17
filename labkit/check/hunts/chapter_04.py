"""Hunt of chapter 04: a vocabulary and a table that are cut over ranks and copied over stages."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from labkit.check.hunts.hunting import FIRST_TENSOR, Fault, Hunt
from labkit.comm import collectives
from labkit.comm.groups import Group
from labkit.models.embedding import OutputLayer
from labkit.parallel.data_parallel import gradients
from labkit.parallel.parameters.parameter_record import main_grad_of
from labkit.parallel.vocab import cross_entropy

# ---- the faults ----


def _own_maximum() -> AbstractContextManager[Any]:
    """Each rank subtracts the largest of its own logits, and the sums are added as they are."""
    honest, all_reduce = cross_entropy._combine, collectives.all_reduce

    def no_maximum(x: Tensor, group: Group, op: str = "sum", **options: Any) -> Tensor:
        return x.clone() if op == "max" else all_reduce(x, group, op, **options)

    def combine(statistics: Tensor, shard: Any) -> tuple[Tensor, Tensor]:
        with patch.object(collectives, "all_reduce", no_maximum):
            return honest(statistics, shard)

    return patch.object(cross_entropy, "_combine", combine)


def _padding_counts() -> AbstractContextManager[Any]:
    """The columns of padding rows are words of the softmax."""
    honest = cross_entropy._shard

    def shard(width: int, *args: Any, **options: Any) -> Any:
        return replace(honest(width, *args, **options), columns=width)

    return patch.object(cross_entropy, "_shard", shard)


def _mean_of_copies() -> AbstractContextManager[Any]:
    """The two copies of the table get the mean of their gradients."""

    def mean(parameter: nn.Parameter, group: Group) -> None:
        collectives.all_reduce(main_grad_of(parameter), group).div_(group.size)

    return patch.object(gradients, "_sum_copies", mean)


def _logits_gathered() -> AbstractContextManager[Any]:
    """Somebody wants to log the accuracy, and gathers the logits for it."""
    honest = cross_entropy._local_statistics

    def statistics(logits: Tensor, shard: Any, rows: slice, into: Tensor) -> None:
        _guess = collectives.all_gather(logits, shard.group, 1).argmax(1)
        honest(logits, shard, rows, into)

    return patch.object(cross_entropy, "_local_statistics", statistics)


def _other_copy() -> AbstractContextManager[Any]:
    """The last stage's copy of the table begins with other numbers than the first stage's."""
    honest = OutputLayer.__init__

    def begins(self: OutputLayer, build: Any) -> None:
        honest(self, build)
        with torch.no_grad():
            self.weight.neg_()  # as good a draw as the right one

    return patch.object(OutputLayer, "__init__", begins)


# ---- what a verdict says ----

_LOSS = r"^(the )?loss$"
_PLACE = {"": "Take the instruments one by one, and compare each with its healthy reading."}

HUNT = Hunt(
    chapter="04",
    scene=(
        "Run the microscope with it (pretrain=suspect.around(train.pretrain)), and your three instruments: the loss "
        "alone, the ledger of that loss, the copies."
    ),
    questions={
        "family": "What kind of fault is it?",
        "place": "Which operation, tensor or number is at fault?",
        "first": FIRST_TENSOR,
    },
    faults=(
        Fault(
            "own maximum",
            _own_maximum,
            {"family": "missing communication", "place": r"max|largest", "first": _LOSS},
            {
                "family": {
                    "wrong scale": "The sums do have different scales. But why: what should have made them equal?",
                    "": "The loss alone differs from rank to rank. What makes ranks agree about a number?",
                },
                "place": {
                    "label|target": "A lost label's logit would leave log_sum right; here the ranks disagree in it.",
                    "": "Three numbers per token travel. Which of them did not, so that each rank has its own loss?",
                },
                "first": {"": "All outputs are right, up to the final norm's. Take the microscope's first name."},
            },
            "The all-reduce of the largest logit was missing, so each rank subtracted its own and the sums of "
            "exponentials had different scales. Each rank then had a loss of its own, which only the loss alone shows, "
            "rank by rank: with small logits all maxima are nearly the same, and the training's loss is hardly off.",
        ),
        Fault(
            "padding counts",
            _padding_counts,
            {"family": "wrong data", "place": r"padd|columns|real|vocab_size|not words", "first": _LOSS},
            {
                "family": {
                    "missing": "The ledger is complete, and all ranks have the same loss. It is too large.",
                    "": "On small logits all ranks agree about a loss that is too large. What is in their sum that "
                    "shouldn't be?",
                },
                "place": {
                    "copy|copies|embd|tied": "The copies stay equal, to the bit.",
                    "max": "A missing maximum would give each rank a loss of its own. Here they agree.",
                    "": "By how much is the loss too large, and how many columns would explain that?",
                },
                "first": {"": "All outputs are right, up to the final norm's. Take the microscope's first name."},
            },
            "The columns of padding rows were counted as words. All ranks agreed about the loss, and it was too "
            "large; by how much depends on the padding, and so on the number of ranks. Megatron-core does this, by "
            "the way, and training pushes these columns down.",
        ),
        Fault(
            "mean of copies",
            _mean_of_copies,
            {
                "family": "wrong scale",
                "place": r"embd|embedding group|tied|copies|copy|table|finalize|word\.weight",
                "first": r"embedding\.word\.weight gradient",
            },
            {
                "family": {
                    "missing": "If the sum were missing, the copies would drift apart. They don't.",
                    "": "Loss and copies are as they should be, and a single gradient is off. By which factor?",
                },
                "place": {
                    "lookup": "The lookup's output is right, and its gradient reaches the table alone: look after it.",
                    "": "All gradients are right but one. Who touches that one, and no other?",
                },
                "first": {"": "Take the microscope's first name: every other gradient is right."},
            },
            "Over the embedding group the mean was taken. So both copies got the same gradient, half of the right "
            "one, and stayed equal to the bit: the instrument that found the missing sum sees nothing here. Lookup "
            "and logits are two uses of one weight and not two samples, so their gradients are added.",
        ),
        Fault(
            "logits gathered",
            _logits_gathered,
            {"family": "extra communication", "place": r"logit|gather", "first": "none"},
            {
                "family": {
                    "": "Every number is right. What does the ledger have that it hadn't on the healthy run?",
                },
                "place": {
                    "": "Look at the operation that is new in the ledger. How many bytes does it have per token?"
                },
                "first": {"": "Loss, gradients and parameters agree with one process to 1e-10, so say 'none'."},
            },
            "Somebody wanted the accuracy in the log and gathered the logits for it. Every number is right. The "
            "ledger has an all-gather of all columns next to three numbers per token, and on a GPU the gathered "
            "tensor is in memory again. (The largest logit and its column can be found as the loss finds its maximum, "
            "with two numbers.)",
        ),
        Fault(
            "other copy",
            _other_copy,
            {
                "family": "wrong data",
                "place": r"copy|copies|table|output (layer|weight)|word\.weight|initial",
                "first": _LOSS,
            },
            {
                "family": {
                    "missing": "Each step's sum is there: the copies' distance doesn't change from step to step.",
                    "": "The loss alone is right, so it is computed rightly. From which numbers, on the last stage?",
                },
                "place": {
                    "max|label|padd|softmax": "Given the right logits, the loss is right on every rank.",
                    "": "The loss alone is right, the training's is not. What does the last stage multiply with?",
                },
                "first": {"": "All outputs are right, up to the final norm's. Take the microscope's first name."},
            },
            "The last stage's copy began with other numbers. The sum over the embedding group gives both copies the "
            "same step, and so they keep the distance with which they began: equal gradients make equal tables only "
            "of equal tables. Megatron therefore sums the copies' weights once, when they are made, with zeros on the "
            "last stage.",
        ),
    ),
)
