"""Curves of training runs from the files in their folders: loss, learning rate, gradient norm and tokens per second.

The figures read metrics.jsonl as `labkit watch` does, so a run may still be writing it, or may have been resumed.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from typing import Any

from matplotlib.ticker import MaxNLocator

from labkit.train.reporting.run_records import RunRecords, names_of, pause, runs_in
from labkit.viz.figure import Figure
from labkit.viz.live import is_live
from labkit.viz.style import LINES, new_figure, nth_color, styled

_PANELS = {
    "loss": "training loss, nats per token",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens per second",
}
"""Name in metrics.jsonl -> title of its panel."""
_START = 30.0
"""Seconds that `watch_runs` waits for a folder to appear, because a run that was just launched needs some time."""


def training_curves(*folders: str | os.PathLike[str]) -> Figure:
    """Draw training loss, learning rate, gradient norm and tokens per second by step, one line per run in each panel.

    Circles in the first panel are validation losses. A line has a gap where a number was not finite.

    folders: folders of runs (`train.output_dir`), or folders whose subfolders are folders of runs.

    Raises ValueError for a folder without a run, and if no run has written a line yet.
    """
    found, problems = runs_in(folders)
    if problems or not found:
        raise ValueError("; ".join(problems) or "training_curves needs the folder of at least one run")
    runs = [RunRecords(folder) for folder in found]
    for run in runs:
        run.refresh()
    return _figure(runs)


def watch_runs(*folders: str | os.PathLike[str], seconds: float = 300.0, interval: float = 2.0) -> None:
    """Show `training_curves` of live runs until all are over, drawn again in place when a run has new lines.

    A notebook without a person in front of it (papermill, nbval) gets one figure, at the end.

    seconds: the longest time to watch; the runs go on without it.
    interval: seconds between two looks into the folders.

    Raises ValueError if a folder has no run after half a minute, or if no run has a line at the end.
    """
    from IPython.display import display

    start = time.monotonic()
    runs = _begun(folders, start + min(seconds, _START), interval)
    handle: Any = None
    while True:
        changed = [run for run in runs if run.refresh()]
        ended = all(run.over for run in runs) or time.monotonic() - start >= seconds
        if ended or (changed and is_live() and any(run.series for run in runs)):
            figure = _figure(runs)
            if handle is None:
                handle = display(figure, display_id=True)
            else:
                handle.update(figure)
        if ended:
            return
        pause(min(interval, start + seconds - time.monotonic()))


def _begun(folders: Sequence[str | os.PathLike[str]], deadline: float, interval: float) -> list[RunRecords]:
    """Return the runs once every folder has one. Raises ValueError after the deadline (`time.monotonic`)."""
    while True:
        found, problems = runs_in(folders)
        if found and not problems:
            return [RunRecords(folder) for folder in found]
        if time.monotonic() >= deadline:
            raise ValueError("; ".join(problems) or "watch_runs needs the folder of at least one run")
        time.sleep(min(interval, 0.5))


# ---- the picture ----


def _figure(runs: Sequence[RunRecords]) -> Figure:
    names = names_of([run.folder for run in runs])
    shown = [panel for panel in _PANELS if any(run.series.get(panel) for run in runs)]
    if "loss" not in shown:
        raise ValueError(f"{', '.join(names)}: no line of a training step yet; look again when the first step is done")
    with styled():
        fig = new_figure(7.6, 2.4 * math.ceil(len(shown) / 2) + 0.4)
        grid = fig.subplots(math.ceil(len(shown) / 2), 2, squeeze=False).ravel()
        for axes, panel in zip(grid, shown):
            _draw(axes, panel, runs, names)
        for axes in grid[len(shown) :]:
            axes.remove()
        handles, labels = grid[0].get_legend_handles_labels()
        fig.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))
    return Figure(fig, _sentence(runs, names))


def _draw(axes: Any, panel: str, runs: Sequence[RunRecords], names: Sequence[str]) -> None:
    """Draw one panel; the first also has the validation losses."""
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        style = {"color": nth_color(number), "ls": LINES[number % len(LINES)]}
        points = run.series.get(panel, [])
        axes.plot([s for s, _ in points], [v for _, v in points], lw=1.4, label=name,
                  marker="." if len(points) == 1 else None, **style)  # fmt: skip
        checks = run.series.get("validation_loss", []) if panel == "loss" else []
        if checks:
            axes.plot([s for s, _ in checks], [v for _, v in checks], "o", ms=4, mfc="white", color=style["color"],
                      label=f"{name}, validation")  # fmt: skip
    axes.set_title(_PANELS[panel], loc="left")
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.grid(axis="y")
    axes.margins(x=0.02)
    if panel == "tokens_per_second":
        axes.set_ylim(bottom=0)  # this is a rate, and noise should not fill the panel


def _sentence(runs: Sequence[RunRecords], names: Sequence[str]) -> str:
    return f"Training loss by step: {'; '.join(map(_words, runs, names))}."


def _words(run: RunRecords, name: str) -> str:
    """Return words such as `first (finished, step 30 of 30) 6.93 to 5.21, validation 5.30`."""
    values, losses = run.values(), [loss for _, loss in run.series.get("loss", [])]
    if not losses:
        return f"{name} ({run.state}, no step yet)"
    total = f" of {values['steps']}" if "steps" in values else ""
    said = f"{name} ({run.state}, step {values['step']}{total}) {losses[0]:.2f} to {losses[-1]:.2f}"
    return said + (f", validation {values['validation_loss']:.2f}" if "validation_loss" in values else "")
