"""Train the tour's GPT on four ranks and on one, and draw both into docs/tour.gif, the picture at the top of README.

python scripts/draw_tour.py [--out FILE.gif]

The step is predicted from the second third of the run (outlines) and measured in the last third (filled), as in 00.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from labkit.config import RunConfig, presets
from labkit.events import Event
from labkit.launch import run
from labkit.schedules import one_f_one_b, simulate
from labkit.schedules.simulator import Timeline
from labkit.train import pretrain
from labkit.train.reporting import measured
from labkit.viz.style import SEQUENCE, color, styled

ROOT = Path(__file__).resolve().parent.parent
STEPS, TP, PP = 24, 2, 2
GROWING, HELD = 40, 30
"""Frames in which the step runs, and frames that show its end."""
LETTER = {"forward": "F", "backward": "B"}


class Tour(NamedTuple):
    """What the picture shows."""

    alone: list[float]
    """Losses of one process."""
    together: list[float]
    """Losses of the four ranks."""
    predicted: Timeline
    """A step, its ranks are stages."""
    found: list[Event]
    """A step as it ran, its ranks are the four."""


def tour() -> Tour:
    """Train as chapter 00 does."""
    changes = {"layers": 4, "hidden": 128, "heads": 4, "seq_length": 64, "micro_batch_size": 8, "global_batch_size": 32}
    config = presets.tiny().override(changes | {"lr": 4e-3, "warmup_steps": STEPS // 4, "steps": STEPS})
    alone = run(pretrain, 1, config, timeout=300.0)[0]
    ranks = run(pretrain, TP * PP, config.override({"tp": TP, "pp": PP}), timeout=300.0)
    third = STEPS // 3
    stages = [ranks[stage * TP].events for stage in range(PP)]
    seen = [event for step in range(third, 2 * third) for event in measured.pipeline_events(stages, step)]
    schedule = one_f_one_b(PP, microbatches(config))
    seconds = [step["timers"]["step"][1] for step in ranks[0].metrics]
    unseen = sorted(range(2 * third, STEPS), key=lambda step: seconds[step])
    found = measured.pipeline_events([rank.events for rank in ranks], unseen[len(unseen) // 2])
    predicted = simulate(schedule, measured.stage_costs(seen, PP))
    return Tour(alone.losses, ranks[0].losses, predicted, found)


def microbatches(config: RunConfig) -> int:
    """Of a step on ranks that have no replicas."""
    return config.train.global_batch_size // config.train.micro_batch_size


def draw(shown: Tour, path: Path) -> None:
    """Write the animation."""
    end = 1e3 * max(shown.predicted.makespan, *(event.end for event in shown.found))
    with styled():
        figure = Figure(figsize=(9.0, 4.6), dpi=100, facecolor="white")
        panels = figure.subplots(2, 1, height_ratios=(1.5, 1.0))

        def frame(number: int) -> list[Any]:
            done = min(1.0, number / GROWING)
            for panel in panels:
                panel.clear()
            draw_step(panels[0], shown, end, done)
            draw_losses(panels[1], shown, done)
            figure.tight_layout()
            return []

        animation = FuncAnimation(figure, frame, frames=GROWING + HELD)
        animation.save(path, writer=PillowWriter(fps=10))


def draw_step(axes: Axes, shown: Tour, end: float, done: float) -> None:
    """The step up to `done` of its time: outlines as predicted for the rank's stage, filled as it ran."""
    now = done * end
    for rank in range(TP * PP):
        for event in shown.predicted.events:
            if event.rank == rank // TP and event.kind in LETTER:
                box = (1e3 * event.start, rank + 0.08), 1e3 * event.duration, 0.36
                axes.add_patch(Rectangle(*box, fill=False, edgecolor=color(event.kind), linewidth=1.2))
    for event in shown.found:
        start, stop = 1e3 * event.start, min(now, 1e3 * event.end)
        if event.kind not in LETTER or start >= now:
            continue
        axes.add_patch(
            Rectangle((start, event.rank + 0.5), stop - start, 0.42, facecolor=color(event.kind), edgecolor="white")
        )
        if stop - start > end / 40:
            name = f"{LETTER[event.kind]}{event.microbatch}"
            axes.text((start + stop) / 2, event.rank + 0.71, name, ha="center", va="center", color="white", fontsize=8)
    axes.axvline(now, color="#333333", linewidth=0.8)
    axes.set(xlim=(0, end * 1.01), ylim=(TP * PP, 0), xlabel="time (ms)")
    axes.set_yticks([rank + 0.5 for rank in range(TP * PP)], [f"rank {r}\nstage {r // TP}" for r in range(TP * PP)])
    axes.set_title(
        "One training step on four processes (TP2 x PP2): outlined = predicted, filled = measured", loc="left"
    )


def draw_losses(axes: Axes, shown: Tour, done: float) -> None:
    """Both losses up to `done` of the run, and at its end how far apart they are."""
    count = max(1, round(done * STEPS))
    steps = range(1, count + 1)
    axes.plot(steps, shown.alone[:count], "o", color=SEQUENCE[1], markersize=6, fillstyle="none", label="one process")
    axes.plot(steps, shown.together[:count], "-", color=SEQUENCE[0], label="four processes")
    span = max(shown.alone) - min(shown.alone)
    axes.set(xlim=(0.5, STEPS + 0.5), ylim=(min(shown.alone) - 0.1 * span, max(shown.alone) + 0.1 * span))
    axes.set(xlabel="optimizer step", ylabel="training loss")
    axes.legend(loc="lower left")
    if done >= 1.0:
        apart = max(abs(a - b) / a for a, b in zip(shown.alone, shown.together, strict=True))
        words = f"the same losses: they differ by at most {apart:.0e} of their value"
        axes.text(STEPS / 2, max(shown.alone), words, fontsize=11, ha="center", va="top")


def main() -> None:
    """Train, draw, and say what was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "tour.gif", help="the file to write")
    path = parser.parse_args().out
    draw(tour(), path)
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
