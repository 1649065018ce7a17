"""The model chunks of one rank: one for each stage that the schedule runs there."""

from __future__ import annotations

from collections.abc import Callable

import torch

from labkit.config import RunConfig
from labkit.models.build import LOCAL, LayerSpec
from labkit.models.counts import stage_contents
from labkit.models.gpt import GPTModel, draws
from labkit.parallel.groups import ParallelGroups
from labkit.parallel.random import model_parallel_seed
from labkit.schedules import Schedule, build_schedule

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
"""`optim.precision` -> type of parameters and activations."""


def build_model_chunks(
    config: RunConfig,
    groups: ParallelGroups,
    schedule: Schedule | None = None,
    *,
    spec: LayerSpec = LOCAL,
    kind: Callable[..., GPTModel] | None = None,
) -> list[GPTModel]:
    """Build the model chunks of this rank: the stages that `schedule` runs here, in their order.

    schedule: places stages on ranks; None takes the schedule that `config.schedule` names.
    spec: parts of the layers and the precision of their products. A config with fp8 or Transformer Engine needs
        `labkit.train.layer_spec(config.model, config.optim)`, which `pretrain` gives.
    kind: makes a chunk, in the place of the class of the model's family.

    Under a V schedule the first and the last stage are on one rank and share the tied weight. The weight is a parameter
    of the first chunk, and the last chunk refers to the same tensor. Its gradient is complete after the backwards of
    both stages, weight gradients included.

    Raises:
        ValueError: the stages do not divide the layers, the schedule is for another number of pipeline ranks, or tied
            weights lie on two ranks that `groups.embd` does not join.
    """
    if config.optim.fp8 != "none" and spec is LOCAL:
        raise ValueError(
            f"optim.fp8 is {config.optim.fp8}, and the given layers compute in the type of their tensors: give "
            "build_model_chunks spec=labkit.train.layer_spec(config.model, config.optim)"
        )
    if schedule is None:
        microbatches, vpp = config.num_microbatches(groups.world_size), groups.config.vpp
        schedule = build_schedule(config.schedule, pp=groups.pp.size, vpp=vpp, microbatches=microbatches)
    if schedule.pp != groups.pp.size:
        raise ValueError(f"{schedule.name} is for {schedule.pp} ranks, the pipeline has {groups.pp.size}")
    model, random = config.model, draws(config.model, config.moe)
    contents = stage_contents(config, schedule.num_stages)
    _check_embedding_group(config, schedule, groups)
    rng = model_parallel_seed(config.train.seed, groups) if random else None
    kind, chunks = kind or model_type(model.family), list[GPTModel]()
    for stage in schedule.stages_of(groups.pp.rank):
        held = contents[stage]
        first = chunks[0].embedding if chunks else None
        tied = held.loss and not model.untie_embeddings_and_output_weights
        chunk = kind(
            model,
            groups,
            layers=held.layers,
            moe=config.moe,
            pre_process=held.embedding,
            post_process=held.loss,
            seed=config.train.seed,
            dtype=DTYPES[config.optim.precision],
            gradient_accumulation_fusion=config.optim.gradient_accumulation_fusion,
            label_smoothing=config.train.label_smoothing,
            rng=rng,
            spec=spec,
            tied_weight_VH=first.word.weight if tied and first is not None else None,
        )
        chunks.append(chunk)
    return chunks


def model_type(family: str) -> type[GPTModel]:
    """The class of the models of a family."""
    if family == "bert":
        from labkit.models.bert.bert_model import BertModel  # a GPT does without

        return BertModel
    if family == "mamba":
        from labkit.models.mamba.mamba_model import MambaModel

        return MambaModel
    if family == "t5":
        from labkit.models.t5.t5_model import T5Model

        return T5Model
    return GPTModel


def embedding_ends(config: RunConfig, schedule: Schedule) -> tuple[int, int]:
    """Pipeline ranks of the first and the last stage that hold the word embedding; the output layer may be a copy.

    An encoder-decoder with an output layer of its own has its second copy on the decoder's first stage.
    """
    split, last = config.parallel.split_rank, schedule.placement(schedule.num_stages - 1)
    untied = config.model.untie_embeddings_and_output_weights
    return schedule.placement(0), last if split is None or not untied else split


def _check_embedding_group(config: RunConfig, schedule: Schedule, groups: ParallelGroups) -> None:
    """Raise ValueError if copies of the word embedding are on several ranks that `embd` does not join."""
    if config.model.untie_embeddings_and_output_weights and config.parallel.split_rank is None:
        return
    between = [] if config.parallel.split_rank is None else [config.parallel.split_rank]
    ends = sorted({*embedding_ends(config, schedule), *between})
    ranks = tuple(groups.pp.ranks[end] for end in ends)
    if len(ranks) > 1 and groups.rank in ranks and groups.embd.ranks != ranks:
        raise ValueError(
            f"{schedule.name} has the word embedding on pipeline ranks {' and '.join(map(str, ends))}, and groups.embd "
            "joins other ranks: make the groups by initialize_model_parallel(parallel, ends=(rank of the first stage, "
            "rank of the last)), as pretrain does, or set model.untie_embeddings_and_output_weights"
        )
