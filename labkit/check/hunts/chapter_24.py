"""Hunt of chapter 24: faults of an encoder-decoder that is cut over a pipeline."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from labkit.check.hunts.hunting import FIRST_TENSOR, Fault, Hunt
from labkit.comm.fault_injection import dropped
from labkit.models.t5.t5_layers import CrossAttention
from labkit.models.t5.t5_model import T5Model

# ---- the faults ----


class _Forgets(torch.autograd.Function):
    """Hands a tensor on in forward, and no gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return torch.zeros_like(dy)


def _gradient_not_carried() -> AbstractContextManager[Any]:
    """A stage of the decoder hands back its own part of the gradient of the encoder's output, not the later stages'."""
    honest = T5Model.forward

    def forward(self: T5Model, *args: Any, **named: Any) -> Any:
        made = honest(self, *args, **named)
        return (made[0], _Forgets.apply(made[1])) if isinstance(made, tuple) else made

    return patch.object(T5Model, "forward", forward)


def _causal_crossing() -> AbstractContextManager[Any]:
    """Cross-attention is causal: position t of the decoder reads the encoder's positions 0 to t only."""
    honest = CrossAttention.forward

    def forward(self: CrossAttention, x_TBH: Tensor, encoded_SBH: Tensor, mask: Tensor | None) -> Tensor:
        later_TS = x_TBH.new_full((len(x_TBH), len(encoded_SBH)), torch.finfo(x_TBH.dtype).min / 2).triu(1)
        return honest(self, x_TBH, encoded_SBH, later_TS if mask is None else mask + later_TS)

    return patch.object(CrossAttention, "forward", forward)


def _one_buffer() -> AbstractContextManager[Any]:
    """A stage receives the encoder's output into one buffer, so it still has that of the microbatch before."""
    honest = T5Model._received

    def received(self: T5Model, text_dec_BT: Tensor | None) -> tuple[Tensor, Tensor]:
        x_TBH, encoded_SBH = honest(self, text_dec_BT)
        before = self.__dict__.get("_before")
        self.__dict__["_before"] = encoded_SBH.detach().clone()
        if before is not None:
            encoded_SBH.data.copy_(before)
        return x_TBH, encoded_SBH

    return patch.object(T5Model, "_received", received)


# ---- what a verdict says ----

_WORDS, _PLACES = r"embedding\.word\.weight gradient", r"embedding\.position\.weight gradient"
_LEDGER = "Compare the ledgers: one all-reduce is not there."
_COMPLETE = "The ledger is complete: every message and every all-reduce was made, with its bytes."

HUNT = Hunt(
    chapter="24",
    scene=(
        "It is a T5 over a pipeline. Train with it (compare(..., pretrain=suspect.around(pretrain))), and open a "
        "ledger on every stage (ranks.run(suspect.around(ledgers)))."
    ),
    questions={
        "family": "What kind of fault is it?",
        "place": "Which operation, tensor or group is at fault?",
        "first": FIRST_TENSOR,
    },
    faults=(
        Fault(
            "gradient not carried",
            _gradient_not_carried,
            {
                "family": "wrong data|missing communication",
                "place": "gradient|encoded|encoder.?s output|backward|carr",
                "first": r"encoder\.final_norm\.bias gradient",
            },
            {
                "family": {"": "The loss is right, so everything in forward is. What is too small in backward?"},
                "place": {
                    "embd|group|table|copies": "The tables' sums were made: the ledger shows both all-reduces. Which "
                    "gradients are wrong besides theirs?",
                    "": "All wrong gradients are in the encoder and in what feeds it. What comes to it from the "
                    "decoder?",
                },
                "first": {"": "The microscope names it; look at row.differing for the others."},
            },
            "Each stage of the decoder handed back only its own part of the gradient of the encoder's output, and "
            "dropped what the later stages had sent. The loss was right, the decoder's gradients were, and the bytes "
            "were those of a healthy run. The encoder learned from one stage's cross-attention alone.",
        ),
        Fault(
            "table of words",
            partial(dropped, operation="all_reduce", group="embd"),
            {"family": "missing communication", "place": r"\bembd\b|word|embedding", "first": _WORDS},
            {
                "family": {"": _LEDGER},
                "place": {
                    "pos": "The positions' gradient is right. Which table differs?",
                    "": "Only one tensor differs, on the stages that hold a copy of it.",
                },
                "first": {"": "Take the microscope's first name."},
            },
            "The all-reduce over embd was left out, so the copies of the words' table on the first stage of each half "
            "and on the last stage each got their own part of the gradient, and drift apart from the first step on.",
        ),
        Fault(
            "table of positions",
            partial(dropped, operation="all_reduce", group="pos_embd"),
            {"family": "missing communication", "place": r"pos", "first": _PLACES},
            {
                "family": {"": _LEDGER},
                "place": {
                    "word|^embd": "The words' gradient is right. Which table differs?",
                    "": "Only one tensor differs, on the stages that hold a copy of it.",
                },
                "first": {"": "Take the microscope's first name."},
            },
            "The all-reduce over pos_embd was left out: the encoder's first stage and the decoder's first stage keep "
            "their own parts of the positions' gradient. A GPT needs no such sum, so it is the one that is forgotten.",
        ),
        Fault(
            "causal crossing",
            _causal_crossing,
            {
                "family": "wrong data",
                "place": "causal|mask|cross",
                "first": r"decoder\.layers\.0\.cross_attention output",
            },
            {
                "family": {"missing": _COMPLETE, "": "The loss is wrong, though every message is right."},
                "place": {
                    "encoder": "The encoder's outputs agree with one process.",
                    "padding": "Padding is hidden, as it should be. What else can a mask hide?",
                    "": "The first tensor that differs is the output of a decoder layer. What does this layer read "
                    "that a layer of a GPT doesn't?",
                },
                "first": {"": "The microscope reads in the order of the forward: take its first name."},
            },
            "Cross-attention was causal, like the decoder's own attention: the first word was written after a look at "
            "one token of the encoder's text, the second after two. Encoder and messages were right, and the decoder's "
            "first cross-attention was the first to differ. It trains; it only reads less than it was given.",
        ),
        Fault(
            "one buffer",
            _one_buffer,
            {
                "family": "reused memory|wrong data|wrong order",
                "place": "encoded|encoder.?s output|buffer|microbatch|receiv",
                "first": "loss",
            },
            {
                "family": {"missing": _COMPLETE, "": "The first microbatch is right, and the later ones are not."},
                "place": {
                    "padding|mask": "With a wrong mask, the first microbatch would be wrong as well.",
                    "": "The messages have the right bytes. Whose are they, in the second microbatch?",
                },
                "first": {"": "The microscope looks at the outputs of the first microbatch, and those are right."},
            },
            "Stages of the decoder received the encoder's output into one buffer and read what the microbatch before "
            "had left there. So the decoder translated each text with the encoding of the one before it. The first "
            "microbatch was right.",
        ),
    ),
)
