"""Pretrain a BERT with the four providers, as Megatron-LM's `pretrain_bert.py` does.

    python examples/pretrain_bert.py --nproc 4 --tp 2 --pp 2 --steps 20
    python -m torch.distributed.run --nproc-per-node 4 examples/pretrain_bert.py --tp 2 --pp 2 --config mine.yaml

The script takes the options of `labkit train` and computes the same numbers, because each provider does what
`labkit train` does by default. Replace one provider and keep the others.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from labkit.cli import train_script
from labkit.config import RunConfig
from labkit.data.masked.bert_samples import build_bert_datasets
from labkit.models import ChunkSpec, build_model_chunk
from labkit.parallel import ParallelGroups


def train_valid_test_datasets_provider(config: RunConfig) -> Any:
    """(train, validation, test): each has a length, and `ordered(n)` is sample n of the run, its tensors by name."""
    return build_bert_datasets(config)


def model_provider(
    config: RunConfig, groups: ParallelGroups, *, pre_process: bool, post_process: bool, chunk: ChunkSpec
) -> nn.Module:
    """One stage of this rank: the embedding if `pre_process`, `chunk.layers`, and if `post_process` norm and heads."""
    return build_model_chunk(config, groups, pre_process=pre_process, post_process=post_process, chunk=chunk)


def forward_step(data_iterator: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
    """Run one microbatch through this stage; return its output, and what computes a loss of the last stage's."""
    batch = next(data_iterator)
    output = model(
        batch["tokens_BS"],
        types_BS=batch["types_BS"],
        padding_mask_BS=batch["padding_mask_BS"],
        labels_BS=batch["labels_BS"],
    )
    return output, partial(loss_func, batch["loss_mask_BS"], batch["is_random_B"])


def loss_func(
    loss_mask_BS: Tensor, is_random_B: Tensor, output: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, dict[str, Tensor]]:
    """(mean over masked words + mean over samples of the order, numbers to report)."""
    loss_BS, order_B2 = output
    counted_BS, masked = (loss_BS * loss_mask_BS).masked_fill_(loss_mask_BS == 0, 0), loss_mask_BS.sum()
    loss, tokens = counted_BS.sum() / masked.clamp(min=1), masked.clamp(max=1)
    parts = {"lm_loss": loss.detach(), "lm_loss_count": tokens}  # a microbatch may have no masked word
    if order_B2 is not None:  # model.bert_binary_head
        order = cross_entropy(order_B2.to(loss.dtype), is_random_B)
        loss, tokens, parts = loss + order, loss.new_ones(()), parts | {"sop_loss": order.detach()}
    return loss, {"loss_sum": loss.detach(), "tokens": tokens, **parts}


if __name__ == "__main__":
    train_script(
        __doc__,
        preset="bert_tiny",
        families=("bert",),
        datasets_provider=train_valid_test_datasets_provider,
        model_provider=model_provider,
        forward_step=forward_step,
    )
