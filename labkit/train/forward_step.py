"""What a model is asked for each microbatch, and the loss that is made of it: the default `forward_step`.

Shapes: B micro batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, overload

from torch import Tensor, nn

from labkit.train.pipeline import Batch


def gpt_forward_step(data_iterator: Iterator[Batch], model: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
    """The default `forward_step`: next-token prediction on `tokens_BS`, `labels_BS`, `loss_mask_BS`.

    Positions are `position_ids_BS` where the batch has them, else those that the model takes this rank to hold.
    """
    batch = next(data_iterator)
    output = model(batch["tokens_BS"], position_ids=batch.get("position_ids_BS"), labels_BS=batch["labels_BS"])
    return output, partial(masked_loss, batch["loss_mask_BS"])


@overload
def masked_loss(
    loss_mask_BS: Tensor, loss_BS: Tensor, non_loss_data: Literal[False] = False
) -> tuple[Tensor, Tensor, dict[str, Tensor]]: ...
@overload
def masked_loss(loss_mask_BS: Tensor, loss_BS: Tensor, non_loss_data: Literal[True]) -> dict[str, Tensor]: ...
def masked_loss(loss_mask_BS: Tensor, loss_BS: Tensor, non_loss_data: bool = False) -> Any:
    """(sum of the loss over counted tokens, number of them, what to report), the three-item form of a loss.

    Under context parallelism both are of this rank's positions. Ranks may count different numbers of tokens: the
    runtime divides by the sum over `cp`, and the report is added up over `cp` as over data-parallel ranks.

    non_loss_data: give `loss_BS` and `loss_mask_BS` themselves, by name: the loss of every token of the microbatch.
    """
    if non_loss_data:
        return {"loss_BS": loss_BS.detach(), "loss_mask_BS": loss_mask_BS}
    mask = loss_mask_BS.to(loss_BS.dtype)
    loss_sum, tokens = (loss_BS * mask).sum(), mask.sum()
    return loss_sum, tokens, {"loss_sum": loss_sum.detach(), "tokens": tokens}
