"""Hunt of chapter 07: context parallelism and ring attention."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from labkit.check.hunts.hunting import FIRST_TENSOR, NUMBERS_AGREE, Fault, Hunt
from labkit.parallel.context import ring_attention

# ---- the faults ----


def _mask_of_the_plain_cut() -> AbstractContextManager[Any]:
    """Attention computes the blocks of the plain cut, on data that is cut zigzag."""
    plan = ring_attention.ring_plan

    def of_the_plain_cut(cp: int, rank: int, *, causal: bool, layout: Any) -> Any:
        return plan(cp, rank, causal=causal, layout="contiguous")

    return patch.object(ring_attention, "ring_plan", of_the_plain_cut)


def _sums_not_passed_on() -> AbstractContextManager[Any]:
    """Shares of dk and dv for the keys of others are computed and dropped; dkv never travels."""

    def add_and_drop(gradients: Any, block: Any, kv: Tensor, sums: Any, *, first: bool) -> None:
        gradients.add(block, kv, torch.zeros_like(sums.held))

    return patch.object(ring_attention, "_add_and_pass_on", add_and_drop)


def _one_hop_short() -> AbstractContextManager[Any]:
    """The sums of dk and dv stop one rank before their owner, which takes those of the next rank's keys."""
    honest, step = ring_attention._add_and_pass_on, 0

    def add(gradients: Any, block: Any, kv: Tensor, sums: Any, *, first: bool) -> None:
        nonlocal step
        step = 1 if first else step + 1
        if step + 1 < sums._group.size:
            honest(gradients, block, kv, sums, first=first)
            return
        share = torch.zeros_like(sums.held)
        gradients.add(block, kv, share)
        sums.finish()
        sums.held.add_(share)

    return patch.object(ring_attention, "_add_and_pass_on", add)


def _one_buffer() -> AbstractContextManager[Any]:
    """What arrives overwrites what the rank works on: a block reads the keys of the step after it."""
    start = ring_attention._Ring.start

    def start_and_overwrite(self: Any) -> None:
        start(self)
        self.finish()

    return patch.object(ring_attention._Ring, "start", start_and_overwrite)


class _Later:
    """A transfer that begins when somebody waits for it."""

    def __init__(self, start: Any) -> None:
        self._start = start

    def wait(self) -> Any:
        self._start()


def _sent_after_the_block() -> AbstractContextManager[Any]:
    """A hop begins when the block is done, not before it."""
    start = ring_attention._Ring.start

    def start_late(self: Any) -> None:
        def transfer() -> None:
            start(self)
            for pending in self._underway:
                pending.wait()

        self._underway = [_Later(transfer)]

    return patch.object(ring_attention._Ring, "start", start_late)


# ---- what a verdict says ----

_READ_IT = "The microscope reads in the order of a step, outputs before gradients: take its first name."

HUNT = Hunt(
    chapter="07",
    scene=(
        "Train with it (compare(..., pretrain=suspect.around(pretrain))), open the ledger, ask which keys a position "
        "sees, draw the ring on a slow link: one of these shows it."
    ),
    questions={
        "family": "What kind of fault is it?",
        "place": "Which operation, tensor or moment is at fault?",
        "first": FIRST_TENSOR,
    },
    faults=(
        Fault(
            "mask of the plain cut",
            _mask_of_the_plain_cut,
            {"family": "wrong data", "place": "mask|block|plan|cut|zigzag|position", "first": r"layers\.0\.attention"},
            {
                "family": {
                    "reused memory": "A block with the keys of another step would hide every position from itself on "
                    "some rank. Ask which keys a position sees.",
                    "communication": "The ledger is as it should be: the right bytes, in the right number.",
                    "": "The output of layer 0's attention is wrong, and each message has the bytes that it should.",
                },
                "place": {
                    "embedding|loss|mlp": "The embedding's output is right, and what comes after attention only passes "
                    "the damage on.",
                    "": "Look at the keys that a position sees. Which cut would make that right?",
                },
                "first": {"": _READ_IT},
            },
            "The sequence was cut zigzag, and attention computed the blocks of the plain cut. So each rank took its "
            "two chunks for neighbours: a rank saw nothing of higher ranks, although its late chunk follows theirs, "
            "and everything of lower ranks, although their late chunks come after its own. Positions saw the future, "
            "and the loss hardly showed it at the start of a training.",
        ),
        Fault(
            "sums not passed on",
            _sums_not_passed_on,
            {
                "family": "missing communication",
                "place": "dk|dv|sum|share|gradients? of (the )?keys|backward",
                "first": r"qkv\.bias gradient",
            },
            {
                "family": {
                    "wrong data": "No rank reads another's data by mistake. Count the messages of backward.",
                    "": "Outputs and loss are right, so forward is. How many messages does backward send, and how many "
                    "should it?",
                },
                "place": {
                    "forward": "Forward is right: so are all outputs and the loss.",
                    "": "The first wrong gradient belongs to the projection to q, k and v. Which of the three do other "
                    "ranks have shares of?",
                },
                "first": {"": _READ_IT},
            },
            "dkv was never passed on. What a rank computed for the keys of others was lost, so a key got gradients "
            "from the queries of its own rank alone. Forward has no part in it: outputs and loss were right. Backward "
            "sent kv and nothing else, which the ledger shows: as many messages as forward, not twice as many.",
        ),
        Fault(
            "one hop short",
            _one_hop_short,
            {
                "family": "wrong data|missing communication",
                "place": "dk|dv|sum|share|hop|gradients? of (the )?keys|backward",
                "first": r"qkv\.(word\.)?weight gradient",
            },
            {
                "family": {
                    "wrong scale": "The gradients aren't too large or too small: their sum over all positions, the "
                    "bias's gradient, is right.",
                    "": "A bias's gradient is the sum over all positions, and it is right. The weight's multiplies "
                    "each position's with that position's input, and is wrong. So what is wrong about the sums?",
                },
                "place": {
                    "forward": "Forward is right: so are all outputs and the loss.",
                    "": "Count the messages of backward. Where are the sums of dkv after so many hops?",
                },
                "first": {
                    "bias": "The bias's gradient agrees. That is the clue: a sum over all positions doesn't notice "
                    "where a position's gradient ended up.",
                    "": _READ_IT,
                },
            },
            "The sums of dk and dv stopped one hop before home, so each rank took those of the next rank's keys for "
            "its own. Nothing was lost, it was in the wrong place. So the gradient of the bias, which adds up all "
            "positions, was right, and that of the weight, which pairs each position's gradient with its input, was "
            "not. The ledger has one message less in backward than it should.",
        ),
        Fault(
            "one buffer",
            _one_buffer,
            {
                "family": "reused memory|wrong order",
                "place": "buffer|kv|keys|receiv|arriv|ring",
                "first": r"layers\.0\.attention",
            },
            {
                "family": {
                    "communication": "The ledger is as it should be: the right bytes, in the right number.",
                    "": "Ask which keys a position sees. Does it see itself? At which moment were its rank's own keys "
                    "there?",
                },
                "place": {
                    "mask|block|plan|cut": "Mask and plan are right. The keys that they were applied to were not the "
                    "ones of that step.",
                    "": "What does a rank read while the next message arrives?",
                },
                "first": {"": _READ_IT},
            },
            "What arrived was written over what the rank was working on, so each block read the keys of the step after "
            "it, under its own step's mask. The rank's own keys were gone before step 0, so no position saw itself. "
            "The ring needs two buffers: one to work on, one to receive into. On a real machine this is a race, and "
            "shows itself only when the message is faster than the block.",
        ),
        Fault(
            "sent after the block",
            _sent_after_the_block,
            {
                "family": "slow work|wrong order",
                "place": "hop|message|send|ring|overlap|transfer|start",
                "first": "none",
            },
            {
                "family": {
                    "extra communication": "The ledger is the same, record by record.",
                    "communication|data|memory": "Every number is right, and so are all messages. When do they begin?",
                    "": "Every number is right, and so are the bytes. What is left? Draw the ring on a slow link.",
                },
                "place": {
                    "block|comput|mask": "Each block is as long as it should be. What happens between two of them?",
                    "": "Look at the gaps between the blocks.",
                },
                "first": {"": NUMBERS_AGREE},
            },
            "Each hop began when the block was done and not before it, so no message hid behind computing. All numbers "
            "and all bytes were right. Only the picture of the ring on a slow link showed it: a gap after every block, "
            "even where a message takes less time than a block.",
        ),
    ),
)
