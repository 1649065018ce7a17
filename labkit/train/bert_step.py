"""BERT's default `forward_step`: masked words and the order of two sentences, as Megatron-LM's `pretrain_bert.py`.

    loss = mean over masked positions of the cross-entropy of the word under the mask
         + mean over samples of the cross-entropy of the order of the two sentences

Both means are of one microbatch. So a microbatch counts as one loss. The reported loss is the mean over the
microbatches of the global batch, whatever number of words each has masked. One without any masked word has no mean over
words, so it adds nothing to that mean's report.

A batch has these tensors. Any data set can feed a BERT by giving them.

| key               | shape, type    | meaning                                                                |
|-------------------|----------------|------------------------------------------------------------------------|
| `tokens_BS`       | [B, S] int64   | `[CLS] first sentence [SEP] second sentence [SEP]` masked, then padding |
| `types_BS`        | [B, S] int64   | 0 up to the first `[SEP]`, 1 up to the second, 0 for padding            |
| `labels_BS`       | [B, S] int64   | the word under a mask; any token id at other positions                |
| `loss_mask_BS`    | [B, S] float32 | 1 at masked positions, else 0                                          |
| `padding_mask_BS` | [B, S] int64   | 1 for tokens, 0 for padding                                            |
| `is_random_B`     | [B] int64      | 1 if the two sentences have changed places (Megatron-LM's name)         |

Shapes: B micro batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


def bert_forward_step(data_iterator: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
    """Run the default `forward_step` of a BERT; return the model's output and the function of its loss."""
    batch = next(data_iterator)
    output = model(
        batch["tokens_BS"],
        types_BS=batch["types_BS"],
        padding_mask_BS=batch["padding_mask_BS"],
        labels_BS=batch["labels_BS"],
    )
    return output, partial(bert_loss, batch["loss_mask_BS"], batch["is_random_B"])


def bert_loss(
    loss_mask_BS: Tensor, is_random_B: Tensor, output: tuple[Tensor, Tensor | None], non_loss_data: bool = False
) -> Any:
    """Return the two-item form of a loss: (the loss of this microbatch, what to report).

    output: `loss_BS` and the `logits_B2` of the sentence order; without that head None, and the loss is the first mean.
    non_loss_data: give the tensors themselves by name instead.
    """
    loss_BS, order_B2 = output
    if non_loss_data:
        found = {"loss_BS": loss_BS.detach(), "loss_mask_BS": loss_mask_BS, "is_random_B": is_random_B}
        return found if order_B2 is None else found | {"order_B2": order_B2.detach()}
    mask = loss_mask_BS.to(loss_BS.dtype)
    words = (loss_BS * mask).masked_fill_(mask == 0, 0).sum() / mask.sum().clamp(min=1)
    any_words = mask.any().to(loss_BS.dtype)
    loss, counted, parts = words, any_words, {"lm_loss": words.detach(), "lm_loss_count": any_words}
    if order_B2 is not None:
        order = cross_entropy(order_B2.to(loss_BS.dtype), is_random_B)
        loss, counted, parts = words + order, torch.ones_like(any_words), parts | {"sop_loss": order.detach()}
    return loss, {"loss_sum": loss.detach(), "tokens": counted, **parts}
