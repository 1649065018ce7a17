"""The default forward steps of GPT and T5; `bert_step.py` has BERT's.

Shapes: B micro batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pkgutil import resolve_name
from typing import Any, Literal, overload

from torch import Tensor, nn

from labkit.config import ModelConfig
from labkit.config.choices import FAMILIES

Batch = dict[str, Tensor]
ForwardStep = Callable[[Iterator[Batch], nn.Module], tuple[Any, Any]]
"""(data iterator, model chunk) -> (output, loss function).

The last stage alone calls the loss function with the output. It returns `(sum of losses, number of tokens, metrics)` of
this rank's positions, or `(mean loss, metrics)`. With parallel.cp > 1 only the first form is taken. There the runtime,
as Megatron's, reads `loss` as this rank's part of the sample's mean. A mean over the rank's own positions would give
gradients cp times too large. `metrics` holds `loss_sum` and `tokens`, both of this rank's positions."""


def gpt_forward_step(data_iterator: Iterator[Batch], model: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
    """Run the default `forward_step`: next-token prediction on `tokens_BS`, `labels_BS`, `loss_mask_BS`.

    Positions are `position_ids_BS` where the batch has them, else those that the model takes this rank to hold.
    """
    batch = next(data_iterator)
    output = model(batch["tokens_BS"], position_ids=batch.get("position_ids_BS"), labels_BS=batch["labels_BS"])
    return output, partial(masked_loss, batch["loss_mask_BS"])


def t5_forward_step(data_iterator: Iterator[Batch], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
    """Run the default `forward_step` of a T5, the mean loss over the tokens of `labels` (Megatron-LM's
    `pretrain_t5.py`).

    `labkit.data.masked.t5_samples` names the tensors of a batch; any data set that gives these feeds a T5. Megatron's
    `enc_mask` has a row for each position, this one is [B, S]: 1 for tokens of `text_enc`, 0 for padding. Padding of
    `text_dec` comes after its tokens, so causal attention hides it from them.
    """
    batch = next(data_iterator)
    output = model(batch["text_enc"], batch["text_dec"], enc_mask_BS=batch["enc_mask"], labels_BT=batch["labels"])
    return output, partial(masked_loss, batch["loss_mask"])


def forward_step_of(family: str) -> ForwardStep:
    """Return the default `forward_step` of a model family."""
    return resolve_name(FAMILIES[family].forward_step)


def parts_of(model: ModelConfig) -> tuple[str, ...]:
    """Return the metrics of the default loss function that a run reports besides the loss, as means over
    microbatches."""
    if model.family != "bert":
        return ()
    return ("lm_loss", "sop_loss") if model.bert_binary_head else ("lm_loss",)


@overload
def masked_loss(
    loss_mask_BS: Tensor, loss_BS: Tensor, non_loss_data: Literal[False] = False
) -> tuple[Tensor, Tensor, dict[str, Tensor]]: ...
@overload
def masked_loss(loss_mask_BS: Tensor, loss_BS: Tensor, non_loss_data: Literal[True]) -> dict[str, Tensor]: ...
def masked_loss(loss_mask_BS: Tensor, loss_BS: Tensor, non_loss_data: bool = False) -> Any:
    """Return the three-item form of a loss: (sum of the loss over counted tokens, number of them, what to report).

    Under context parallelism both are of this rank's positions. Ranks may count different numbers of tokens: the
    runtime divides by the sum over `cp`. The report is added up over `cp` as over data-parallel ranks.

    A token whose mask is 0 is left out after the product, because 0 times an infinite loss is NaN.

    non_loss_data: give `loss_BS` and `loss_mask_BS` themselves, by name: the loss of every token of the microbatch.
    """
    if non_loss_data:
        return {"loss_BS": loss_BS.detach(), "loss_mask_BS": loss_mask_BS}
    mask = loss_mask_BS.to(loss_BS.dtype)
    loss_sum, tokens = (loss_BS * mask).masked_fill_(mask == 0, 0).sum(), mask.sum()
    return loss_sum, tokens, {"loss_sum": loss_sum.detach(), "tokens": tokens}
