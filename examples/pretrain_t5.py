"""Pretrain a T5 with the four providers, as Megatron-LM's `pretrain_t5.py` does.

    python examples/pretrain_t5.py --nproc 4 --tp 2 --pp 2 --split-rank 1 --steps 20
    python -m torch.distributed.run --nproc-per-node 4 examples/pretrain_t5.py --tp 2 --pp 2 --split-rank 1

The script takes the options of `labkit train` and computes the same numbers, because each provider does what
`labkit train` does by default. Replace one provider and keep the others.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from labkit.cli import train_script
from labkit.config import RunConfig
from labkit.data.datasets import build_datasets
from labkit.models import ChunkSpec, build_model_chunk
from labkit.parallel import ParallelGroups


def train_valid_test_datasets_provider(config: RunConfig) -> Any:
    """(train, validation, test): `ordered(n)` gives the tensors of sample n by name, each without B."""
    return build_datasets(config)


def model_provider(
    config: RunConfig, groups: ParallelGroups, *, pre_process: bool, post_process: bool, chunk: ChunkSpec
) -> nn.Module:
    """One stage of this rank: layers of the encoder before `parallel.split_rank`, of the decoder from it on."""
    return build_model_chunk(config, groups, pre_process=pre_process, post_process=post_process, chunk=chunk)


def forward_step(data_iterator: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
    """Run one microbatch through this stage; return its output, and what computes a loss of the last stage's."""
    batch = next(data_iterator)
    output = model(batch["text_enc"], batch["text_dec"], enc_mask_BS=batch["enc_mask"], labels_BT=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"])


def loss_func(loss_mask_BT: Tensor, loss_BT: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(sum of losses over the decoder's tokens, number of tokens, numbers to report)."""
    counted_BT = (loss_BT * loss_mask_BT).masked_fill_(loss_mask_BT == 0, 0)  # 0 times an infinite loss is NaN
    loss_sum, tokens = counted_BT.sum(), loss_mask_BT.sum()
    return loss_sum, tokens, {"loss_sum": loss_sum.detach(), "tokens": tokens}


if __name__ == "__main__":
    train_script(
        __doc__,
        preset="t5_tiny",
        families=("t5",),
        datasets_provider=train_valid_test_datasets_provider,
        model_provider=model_provider,
        forward_step=forward_step,
    )
