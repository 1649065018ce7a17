"""Pretrain a BERT by the four providers, as Megatron-LM's `pretrain_bert.py` does.

    python examples/pretrain_bert.py --ranks 4 --tp 2 --pp 2 --steps 20
    python -m torch.distributed.run --nproc-per-node 4 examples/pretrain_bert.py --tp 2 --pp 2 --config mine.yaml

Each provider is what `labkit train --preset bert_tiny` uses by itself, written out: change one, and keep the rest.
`--config` takes a file of `labkit train --preset bert_tiny --print-config`.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from labkit.config import ConfigError, RunConfig, presets
from labkit.data.masked.bert_samples import build_bert_datasets
from labkit.launch import run
from labkit.models import BertModel
from labkit.parallel import ParallelGroups
from labkit.train import pretrain


def train_valid_test_datasets_provider(config: RunConfig) -> Any:
    """(train, validation, test): each has a length, and `ordered(n)` is sample n of the run, its tensors by name."""
    return build_bert_datasets(config)


def model_provider(config: RunConfig, groups: ParallelGroups) -> nn.Module:
    """This rank's stage: `layers / pp` layers, the embedding on the first rank, norm and heads on the last."""
    each, stage = config.model.layers // groups.pp.size, groups.pp.rank
    return BertModel(
        config.model,
        groups,
        layers=range(stage * each, (stage + 1) * each),
        pre_process=stage == 0,
        post_process=stage == groups.pp.size - 1,
        seed=config.train.seed,
    )


def forward_step(data_iterator: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
    """One microbatch through this stage, and the function that makes a loss of the last stage's output."""
    batch = next(data_iterator)
    output = model(
        batch["tokens_BS"],
        types_BS=batch["types_BS"],
        padding_mask_BS=batch["padding_mask_BS"],
        labels_BS=batch["labels_BS"],
    )
    return output, partial(loss_func, batch["loss_mask_BS"], batch["is_random_B"])


def loss_func(
    loss_mask_BS: Tensor, is_random_B: Tensor, output: tuple[Tensor, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """(mean over masked words + mean over samples of the order, numbers to report)."""
    loss_BS, order_B2 = output
    words = (loss_BS * loss_mask_BS).sum() / loss_mask_BS.sum().clamp(min=1)
    order = cross_entropy(order_B2.float(), is_random_B)
    loss = words + order
    parts = {"lm_loss": words.detach(), "sop_loss": order.detach()}
    return loss, {"loss_sum": loss.detach(), "tokens": loss.new_ones(()), **parts}


def main() -> None:
    """Read the few options, launch, print the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="a YAML file; without it the preset `bert_tiny`")
    for name, default in (("ranks", 4), ("tp", 2), ("pp", 2), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    config = RunConfig.from_yaml(given.config) if given.config else presets.bert_tiny()
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
    first, last, words = result.losses[0], result.losses[-1], result.series("lm_loss")[-1][1]
    print(f"loss of step 1: {first:.4f}, of step {len(result.losses)}: {last:.4f}, of its words {words:.4f}")


if __name__ == "__main__":
    main()
