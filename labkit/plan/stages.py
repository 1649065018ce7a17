"""The schedule that a configuration names, and the layers of each of its stages. No torch.

The schedule places a stage on a rank (`Schedule.placement`). The number of a stage alone decides its layers, so any
placement trains the same model.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.config import ModelConfig, RunConfig
from labkit.config.pipeline_layout import parse_layout
from labkit.plan.sizes import all_layers, decoder_layers
from labkit.schedules import Schedule, build_schedule


@dataclass(frozen=True, slots=True)
class StageContents:
    """The parts of the model on one stage."""

    layers: range
    """Global indices of its transformer layers; empty for a stage without layers."""
    embedding: bool
    """True on the stage that embeds tokens (the first; in an encoder-decoder also the decoder's first)."""
    loss: bool
    """True on the stage with the final norm, the output layer and the loss (the last)."""


def configured_schedule(config: RunConfig, world_size: int | None = None) -> Schedule:
    """Return the schedule that a configuration names, for `world_size` ranks; None means as few as the layout needs.

    Raises ValueError if the schedule cannot be built, and ScheduleError for a file without a valid schedule.
    """
    parallel = config.parallel
    microbatches = config.num_microbatches(world_size or parallel.smallest_world_size)
    return build_schedule(config.schedule, pp=parallel.pp, vpp=parallel.vpp, microbatches=microbatches)


def stage_contents(config: RunConfig, num_stages: int) -> list[StageContents]:
    """Return the contents of every stage: as `parallel.pipeline_layout` says, else equal shares of the layers.

    In an encoder-decoder the stages before `parallel.split_rank` share the encoder's layers, the others the decoder's.

    Raises:
        ValueError: the stages do not divide the layers, or `pipeline_layout` has other numbers of stages or layers.
    """
    layers, parallel = config.model.layers, config.parallel
    if config.model.has_two_halves:
        return _halves(config.model, num_stages, parallel.split_rank)
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


def _halves(model: ModelConfig, num_stages: int, split: int | None) -> list[StageContents]:
    """Return the contents of both halves: equal shares of the encoder before stage `split`, then of the decoder.

    A single stage holds both.
    """
    if num_stages == 1:
        return [StageContents(range(all_layers(model)), embedding=True, loss=True)]
    if split is None or not 0 < split < num_stages:
        raise ValueError(
            f"an encoder-decoder on {num_stages} stages needs parallel.split_rank from 1 to {num_stages - 1}, the "
            f"decoder's first stage; it is {split}"
        )
    first, depth, decoders = model.layers, decoder_layers(model), num_stages - split
    encoder = [_equal_share(first, stage, split, False) for stage in range(split)]
    decoder = [_equal_share(depth, stage, decoders, False) for stage in range(decoders)]
    held = [*encoder, *(range(first + each.start, first + each.stop) for each in decoder)]
    return [StageContents(each, stage in (0, split), stage == num_stages - 1) for stage, each in enumerate(held)]


def _equal_share(num_layers: int, stage: int, num_stages: int, standalone_embedding_stage: bool) -> range:
    """Return layers s L / S to (s + 1) L / S of stage s of S.

    A standalone embedding stage has none, and the other stages are counted without it.
    """
    if standalone_embedding_stage:
        if num_stages == 1:
            raise ValueError("standalone_embedding_stage needs a second stage for the layers; set pp to 2 or more")
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
    """Return the global indices of the layers of chunk `chunk` on pipeline rank `pp_rank` under looped placement.

    Chunk v of rank r is stage v P + r. Its equal share starts at layer v (L / V) + r L / (P V). So a microbatch passes
    the layers in order when it visits all ranks for chunk 0, then all ranks for chunk 1, and so on.

    Raises:
        ValueError: the stages do not divide the layers, or the rank or the chunk does not exist.
    """
    if not 0 <= pp_rank < pp or not 0 <= chunk < vpp:
        raise ValueError(
            f"pipeline rank {pp_rank} of {pp} and chunk {chunk} of {vpp} do not exist; ranks and chunks count from 0"
        )
    return _equal_share(num_layers, chunk * pp + pp_rank, pp * vpp, standalone_embedding_stage)
