"""Recorded calls, and the pictures of partial graphs."""

from __future__ import annotations

import pytest
import torch

from labkit.graphs.study.call_trace import Call, calls_between
from labkit.viz import PaddingCost, graph_outputs, padding_costs, sequence_diagram, values_at_the_end


class Inner(torch.nn.Module):
    def forward(self, x: float) -> float:
        if x < 0:
            raise RuntimeError("negative")
        return 2 * x


class Outer:
    def __init__(self) -> None:
        self.inner = Inner()

    def run(self, x: float) -> float:
        try:
            return self.step(x)
        except RuntimeError:
            return 0.0

    def step(self, x: float) -> float:
        return self.inner(x)


def test_calls_are_booked_from_the_watched_call_around_them() -> None:
    outer = Outer()
    watched = {"outer": (outer, ["run", "step"]), "inner": (outer.inner, ["forward"])}
    with calls_between(watched) as calls:
        assert outer.run(3.0) == 6.0
    assert calls == [Call("caller", "outer", "run"), Call("outer", "outer", "step"), Call("outer", "inner", "forward")]
    with calls_between(watched) as calls:
        assert outer.run(-1.0) == 0.0
    raised = [Call("inner", "outer", "RuntimeError", True), Call("outer", "outer", "RuntimeError", True)]
    assert calls[3:] == raised
    assert outer.run(3.0) == 6.0 and len(calls) == 5, "outside the block nothing is recorded"


def test_a_watched_object_is_left_as_it_was() -> None:
    outer = Outer()
    with pytest.raises(AttributeError), calls_between({"outer": (outer, ["run", "walk"])}):
        pass
    assert "run" not in vars(outer)


def test_diagram_says_who_was_called_and_who_was_not() -> None:
    capture = [Call("caller", "layer", "forward"), Call("layer", "router", "forward"),
               Call("router", "layer", "Signal", True)]  # fmt: skip
    figure = sequence_diagram(
        {"capture": capture, "replay": [Call("caller", "layer", "forward"), Call("layer", "layer", "route")]},
        ["layer", "router"],
    )
    assert figure.sentence == (
        "capture: 2 calls to layer, router, ended by Signal; replay: 2 calls to layer, none to router."
    )
    names = {text.get_text(): text.get_position()[0] for text in figure.fig.axes[0].texts}
    assert names["forward"] == 0.5, "between two lifelines"
    with pytest.raises(ValueError, match="at least one call"):
        sequence_diagram({"capture": []}, ["layer"])


def test_costs_are_held_against_the_first() -> None:
    free = PaddingCost("no limit", 100, 1000, 50, 0.0)
    padded = PaddingCost("padded", 150, 3000, 25, 0.125)
    figure = padding_costs([free, padded])
    assert figure.sentence == (
        "Against no limit: padded 1.50 times the work, 3.00 the traffic, 0.50 the memory, 12.5% dropped."
    )
    widths = [[bar.get_width() for bar in axes.patches] for axes in figure.fig.axes]
    assert widths == [[1.0, 1.5], [1.0, 3.0], [1.0, 0.5], [0.0, 0.125]], "shares of what the first has"
    assert padding_costs([PaddingCost("no limit", 1, 0, 0, 0.0)]).sentence == "no limit alone."
    with pytest.raises(ValueError, match="at least one way"):
        padding_costs([])
    with pytest.raises(ValueError, match="two ways of one name"):
        padding_costs([free, padded, padded])


STEPS = [("a", ["x"], ["t"]), ("b", ["t"], ["y"]), ("c", ["x"], ["t"]), ("d", ["t", "y"], ["z"])]


def test_a_value_ends_where_its_name_gets_another_one() -> None:
    figure = values_at_the_end(STEPS, 2, ["t"], ["y"])
    assert figure.sentence == "A graph of 2 of 4 steps gives out t; missing y; too much t."
    bars = [(round(bar.get_x(), 2), round(bar.get_width(), 2)) for bar in figure.fig.axes[0].patches]
    # x from the caller to c; t from a to b; y from b to d; t again from c to d; z is the result
    assert bars == [(-0.95, 3.9), (0.05, 1.9), (1.05, 2.9), (2.05, 1.9), (3.05, 1.5)]
    dashed = [bar.get_linestyle() == "--" for bar in figure.fig.axes[0].patches]
    assert dashed == [False, False, True, False, False], "y is missing"
    assert values_at_the_end(STEPS, 2, ["y"], ["y"]).sentence == "A graph of 2 of 4 steps gives out y."


def test_a_bar_has_a_part_for_each_value_that_comes_out():
    figure = graph_outputs({"norm": {"x": 2.0, "hidden": 2.0}, "sort": {"x": 2.0, "rows": 12.0, "counts": 0.01}}, "MB")
    (axes,) = figure.fig.axes
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([2, 2, 2, 12, 0.01])
    assert axes.patches[0].get_facecolor() == axes.patches[2].get_facecolor() != axes.patches[1].get_facecolor()
    assert [text.get_text() for text in figure.fig.legends[0].get_texts()] == ["x", "hidden", "rows"]
    assert figure.sentence == "A graph hands out, in MB: after norm 4.0 (x, hidden); after sort 14.0 (x, rows, counts)."
    with pytest.raises(ValueError, match="at least one step"):
        graph_outputs({}, "MB")
