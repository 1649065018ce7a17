"""Hunt of chapter 19: faults of a BERT that has pre-norms, each of which its loss forgives."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from labkit.check.hunts.hunting import Fault, Hunt
from labkit.models.bert import bert_model
from labkit.models.blocks import TransformerLayer
from labkit.models.core_attention import CoreAttention
from labkit.train import bert_step
from labkit.train.lr_schedule import LearningRate

# ---- the faults ----


def _residual_of_the_norm() -> AbstractContextManager[Any]:
    """The second half adds the MLP's output to the norm's output, not to the residual stream."""

    def forward_mlp(self: TransformerLayer, x_SBH: Tensor) -> Tensor:
        norm: Any = self.mlp.norm
        y_SBH = norm(x_SBH)
        return self.add_mlp(self.mlp(y_SBH), y_SBH)

    return patch.object(TransformerLayer, "forward_mlp", forward_mlp)


def _no_warm_up() -> AbstractContextManager[Any]:
    """The first step has the peak rate already."""
    honest = LearningRate.__call__

    def rate(self: LearningRate, step: int) -> float:
        return honest(self, max(step, self.warmup_steps))

    return patch.object(LearningRate, "__call__", rate)


def _padding_seen() -> AbstractContextManager[Any]:
    """Attention reads padding as if it were text."""

    def scores(padding_mask_BS: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
        shape = (1, len(padding_mask_BS) * heads, 1, padding_mask_BS.shape[1])
        return torch.zeros(shape, dtype=dtype, device=padding_mask_BS.device)

    return patch.object(bert_model, "scores_of_padding", scores)


def _looks_back_only() -> AbstractContextManager[Any]:
    """Attention has a GPT's mask in addition to that of padding."""
    honest = CoreAttention.forward

    def forward(self: CoreAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Any:
        later = q.new_full((q.shape[-2], k.shape[-2]), torch.finfo(q.dtype).min / 2).triu(1)
        return honest(self, q, k, v, later[None, None] if mask is None else mask + later)

    return patch.object(CoreAttention, "forward", forward)


def _labels_everywhere() -> AbstractContextManager[Any]:
    """The mean is over all positions, so the labels of words that nobody hid count as well."""
    honest = bert_step.bert_loss

    def bert_loss(loss_mask_BS: Tensor, is_random_B: Tensor, output: Any, non_loss_data: bool = False) -> Any:
        return honest(torch.ones_like(loss_mask_BS), is_random_B, output, non_loss_data)

    return patch.object(bert_step, "bert_loss", bert_loss)


# ---- what a verdict says ----

HUNT = Hunt(
    chapter="19",
    scene=(
        "It is labkit's BERT with pre-norms. Print its check-up, suspect.around(check_up)(), next to that of a healthy "
        "one, and look at who sees whom, suspect.around(sight)()."
    ),
    questions={
        "family": "What kind of fault is it?",
        "place": "Which operation, tensor or number is at fault?",
        "shows": "Which instrument shows it?",
    },
    choices={"shows": ("stream", "gradients", "rates", "sight", "labels")},
    faults=(
        Fault(
            "residual of the norm",
            _residual_of_the_norm,
            {"family": "wrong data|wrong order", "place": "residual|stream|norm|mlp", "shows": "stream|gradients"},
            {
                "family": {
                    "wrong scale": "The weights and the rates are right. Something is added to another tensor than it "
                    "should be.",
                    "": "Nothing is missing and nothing is drawn anew: an addition takes one of its terms from the "
                    "wrong place.",
                },
                "place": {
                    "attention": "Look at the stream after each half: it is after the MLP that it has lost its past.",
                    "": "How does the stream's size change from layer to layer in pre, and how here?",
                },
                "shows": {"": "Rates, sight and labels are those of a healthy BERT."},
            },
            "The MLP's output was added to the norm's output instead of to the stream. So each layer normalised the "
            "stream after all, its size was that of one norm in every layer, and the way past the halves was gone: "
            "post in disguise. Megatron has a switch for it, apply_residual_connection_post_layernorm, off by default.",
        ),
        Fault(
            "no warm-up",
            _no_warm_up,
            {"family": "wrong scale|wrong order", "place": "rate|warm|lr|schedule", "shows": "rates"},
            {
                "family": {
                    "wrong data": "Model, data and losses of the first step are right.",
                    "": "No tensor of the first forward or backward is wrong. What comes after backward?",
                },
                "place": {"": "Everything up to the gradient is right, so look at what makes a step of it."},
                "shows": {"": "That one is the same as in a healthy BERT. Compare the rates of the first steps."},
            },
            "The schedule began with the peak rate, so there was no warm-up. A small BERT with pre-norms forgives it, "
            "and its loss even falls faster at first. The log has the learning rate of each step.",
        ),
        Fault(
            "padding seen",
            _padding_seen,
            {"family": "wrong data", "place": "pad|mask|attention|scores", "shows": "sight"},
            {
                "family": {"": "All operations are there, and so are their scales. Who reads what he should not read?"},
                "place": {
                    "label|loss": "The labels of words that nobody hid don't count, as it should be.",
                    "": "Find the columns of sight that should be empty.",
                },
                "shows": {"": "That one is healthy. In sight the columns of padding should be empty."},
            },
            "Attention read the padding, so what is in a sample depended on how long its neighbours are. The columns "
            "of padding in sight should be empty and were not. No loss of a run with full samples shows it.",
        ),
        Fault(
            "looks back only",
            _looks_back_only,
            {"family": "wrong data", "place": "mask|causal|attention|triang|later|back", "shows": "sight"},
            {
                "family": {"": "Nothing is missing in what is computed, but the positions do not read all they may."},
                "place": {
                    "pad": "The columns of padding are empty, as they should be.",
                    "": "Look at sight above its diagonal.",
                },
                "shows": {"": "That one is healthy. Look at sight above its diagonal."},
            },
            "A GPT's mask was left in, so no position saw what comes after it, and [CLS] saw nothing but itself. Half "
            "of sight was empty. The loss falls all the same, because much can be told from the left alone.",
        ),
        Fault(
            "labels everywhere",
            _labels_everywhere,
            {"family": "wrong data", "place": "label|loss|mean|mask", "shows": "labels"},
            {
                "family": {
                    "wrong scale": "It is not only divided by another number: other losses are in the sum.",
                    "": "The model's output is right. What is made of it?",
                },
                "place": {
                    "padding|attention": "Sight is that of a healthy BERT, so attention and its masks are right.",
                    "": "The model's output is right, and the loss is made of something that it should not read.",
                },
                "shows": {"": "That one is healthy. Which labels may the loss depend on?"},
            },
            "The mean was over all positions, so the labels at words that nobody had hidden counted, too. The loss "
            "begins at the same height, and then falls quickly, because most of these labels are one and the same "
            "filler. Changing a label that should not count showed it.",
        ),
    ),
)
