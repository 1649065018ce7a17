"""Curves of runs from their folders: the drawn numbers are those of the files; a live run ends the watch."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import IPython.display
import pytest
from run_files import append, begun, finished

from labkit.viz import Figure, training_curves, watch_runs


def record(step: int, loss: float) -> dict[str, float]:
    return {"step": step, "loss": loss, "grad_norm": 1 / step, "learning_rate": 1e-3, "tokens_per_second": 50.0}


def records(*losses: float) -> list[dict[str, float]]:
    return [record(step, loss) for step, loss in enumerate(losses, start=1)]


def test_each_panel_has_a_line_a_run_with_the_numbers_of_its_file(tmp_path: Path) -> None:
    losses = {"first": [6.0, 5.0, 4.0], "second": [6.5, math.nan, 3.0, 2.0]}
    for name, values in losses.items():
        finished(tmp_path / name, *records(*values), {"step": len(values), "validation_loss": 3.25})
    figure = training_curves(tmp_path)
    panels = {axes.get_title(loc="left"): axes for axes in figure.fig.axes}
    assert list(panels) == ["training loss, nats per token", "learning rate", "gradient norm", "tokens per second"]
    for title, axes in panels.items():
        lines = {str(line.get_label()): line for line in axes.get_lines()}
        for name, values in losses.items():
            steps = range(1, len(values) + 1)
            of_title = {"training loss, nats per token": values, "gradient norm": [1 / step for step in steps]}
            drawn = list(lines[name].get_xdata()), list(lines[name].get_ydata())
            usual = [1e-3 if title == "learning rate" else 50.0] * len(values)
            assert drawn[0] == list(steps) and drawn[1] == pytest.approx(of_title.get(title, usual), nan_ok=True)
        assert set(lines) - set(losses) == ({"first, validation", "second, validation"} if "loss" in title else set())
    assert [text.get_text() for text in figure.fig.legends[0].get_texts()][::2] == ["first", "second"]
    assert figure.sentence == (
        "Training loss by step: first (finished, step 3 of 3) 6.00 to 4.00, validation 3.25; "
        "second (finished, step 4 of 4) 6.50 to 2.00, validation 3.25."
    )
    assert figure.png.startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one run"):
        training_curves()
    with pytest.raises(ValueError, match=r"gone: no such folder; give the train\.output_dir"):
        training_curves(tmp_path / "gone")
    run = begun(tmp_path / "new")
    with pytest.raises(ValueError, match="new: no line of a training step yet"):
        training_curves(tmp_path / "new")
    append(tmp_path / "new", {"step": 1, "loss": 3.0})
    assert len(training_curves(tmp_path / "new").fig.axes) == 1, "no panel without numbers"
    run.release()


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Figure]]:
    """What a notebook would display, and update in place."""
    found: list[tuple[str, Figure]] = []

    def display(figure: Figure, **_: Any) -> Any:
        found.append(("display", figure))
        return SimpleNamespace(update=lambda figure: found.append(("update", figure)))

    monkeypatch.setattr(IPython.display, "display", display)
    return found


@pytest.mark.parametrize("person", [True, False])
def test_a_live_run_is_watched_to_its_end(
    tmp_path: Path, shown: list[tuple[str, Figure]], monkeypatch: pytest.MonkeyPatch, person: bool
) -> None:
    """A person sees the figure change in place; a notebook that is only executed has one figure, the last."""
    monkeypatch.setenv("JPY_SESSION_NAME", "a.ipynb" if person else "")

    def train() -> None:
        run = begun(tmp_path / "run", record(1, 6.0), steps=2)
        while person and not shown:
            time.sleep(0.01)
        append(tmp_path / "run", record(2, 5.0))
        run.finish()

    thread = threading.Thread(target=train)
    thread.start()
    assert watch_runs(tmp_path / "run", seconds=60, interval=0.01) is None
    thread.join()
    kinds = [kind for kind, _ in shown]
    assert kinds[0] == "display" and set(kinds[1:]) == ({"update"} if person else set())
    assert shown[-1][1].sentence == "Training loss by step: run (finished, step 2 of 2) 6.00 to 5.00."
    if person:
        assert "(running, step 1 of 2)" in shown[0][1].sentence


def test_the_watch_ends_before_the_run_after_its_seconds(tmp_path: Path, shown: list[tuple[str, Figure]]) -> None:
    run = begun(tmp_path / "run", record(1, 6.0), steps=2)
    watch_runs(tmp_path / "run", seconds=0.0)
    assert [figure.sentence for _, figure in shown] == [
        "Training loss by step: run (running, step 1 of 2) 6.00 to 6.00."
    ]
    run.release()
    with pytest.raises(ValueError, match="no such folder"):
        watch_runs(tmp_path / "gone", seconds=0.0)


def test_outside_a_notebook_the_sentence_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished(tmp_path / "run", *records(6.0, 5.0))
    watch_runs(tmp_path / "run", seconds=5.0)
    assert capsys.readouterr().out.startswith("Training loss by step: run (finished, step 2 of 2)")
