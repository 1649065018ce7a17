"""Pretrain a GPT with the four providers, as Megatron-LM's `pretrain_gpt.py` does.

    python examples/pretrain_gpt.py --nproc 4 --tp 2 --pp 2 --steps 20
    python -m torch.distributed.run --nproc-per-node 4 examples/pretrain_gpt.py --tp 2 --pp 2 --config mine.yaml

The script takes the options of `labkit train` and computes the same numbers, because each provider does what
`labkit train` does by default. Replace one provider and keep the others. `Options` adds a field for
this script, here `--frozen-layers`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from labkit.cli import train_script
from labkit.config import RunConfig, field
from labkit.data import build_gpt_datasets
from labkit.models import ChunkSpec, build_model_chunk
from labkit.parallel import ParallelGroups


@dataclass(frozen=True, kw_only=True)
class Options:
    """Fields of this script: options on its command line, and `config.extra` in the providers."""

    frozen_layers: int = field(0, "How many of the first layers keep their initial weights.", ge=0)


def train_valid_test_datasets_provider(config: RunConfig) -> Any:
    """(train, validation, test): each has a length, and `ordered(n)` gives the tokens of sample n of the run."""
    return build_gpt_datasets(config)


def model_provider(
    config: RunConfig, groups: ParallelGroups, *, pre_process: bool, post_process: bool, chunk: ChunkSpec
) -> nn.Module:
    """One stage of this rank: the embedding if `pre_process`, `chunk.layers`, and if `post_process` norm and loss."""
    model = build_model_chunk(config, groups, pre_process=pre_process, post_process=post_process, chunk=chunk)
    for index in chunk.layers:
        model.layers[str(index)].requires_grad_(index >= config.extra.frozen_layers)
    return model


def forward_step(data_iterator: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
    """Run one microbatch through this stage; return its output, and what computes a loss of the last stage's."""
    batch = next(data_iterator)
    loss_BS = model(batch["tokens_BS"], labels_BS=batch["labels_BS"])
    return loss_BS, partial(loss_func, batch["loss_mask_BS"])


def loss_func(loss_mask_BS: Tensor, loss_BS: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(sum of losses, number of tokens, numbers to report)."""
    counted_BS = (loss_BS * loss_mask_BS).masked_fill_(loss_mask_BS == 0, 0)  # 0 times an infinite loss is NaN
    loss_sum, tokens = counted_BS.sum(), loss_mask_BS.sum()
    return loss_sum, tokens, {"loss_sum": loss_sum.detach(), "tokens": tokens}


if __name__ == "__main__":
    train_script(
        __doc__,
        preset="tiny",
        families=("gpt", "mamba"),
        datasets_provider=train_valid_test_datasets_provider,
        model_provider=model_provider,
        forward_step=forward_step,
        extra_args_provider=Options,
    )
