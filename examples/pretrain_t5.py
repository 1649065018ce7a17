"""Pretrain a T5 by the four providers, as Megatron-LM's `pretrain_t5.py` does.

    python examples/pretrain_t5.py --ranks 4 --tp 2 --pp 2 --split-rank 1 --steps 20
    python -m torch.distributed.run --nproc-per-node 4 examples/pretrain_t5.py --tp 2 --pp 2 --split-rank 1

Each provider is what `labkit train` uses by itself, written out: change one, and keep the rest. `--config` takes a file
of `labkit train --print-config`.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from labkit.config import ConfigError, RunConfig, presets
from labkit.data.datasets import build_datasets
from labkit.launch import run
from labkit.models import T5Model, stage_contents
from labkit.parallel import ParallelGroups
from labkit.train import pretrain


def train_valid_test_datasets_provider(config: RunConfig) -> Any:
    """(train, validation, test): `ordered(n)` gives the tensors of sample n by name, each without B."""
    return build_datasets(config)


def model_provider(config: RunConfig, groups: ParallelGroups) -> nn.Module:
    """This rank's stage: layers of the encoder before `split_rank`, of the decoder from it on."""
    held = stage_contents(config, groups.pp.size)[groups.pp.rank]
    return T5Model(
        config.model,
        groups,
        layers=held.layers,
        pre_process=held.embedding,
        post_process=held.loss,
        seed=config.train.seed,
    )


def forward_step(data_iterator: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
    """One microbatch through this stage, and the function that makes a loss of the last stage's output."""
    batch = next(data_iterator)
    output = model(batch["text_enc"], batch["text_dec"], enc_mask_BS=batch["enc_mask"], labels_BT=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"])


def loss_func(loss_mask_BT: Tensor, loss_BT: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(sum of losses over the decoder's tokens, number of tokens, numbers to report)."""
    loss_sum, tokens = (loss_BT * loss_mask_BT).sum(), loss_mask_BT.sum()
    return loss_sum, tokens, {"loss_sum": loss_sum.detach(), "tokens": tokens}


def main() -> None:
    """Read the few options, launch, print the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="a YAML file; without it the preset `t5_tiny`")
    for name, default in (("ranks", 4), ("tp", 2), ("pp", 2), ("split-rank", 1), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    config = RunConfig.from_yaml(given.config) if given.config else presets.get("t5_tiny")
    split = given.split_rank if given.pp > 1 else None
    config = config.override({"tp": given.tp, "pp": given.pp, "split_rank": split, "train.steps": given.steps})
    train = partial(
        pretrain,
        datasets_provider=train_valid_test_datasets_provider,
        model_provider=model_provider,
        forward_step=forward_step,
    )
    try:
        [result, *_] = run(train, int(os.environ.get("WORLD_SIZE", given.ranks)), config)  # torchrun sets WORLD_SIZE
    except ConfigError as error:
        parser.error(str(error))
    print(f"loss of step 1: {result.losses[0]:.4f}, of step {len(result.losses)}: {result.losses[-1]:.4f}")


if __name__ == "__main__":
    main()
