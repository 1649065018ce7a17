"""Hunt of chapter 05: faults of the second forward, which the loss does not show."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from labkit.check.hunts.hunting import FIRST_TENSOR, Fault, Hunt
from labkit.comm.fault_injection import dropped
from labkit.models.recomputation import Recomputation
from labkit.parallel import recompute

# ---- the faults ----


def _new_numbers() -> AbstractContextManager[Any]:
    """The generators are not set back before the second forward."""
    return patch.object(recompute.RandomStates, "restore", lambda self, rng: None)


def _input_overwritten() -> AbstractContextManager[Any]:
    """The output of a recomputed part is written into the memory of its input, which backward will read."""
    honest = recompute._Again.first

    def first(self: Any, *args: Any) -> Any:
        y = honest(self, *args)
        if isinstance(y, Tensor) and y.shape == args[0].shape:
            args[0].data.copy_(y.data)  # .data: as a kernel of one's own would, unseen by autograd
        return y

    return patch.object(recompute._Again, "first", first)


def _graph_kept() -> AbstractContextManager[Any]:
    """The first forward runs with autograd's graph, and something holds on to it."""
    honest = recompute._Again.first

    def first(self: Any, *args: Any) -> Any:
        with torch.enable_grad():
            self.seen = honest(self, *args)
        return self.seen.detach()

    return patch.object(recompute._Again, "first", first)


def _core_again() -> AbstractContextManager[Any]:
    """Core attention is recomputed inside of a layer that is recomputed as a whole."""
    return patch.object(Recomputation, "selects", lambda self, name: name == "core_attn")


# ---- what a verdict says ----

_AGREE = "Loss, gradients and parameters agree with one process to 1e-10, so without dropout no tensor is wrong."
_FC2 = r"layers\.1\.mlp\.fc2\.weight gradient"

HUNT = Hunt(
    chapter="05",
    scene=(
        "It is a run with full recomputation. Train with it (compare(..., pretrain=suspect.around(pretrain))), and "
        "take its vital signs: ranks.run(suspect.around(vitals))."
    ),
    questions={
        "family": "What kind of fault is it?",
        "place": "Which operation, tensor or state is at fault?",
        "first": FIRST_TENSOR,
    },
    choices={
        "family": (
            "missing communication",
            "extra communication",
            "wrong data",
            "wrong scale",
            "random numbers",
            "reused memory",
            "kept memory",
            "slow work",
        ),
    },
    faults=(
        Fault(
            "sum left out",
            partial(dropped, operation="all_reduce", layer="layers.1.attention", phase="recompute"),
            {"family": "missing communication", "place": r"all.?reduce|\bg\b|sum|proj|attention", "first": _FC2},
            {
                "family": {
                    "reused memory|wrong data": "That would give the same first tensor. But look at the all-reduces of "
                    "the second forward: how many should there be?",
                    "random": "The microscope trains without dropout, and it sees this fault.",
                    "": "The loss is right and a gradient is not. What does the second forward do less than the first?",
                },
                "place": {
                    "f\\b|backward": "The gradient that arrives at fc2 is right; its bias says so. What fc2 has read "
                    "is wrong.",
                    "mlp|fc": "The input of fc2 is wrong already. What comes before the MLP?",
                    "": "The first wrong gradient is dy times x, and dy is right. Who made x the second time?",
                },
                "first": {"": "The microscope names one. Take it as it is printed."},
            },
            "In the second forward the attention of layer 1 did not add up its two halves. The loss comes from the "
            "first forward, so it was right, and so was the gradient that arrived from above: the bias of fc2 shows "
            "it. But fc2's weight gradient is dy times x, and x was made again, after an attention without g. The "
            "ledger has one all-reduce less under recompute than under forward.",
        ),
        Fault(
            "new numbers",
            _new_numbers,
            {"family": "random numbers", "place": "rng|state|seed|dropout|mask|generator|restore", "first": "none"},
            {
                "family": {
                    "": "Without dropout this run is right in every digit, and it keeps, sends and computes what it "
                    "should. What does the microscope switch off?",
                },
                "place": {"": "What must be the same in both forwards, besides the input and the weights?"},
                "first": {"": f"{_AGREE} Say 'none'."},
            },
            "The generators were not set back before the second forward, so it dropped other values than the first. "
            "The microscope trains without dropout and can't see it. Gradients with dropout differ from those of a "
            "run that keeps everything, and nothing else does.",
        ),
        Fault(
            "input overwritten",
            _input_overwritten,
            {"family": "reused memory|wrong data", "place": "input|saved|buffer|output|overwr", "first": _FC2},
            {
                "family": {
                    "missing": "That would give the same first tensor. But the ledger is complete: every all-reduce "
                    "of the second forward was made.",
                    "random": "The microscope trains without dropout, and it sees this fault.",
                    "": "Every message and every operation is there, and a gradient is wrong: something was read that "
                    "is not what it was.",
                },
                "place": {
                    "rng|state|mask": "Without dropout nothing is drawn.",
                    "": "The second forward does all that the first did, and it comes out differently. What does it "
                    "begin with?",
                },
                "first": {"": "The microscope names one. Take it as it is printed."},
            },
            "A layer's output was written into the memory of its input, which looked free: nothing in forward needs "
            "it any more. But full recomputation had kept exactly this tensor, and the second forward began with the "
            "layer's own output. autograd checks for this by counting in-place operations on a tensor, and a kernel "
            "that writes through a pointer isn't counted.",
        ),
        Fault(
            "graph kept",
            _graph_kept,
            {"family": "kept memory", "place": "graph|autograd|activation|first forward|no_grad|grad", "first": "none"},
            {
                "family": {
                    "random": "Gradients with dropout are as they should be.",
                    "": "Numbers, messages and operations are as they should be. What is left?",
                },
                "place": {"": "How much does a layer keep now, and who keeps as much as that?"},
                "first": {"": f"{_AGREE} Say 'none'."},
            },
            "The first forward ran with autograd's graph, and the graph was held. So the layer was computed a second "
            "time in order to save memory that had never been freed. Every number is right, and the price is paid; "
            "only the bytes between forward and backward show it.",
        ),
        Fault(
            "core again",
            _core_again,
            {"family": "slow work", "place": "core|attention|nested|twice|inside", "first": "none"},
            {
                "family": {
                    "extra communication": "The ledger is as it should be: what is done too often sends nothing.",
                    "": "Numbers, messages and kept bytes are as they should be. What else does recomputation cost?",
                },
                "place": {
                    "layer|mlp|fc": "A whole layer more would be a whole forward. By how much is it more?",
                    "": "Which part of a layer has that many operations?",
                },
                "first": {"": f"{_AGREE} Say 'none'."},
            },
            "Core attention was recomputed inside of a layer that was itself recomputed: its forward ran three times. "
            "Two options that save memory were both switched on, and the second one only costs. The operations show "
            "it, by the forward of core attention.",
        ),
    ),
)
