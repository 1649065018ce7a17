"""Pretrain a GPT by the four providers, as Megatron-LM's `pretrain_gpt.py` does.

    python examples/pretrain_gpt.py --ranks 4 --tp 2 --pp 2 --steps 20
    python -m torch.distributed.run --nproc-per-node 4 examples/pretrain_gpt.py --tp 2 --pp 2 --config mine.yaml

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
from labkit.data import build_gpt_datasets
from labkit.launch import run
from labkit.models import GPTModel
from labkit.parallel import ParallelGroups
from labkit.train import pretrain


def train_valid_test_datasets_provider(config: RunConfig) -> Any:
    """(train, validation, test): each has a length, and `ordered(n)` gives the tokens of sample n of the run."""
    return build_gpt_datasets(config)


def model_provider(config: RunConfig, groups: ParallelGroups) -> nn.Module:
    """This rank's stage: `layers / pp` layers, the embedding on the first rank, norm and loss on the last."""
    each, stage = config.model.layers // groups.pp.size, groups.pp.rank
    return GPTModel(
        config.model,
        groups,
        layers=range(stage * each, (stage + 1) * each),
        pre_process=stage == 0,
        post_process=stage == groups.pp.size - 1,
        seed=config.train.seed,
    )


def forward_step(data_iterator: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
    """One microbatch through this stage, and the function that makes a loss of the last stage's output."""
    batch = next(data_iterator)
    loss_BS = model(batch["tokens_BS"], labels_BS=batch["labels_BS"])
    return loss_BS, partial(loss_func, batch["loss_mask_BS"])


def loss_func(loss_mask_BS: Tensor, loss_BS: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(sum of losses, number of tokens, numbers to report)."""
    loss_sum, tokens = (loss_BS * loss_mask_BS).sum(), loss_mask_BS.sum()
    return loss_sum, tokens, {"loss_sum": loss_sum.detach(), "tokens": tokens}


def main() -> None:
    """Read the few options, launch, print the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="a YAML file; without it the preset `tiny`")
    for name, default in (("ranks", 4), ("tp", 2), ("pp", 2), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    config = RunConfig.from_yaml(given.config) if given.config else presets.tiny()
    config = config.override({"tp": given.tp, "pp": given.pp, "train.steps": given.steps})
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
