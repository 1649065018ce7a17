"""What each pipeline stage of a model holds. Arithmetic only, no torch.

Which rank runs a stage is the schedule's affair (`Schedule.placement`); what the stage holds depends on its number
alone, so that any placement trains the same model.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.config import RunConfig
from labkit.config.pipeline_layout import parse_layout


@dataclass(frozen=True, slots=True)
class StageContents:
    """What one stage holds."""

    layers: range
    """Global indices of its transformer layers; none in a standalone embedding or loss stage or an empty one."""
    embedding: bool
    """Whether it embeds tokens (the first stage)."""
    loss: bool
    """Whether it holds the final norm, the output layer and the loss (the last stage)."""


def stage_contents(config: RunConfig, num_stages: int) -> list[StageContents]:
    """Every stage of `config.model` over `num_stages` stages: as `parallel.pipeline_layout` says, else equal shares.

    Raises:
        ValueError: layers that the stages do not divide, or a text for other numbers of stages or layers.
    """
    layers, parallel = config.model.layers, config.parallel
    if parallel.pipeline_layout is not None:
        return _from_text(parallel.pipeline_layout, layers, num_stages)
    standalone = parallel.standalone_embedding_stage
    return [
        StageContents(_equal_share(layers, stage, num_stages, standalone), stage == 0, stage == num_stages - 1)
        for stage in range(num_stages)
    ]


def _from_text(text: str, num_layers: int, num_stages: int) -> list[StageContents]:
    stages = parse_layout(text)
    held = sum(stage.count("t") for stage in stages)
    if len(stages) != num_stages or held != num_layers:
        raise ValueError(
            f"parallel.pipeline_layout {text!r} has {len(stages)} stages and {held} layers; "
            f"the schedule has {num_stages} stages and the model {num_layers} layers"
        )
    contents, first = [], 0
    for stage in stages:
        size = stage.count("t")
        contents.append(StageContents(range(first, first + size), "E" in stage, "L" in stage))
        first += size
    return contents


def _equal_share(num_layers: int, stage: int, num_stages: int, standalone_embedding_stage: bool) -> range:
    """Layers of `stage`: s L / S .. (s + 1) L / S; without the first stage where it holds the embedding alone."""
    if standalone_embedding_stage:
        if num_stages == 1:
            raise ValueError("standalone_embedding_stage needs a second stage; with one no rank is left for layers")
        if stage == 0:
            return range(0)
        stage, num_stages = stage - 1, num_stages - 1
    if num_layers % num_stages:
        raise ValueError(
            f"{num_layers} layers cannot be shared evenly by {num_stages} stages; take a multiple of {num_stages} "
            "layers, or set parallel.pipeline_layout, which gives the layers of every stage"
        )
    size = num_layers // num_stages
    return range(stage * size, (stage + 1) * size)


def stage_layers(
    num_layers: int,
    *,
    pp: int,
    pp_rank: int,
    vpp: int = 1,
    chunk: int = 0,
    standalone_embedding_stage: bool = False,
) -> range:
    """Global indices of the layers of chunk `chunk` on pipeline rank `pp_rank` under looped placement.

    Chunk v of rank r is stage v P + r, whose equal share starts at layer v (L / V) + r L / (P V): a microbatch meets
    the layers in order when it visits all ranks once for chunk 0, then once for chunk 1, and so on.

    Raises:
        ValueError: layers that do not divide evenly, or a rank or chunk that does not exist.
    """
    if not 0 <= pp_rank < pp or not 0 <= chunk < vpp:
        raise ValueError(
            f"pipeline rank {pp_rank} of {pp} and chunk {chunk} of {vpp} do not exist; ranks and chunks count from 0"
        )
    return _equal_share(num_layers, chunk * pp + pp_rank, pp * vpp, standalone_embedding_stage)
