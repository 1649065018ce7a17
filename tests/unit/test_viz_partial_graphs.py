"""Recorded calls, and the pictures of partial graphs."""

from __future__ import annotations

import pytest
import torch

from labkit.graphs.study.call_trace import Call, calls_between
from labkit.viz import PaddingCost, padding_costs, sequence_diagram


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
    free = PaddingCost("no limit", 100, 1000, {"graphs": 10, "experts": 40}, 0.0, 3.0)
    padded = PaddingCost("padded", 150, 3000, {"graphs": 25, "experts": 0}, 0.125, 3.5)
    assert padding_costs([free, padded]).sentence == (
        "Against no limit (loss 3.000): padded 1.50 times the FLOPs, 3.00 the traffic, 0.50 the memory, 12.5% dropped, "
        "loss 3.500."
    )
    figure = padding_costs([free, padded])
    assert [text.get_text() for text in figure.fig.legends[0].get_texts()] == ["graphs", "experts"]
    bars = [(bar.get_x(), round(bar.get_width(), 3)) for bar in figure.fig.axes[2].patches]
    assert bars == [(0.0, 0.2), (0.2, 0.8), (0.0, 0.5), (0.5, 0.0)], "parts, as shares of all that the first holds"
    assert padding_costs([PaddingCost("no limit", 1, 0, {"rows": 1}, 0.0)]).sentence == "no limit alone."
    with pytest.raises(ValueError, match="at least one way"):
        padding_costs([])
    with pytest.raises(ValueError, match="two ways of one name"):
        padding_costs([free, padded, padded])
