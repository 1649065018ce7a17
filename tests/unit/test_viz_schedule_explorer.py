"""The schedule explorer: a figure where nobody sits, controls where somebody does, axes that stay."""

from __future__ import annotations

from typing import Any

import pytest

from labkit.viz import explore_schedule
from labkit.viz.figure import Figure
from labkit.viz.pipeline import schedule_explorer


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JPY_SESSION_NAME", "chapter.ipynb")


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """(time, memory) where the axes of each picture end, as they are drawn."""
    found: list[tuple[float, float]] = []
    draw = schedule_explorer.gantt

    def drawn(*args: Any, **kwargs: Any) -> Figure:
        figure = draw(*args, **kwargs)
        rows, memory = figure.fig.axes[:2]
        found.append((rows.get_xlim()[1], memory.get_ylim()[1]))
        return figure

    monkeypatch.setattr(schedule_explorer, "gantt", drawn)
    return found


def controls(box: Any) -> tuple[Any, Any, dict[str, Any]]:
    """(words, picture, control by description) of the explorer."""
    picture, words, rows = box.children
    return words, picture, {control.description: control for column in rows.children for control in column.children}


def test_a_figure_where_nobody_sits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    figure = explore_schedule(builder="gpipe", pp=2, microbatches=3, forward=2, input_grad=1, weight_grad=0.5)
    # (m + p - 1)(F + B) = 4 x 3.5, of which (p - 1)/(m + p - 1) is bubble; GPipe keeps all m
    assert figure.sentence.startswith("GPipe, 2 stages, 3 microbatches: bubble 25.0%, peak 3 in flight")
    assert figure.sentence.endswith("14 units of time")


@pytest.mark.usefixtures("live")
def test_axes_stay_while_the_controls_move_and_double_where_they_must(limits: list[tuple[float, float]]) -> None:
    words, picture, inputs = controls(explore_schedule(builder="gpipe", pp=4, microbatches=4))
    before = picture.value
    assert limits == [(1.5 * 7 * 3, 4.5)]
    inputs["microbatches"].value = 5
    assert "peak 5 in flight, 24 units of time" in words.value and picture.value != before
    inputs["microbatches"].value = 2
    inputs["builder"].value = "1f1b"
    assert "peak 2 in flight, 15 units of time" in words.value
    # 5 in flight did not fit into 4, hence 8; the time of (5 + 3) x 3 = 24 did, and nothing shrinks again
    assert limits[1:] == [(31.5, 8.5)] * 3
    inputs["fit axes"].click()
    assert limits[-1] == (15, 2.5)


@pytest.mark.usefixtures("live")
def test_several_stages_a_rank_share_the_same_work(limits: list[tuple[float, float]]) -> None:
    words, _, inputs = controls(explore_schedule(builder="1f1b", pp=4, microbatches=8))
    inputs["vpp"].value = 2
    assert "peak 4 in flight, 33 units of time" in words.value  # 1F1B has one stage a rank, whatever vpp says
    inputs["builder"].value = "interleaved"
    # m(F + B) + (p - 1)(F + B)/v = 24 + 4.5; 2(p - 1) + (v - 1)p + 1 = 11 halves in flight
    assert "peak 5.5 in flight, 28.5 units of time" in words.value
    assert limits[-1] == limits[0]


@pytest.mark.usefixtures("live")
def test_a_refusal_leaves_the_last_picture() -> None:
    words, picture, inputs = controls(explore_schedule(builder="1f1b", pp=4, microbatches=4))
    inputs["microbatches"].value = 5
    kept, spoken = picture.value, words.value
    inputs["builder"].value = "dualpipe_v"  # which needs 2p microbatches
    assert words.value.startswith("<b>") and "8" in words.value and "last settings that fit" in words.value
    assert picture.value == kept and picture.layout.visibility in (None, "visible") and words.value.endswith(spoken)
    inputs["fit axes"].click()
    assert words.value.startswith("<b>") and picture.value == kept
    inputs["microbatches"].value = 8
    assert not words.value.startswith("<b>") and picture.value != kept


@pytest.mark.usefixtures("live")
def test_what_a_builder_does_not_ask_for_is_grey() -> None:
    _, _, inputs = controls(explore_schedule(builder="1f1b"))
    assert inputs["vpp"].disabled and inputs["group_size"].disabled and not inputs["pp"].disabled
    inputs["builder"].value = "interleaved"
    assert not inputs["vpp"].disabled and not inputs["group_size"].disabled


def test_an_unknown_builder_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'1f1c'"):
        explore_schedule(builder="1f1c")
