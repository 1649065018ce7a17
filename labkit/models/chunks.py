"""The model chunks of one rank: one for each stage that the schedule runs there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn

from labkit.comm.groups import ParallelGroups
from labkit.config import RunConfig
from labkit.config.choices import FAMILIES
from labkit.config.errors import shown
from labkit.models.build import LOCAL, LayerSpec
from labkit.models.gpt import GPTModel, draws
from labkit.parallel.random import RngTracker, model_parallel_seed
from labkit.plan.stages import configured_schedule, stage_contents
from labkit.schedules import Schedule

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
"""`optim.precision` -> type of parameters and activations."""


@dataclass(frozen=True)
class ChunkSpec:
    """The stage of a model chunk, and what the chunks of one rank share: all that the configuration does not say."""

    index: int
    """Place among the chunks of this rank (Megatron's `vp_stage`)."""
    stage: int
    """Stage of the whole pipeline. Under a V schedule the first and the last one are on the same rank."""
    layers: range
    """Global indices of its layers. Those of a decoder follow the encoder's: in a T5 they begin at `model.layers`."""
    rng: RngTracker | None = None
    """Random states for dropout and jitter, one for all chunks of the rank; None where the model draws nothing."""
    spec: LayerSpec = LOCAL
    """Parts of the layers, by `model.transformer_impl` and `optim.fp8`."""
    tied_weight_VH: nn.Parameter | None = None
    """The word embedding, if the rank's first chunk has it and the output layer of this one uses it too."""


def build_model_chunk(
    config: RunConfig,
    groups: ParallelGroups,
    *,
    pre_process: bool,
    post_process: bool,
    chunk: ChunkSpec,
    kind: Callable[..., GPTModel] | None = None,
) -> GPTModel:
    """Build one stage of the configured model. This is the default `model_provider` of `pretrain`.

    pre_process: the stage embeds tokens. Of an encoder-decoder the first stage of each half does.
    post_process: the stage ends with the loss.
    chunk: the stage, as a `model_provider` gets it; `dataclasses.replace(chunk, spec=...)` for other parts of layers.
    kind: makes the module, in place of the class of the model's family: a subclass with layers of its own.

    Raises ValueError for sizes that tp does not divide, or an option that the family does not have.
    """
    return (kind or model_type(config.model.family))(
        config.model,
        groups,
        layers=chunk.layers,
        moe=config.moe,
        pre_process=pre_process,
        post_process=post_process,
        seed=config.train.seed,
        dtype=DTYPES[config.optim.precision],
        gradient_accumulation_fusion=config.optim.gradient_accumulation_fusion,
        label_smoothing=config.train.label_smoothing,
        rng=chunk.rng,
        spec=chunk.spec,
        tied_weight_VH=chunk.tied_weight_VH,
    )


ModelProvider = Callable[..., Any]
"""(config, groups, pre_process=, post_process=, chunk=) -> the module of one stage, as `build_model_chunk`."""


def check_provider(model_provider: ModelProvider) -> None:
    """Raise ValueError for a function that cannot be called for a stage, such as `model_provider(config, groups)`."""
    form = "model_provider(config, groups, *, pre_process, post_process, chunk)"
    if not callable(model_provider):
        raise ValueError(f"model_provider is {shown(model_provider)}; give a function {form}, as build_model_chunk")
    taken: object = "arguments that Python cannot list"
    try:
        taken = inspect.signature(model_provider)
        taken.bind(None, None, pre_process=True, post_process=True, chunk=None)
    except (TypeError, ValueError):
        raise ValueError(
            f"model_provider takes {taken}; pretrain calls {form} once for each stage of the rank, and it returns the "
            "module of that stage: see labkit.models.build_model_chunk"
        ) from None


def build_model_chunks(
    config: RunConfig,
    groups: ParallelGroups,
    schedule: Schedule | None = None,
    *,
    spec: LayerSpec = LOCAL,
    model_provider: ModelProvider = build_model_chunk,
) -> list[Any]:
    """Build the model chunks of this rank, the stages that `schedule` runs here, in their order (Megatron's get_model).

    schedule: places stages on ranks; None takes the schedule that `config.schedule` names.
    spec: parts of the layers and the precision of their products. A config with fp8 or Transformer Engine needs
        `labkit.train.layer_spec(config.model, config.optim)`, which `pretrain` gives.
    model_provider: called once for each stage.

    Under a V schedule the first and the last stage are on one rank and share the tied weight. The weight is a parameter
    of the first chunk, and the last chunk refers to the same tensor. Its gradient is complete after the backwards of
    both stages, weight gradients included.

    Raises:
        ValueError: the stages do not divide the layers, the schedule is for another number of pipeline ranks, tied
            weights lie on two ranks that `groups.embd` does not join, or the provider does not return a module.
    """
    if config.optim.fp8 != "none" and spec is LOCAL:
        raise ValueError(
            f"optim.fp8 is {config.optim.fp8}, and the given layers compute in the type of their tensors: give "
            "build_model_chunks spec=labkit.train.layer_spec(config.model, config.optim)"
        )
    if schedule is None:
        schedule = configured_schedule(config, groups.world_size)
    schedule.check_pp(groups.pp.size)
    contents = stage_contents(config, schedule.num_stages)
    _check_embedding_group(config, schedule, groups)
    rng = model_parallel_seed(config.train.seed, groups) if draws(config.model, config.moe) else None
    chunks: list[Any] = []
    for index, stage in enumerate(schedule.stages_of(groups.pp.rank)):
        held = contents[stage]
        first = chunks[0].embedding if chunks and isinstance(chunks[0], GPTModel) else None
        tied = held.loss and not config.model.untie_embeddings_and_output_weights
        word = first.word.weight if tied and first is not None else None
        chunk = ChunkSpec(index, stage, held.layers, rng, spec, word)
        made = model_provider(config, groups, pre_process=held.embedding, post_process=held.loss, chunk=chunk)
        if not isinstance(made, nn.Module):
            raise ValueError(
                f"model_provider returned {'None' if made is None else f'a {type(made).__name__}'} where a "
                "torch.nn.Module must be; return the module of the one stage that it is asked for"
            )
        chunks.append(made)
    return chunks


def model_type(family: str) -> type[GPTModel]:
    """Return the class of the models of a family."""
    return resolve_name(FAMILIES[family].model)


def embedding_ends(config: RunConfig, schedule: Schedule) -> tuple[int, int]:
    """Return the pipeline ranks of the first and the last stage that hold the word embedding.

    The last one may hold it as the output layer. An encoder-decoder with an output layer of its own has its second copy
    on the decoder's first stage.
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
