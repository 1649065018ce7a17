"""Layers of each rank: a row per pipeline rank, a column per layer, a box per stage."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.patches import Patch

from labkit.plan.stages import StageContents
from labkit.schedules.ir import Schedule
from labkit.viz.figure import Figure
from labkit.viz.style import box, name_rows, new_figure, nth_color, nth_style, styled

_WIDTH = 9.0


def layer_placement(schedule: Schedule, stages: Sequence[StageContents]) -> Figure:
    """Draw the layers that each rank of `schedule` holds; `stages` are its stages' contents (`models.stage_contents`).

    E is the embedding, L is the output with the loss, and a colour is a model chunk. An empty stage is drawn as a label
    where hidden states pass through it. The sentence names the layers of rank 0 and the empty stages. Raises
    ValueError if the numbers of stages differ.
    """
    if len(stages) != schedule.num_stages:
        raise ValueError(f"{len(stages)} stages are described, {schedule.name} has {schedule.num_stages}")
    layers = sum(len(stage.layers) for stage in stages)
    chunks = max(len(schedule.stages_of(rank)) for rank in range(schedule.pp))
    with styled():
        fig = new_figure(_WIDTH, 0.42 * schedule.pp + 1.0)
        axes = fig.add_subplot()
        first = -1
        empty: dict[tuple[int, int], list[int]] = {}
        for number, stage in enumerate(stages):
            width = len(stage.layers) + stage.embedding + stage.loss
            rank, chunk = schedule.placement(number), schedule.chunk(number)
            if not width:
                empty.setdefault((rank, first), []).append(number)
                continue
            fill, pattern = nth_style(chunk)
            text = f"stage {number}" if width * 14 > layers else str(number)
            corner = (first, rank + 0.08)
            box(axes, corner, width, 0.84, fill, text, edgecolor="#FFFFFF", linewidth=1.2, hatch=pattern)
            first += width
        for (rank, place), numbers in empty.items():
            edge = nth_color(schedule.chunk(numbers[0]))
            axes.text(place, rank + 0.5, f"{_stages(numbers)}: empty", ha="center", va="center", fontsize=8,
                      bbox={"boxstyle": "round,pad=0.3", "facecolor": "#FFFFFF", "edgecolor": edge})  # fmt: skip
        step = max(1, layers // 16)
        ticks = range(0, layers, step)
        axes.set_xticks([-0.5, *(tick + 0.5 for tick in ticks), layers + 0.5], ["E", *map(str, ticks), "L"])
        name_rows(axes, [f"rank {rank}" for rank in range(schedule.pp)])
        axes.set(xlim=(-1, layers + 1), xlabel="layer")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        fig.legend(
            handles=[Patch(facecolor=nth_color(c), label=f"chunk {c}") for c in range(min(chunks, 8))],
            loc="outside upper right",
            ncols=min(chunks, 8),
        )
    held = " and ".join(_text(stages[number]) for number in schedule.stages_of(0))
    plural = "" if chunks == 1 else "s"
    sentence = f"{layers} layers on {schedule.pp} ranks, {chunks} chunk{plural} per rank: rank 0 holds {held}"
    if numbers := sorted(number for those in empty.values() for number in those):
        sentence += f"; {_stages(numbers)} {'are' if len(numbers) > 1 else 'is'} empty"
    return Figure(fig, sentence)


def _stages(numbers: Sequence[int]) -> str:
    return f"stage{'s'[: len(numbers) > 1]} {' and '.join(map(str, numbers))}"


def _text(stage: StageContents) -> str:
    """Return words such as `the embedding with layers 0-3`, or `an empty stage`."""
    parts = ["the embedding"] if stage.embedding else []
    if len(stage.layers) == 1:
        parts.append(f"layer {stage.layers[0]}")
    elif stage.layers:
        parts.append(f"layers {stage.layers[0]}-{stage.layers[-1]}")
    parts += ["the loss"] if stage.loss else []
    return " with ".join(parts) or "an empty stage"
