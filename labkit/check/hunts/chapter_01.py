"""Hunt of chapter 01: descent whose gradients are summed by a reduce-scatter and whose weights are gathered again."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from labkit.check.hunts.hunting import MESSAGES_AND_NUMBERS, Fault, Hunt
from labkit.comm import collectives
from labkit.comm.groups import Group

# ---- the faults ----

_RANK = 1
"""The rank that is at fault where not all are."""
_LATE = 0.02
"""Seconds that the slow rank comes late to each reduce-scatter."""


def _no_sum() -> AbstractContextManager[Any]:
    """Each rank takes its chunk of its own gradient, and nothing is sent."""

    def reduce_scatter(x: Tensor, group: Group, *_: Any, **__: Any) -> Tensor:
        return x.chunk(group.size)[group.rank].clone()

    return patch.object(collectives, "reduce_scatter", reduce_scatter)


def _mean() -> AbstractContextManager[Any]:
    """The reduce-scatter divides by the number of ranks, by which the caller has divided already."""
    honest = collectives.reduce_scatter

    def reduce_scatter(x: Tensor, group: Group, *_: Any, **__: Any) -> Tensor:
        return honest(x, group, op="avg")

    return patch.object(collectives, "reduce_scatter", reduce_scatter)


def _padded_sum() -> AbstractContextManager[Any]:
    """The all-gather is an all-reduce of tensors that are zero outside of the rank's own chunk."""

    def all_gather(x: Tensor, group: Group, *_: Any, **__: Any) -> Tensor:
        padded = torch.zeros(group.size * len(x), dtype=x.dtype, device=x.device)
        padded.chunk(group.size)[group.rank].copy_(x)
        return collectives.all_reduce(padded, group)

    return patch.object(collectives, "all_gather", all_gather)


def _sent_too_early() -> AbstractContextManager[Any]:
    """One rank's buffer is sent before backward has written it, so it holds the gradient of the step before."""
    honest, buffer = collectives.reduce_scatter, list[Tensor]()

    def reduce_scatter(x: Tensor, group: Group, *_: Any, **__: Any) -> Tensor:
        if group.rank != _RANK:
            return honest(x, group)
        old = buffer.pop() if buffer else torch.zeros_like(x)
        buffer.append(x.clone())
        return honest(old, group)

    return patch.object(collectives, "reduce_scatter", reduce_scatter)


def _straggler() -> AbstractContextManager[Any]:
    """One rank comes late to each reduce-scatter."""
    honest = collectives.reduce_scatter

    def reduce_scatter(x: Tensor, group: Group, *_: Any, **__: Any) -> Tensor:
        if group.rank == _RANK:
            time.sleep(_LATE)
        return honest(x, group)

    return patch.object(collectives, "reduce_scatter", reduce_scatter)


# ---- what a verdict says ----

_ALL = {"": "Which ranks have other bytes, or other waiting times, than the rest? None has, so say 'all'."}
_WEIGHTS_AGREE = "The weights are those of one process, so no number is wrong."

HUNT = Hunt(
    chapter="01",
    scene=(
        "Run descend with it. The loss of one process is next to it, and three instruments: the bytes that each "
        "operation was given, how long each rank waited in each, and the first step over that of one process."
    ),
    questions={
        "family": "What kind of fault is it?",
        "place": "Which operation is at fault?",
        "rank": "Which rank is at fault? A number, or all",
    },
    choices={"place": ("reduce-scatter", "all-gather")},
    families=(*MESSAGES_AND_NUMBERS, "slow work"),
    faults=(
        Fault(
            "no sum",
            _no_sum,
            {"family": "missing communication", "place": "reduce-scatter", "rank": "all"},
            {
                "family": {
                    "wrong scale": "A wrong scale has the same ratio in all chunks. Read the ledger, too.",
                    "": "Compare the ledger with that of a healthy run, line by line.",
                },
                "place": {"": "The ledger has it, with the right bytes. Which line is not in the ledger?"},
                "rank": _ALL,
            },
            "No gradients were added: each rank took its chunk of its own gradient. The loss went down all the same, "
            "only more slowly, because a rank's own gradient points roughly the right way. And the weights were equal "
            "on all ranks, because the all-gather saw to that. The ledger has no reduce-scatter.",
        ),
        Fault(
            "mean",
            _mean,
            {"family": "wrong scale", "place": "reduce-scatter", "rank": "all"},
            {
                "family": {
                    "missing": "All operations are in the ledger, with the bytes that they should have.",
                    "": "How are all the ratios of the first step related to the number of ranks?",
                },
                "place": {"": "It moves numbers and does not change them. Which operation could have divided twice?"},
                "rank": _ALL,
            },
            "The reduce-scatter took the mean, and descend had divided by the number of ranks before. So every "
            "gradient was g times too small, exactly, and the loss fell more slowly, as with a small learning rate.",
        ),
        Fault(
            "padded sum",
            _padded_sum,
            {"family": "extra communication", "place": "all-gather", "rank": "all"},
            {
                "family": {"wrong": _WEIGHTS_AGREE, "": "What does the ledger have that a healthy one has not?"},
                "place": {"": "The ledger has the reduce-scatter, with the right bytes. Which line is not there?"},
                "rank": _ALL,
            },
            "The all-gather was an all-reduce of tensors that are zero outside of the rank's own chunk. The sum is the "
            "same as the joined chunks, but a ring sends twice the bytes for it. It is the easy "
            "way to gather chunks of unequal sizes, and no number ever tells.",
        ),
        Fault(
            "sent too early",
            _sent_too_early,
            {"family": "wrong order", "place": "reduce-scatter", "rank": "1"},
            {
                "family": {
                    "missing": "All operations are in the ledger, with the bytes that they should have.",
                    "wrong data": "Its numbers are its own, but of another moment. Look at more than one step.",
                    "wrong scale": "A wrong scale has the same ratio everywhere. Compare the chunks.",
                    "": "The first step is wrong and the last weights are nearly right. What settles with time?",
                },
                "place": {"": "It brought the same weights to all ranks. What enters the first step?"},
                "rank": {
                    "all": "The step without one rank's samples explains the ratios. Try each rank.",
                    "": "Leave out one rank's samples in one process, until the first step is the same.",
                },
            },
            "Rank 1 sent its buffer before backward had written it, so its gradient was that of the step before, and "
            "zero in the first step. As the descent slows down, two steps differ less and less, so in the end nearly "
            "nothing is to be seen. That happens when a stream is not waited for.",
        ),
        Fault(
            "straggler",
            _straggler,
            {"family": "slow work", "place": "reduce-scatter", "rank": "1"},
            {
                "family": {"wrong": _WEIGHTS_AGREE, "": "Bytes and weights are right. What is left is the time."},
                "place": {"": "Compare the two operations with the healthy run. In which one do the ranks wait?"},
                "rank": {
                    "all": "If all were late, none would have to wait for the others.",
                    "": "Whoever waits long is on time. Who does not wait?",
                },
            },
            "Rank 1 came 20 ms late to each reduce-scatter. All ranks took equally long, because a collective ends for "
            "everybody when the last one comes. But the punctual ranks waited in it, and the late one did not: a "
            "straggler is the rank that waits least.",
        ),
    ),
)
