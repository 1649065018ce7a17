"""The time line of a layer: every term of the plan once, in an order that a rank can run."""

from __future__ import annotations

from itertools import pairwise

import pytest

from labkit import viz
from labkit.config import RunConfig, presets
from labkit.events import Event
from labkit.plan import is_between, layer_timeline, unhidden
from labkit.plan.layer_times import layer_terms
from labkit.plan.machine import load_machine
from labkit.plan.workload import Workload

LLAMA = presets.get("llama3_8b").override({"parallel.tp": 8, "parallel.pp": 1, "train.micro_batch_size": 4})
WHOLE = 4 * 8192 * 4096 * 2
"""Bytes of one bf16 tensor [s, b, h]."""


def cut(on: bool) -> RunConfig:
    return LLAMA.override({"parallel.sequence_parallel": on})


def parts(events: list[Event]) -> tuple[list[Event], list[Event]]:
    """Kernels and messages."""
    return [e for e in events if e.kind != "collective"], [e for e in events if e.kind == "collective"]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_line_has_all_terms_and_their_time(sequence_parallel: bool) -> None:
    config, machine = cut(sequence_parallel), load_machine("h100")
    terms = layer_terms(Workload(config, 8, software=machine.default_software), machine)
    events = layer_timeline(config, 8)
    kernels, messages = parts(events)
    assert max(event.end for event in events) == pytest.approx(sum(term.seconds for term in terms))
    assert sorted(event.name for event in kernels) == sorted(term.name for term in terms if term.kind != "tp")
    for lane in (kernels, messages):
        assert all(one.end <= other.start + 1e-12 for one, other in pairwise(lane)), "one after another"
    slower = sum(0.3 * dict(term.inputs)["hidden"] for term in terms if term.kind == "tp")
    computing = sum(term.seconds for term in terms if term.kind != "tp")
    assert sum(event.duration for event in kernels) == pytest.approx(computing + slower)


def test_the_messages_are_those_of_the_paper() -> None:
    """arXiv 2205.05198, section 4.2: four all-reduces, or ten halves: 4 + 2 gathers and 4 sums."""
    whole, halves = (parts(layer_timeline(cut(on), 8))[1] for on in (False, True))
    assert [event.name for event in whole] == ["all_reduce"] * 4
    assert [event.name for event in halves].count("all_gather") == 6
    assert [event.name for event in halves].count("reduce_scatter") == 4
    assert {event.bytes for event in (*whole, *halves)} == {WHOLE}


def test_only_kernels_between_the_regions_get_shorter() -> None:
    tensor, sequence = ({e.name: e for e in parts(layer_timeline(cut(on), 8))[0]} for on in (False, True))
    assert {name for name, event in tensor.items() if is_between(event)} == {
        "attention norm", "attention residual", "mlp norm", "mlp residual", "mlp norm, backward",
        "attention norm, backward",
    }  # fmt: skip
    for name, event in tensor.items():
        if is_between(event):
            assert event.duration == pytest.approx(8 * sequence[name].duration)


def waiting(events: list[Event]) -> float:
    return max(event.end for event in events) - sum(event.duration for event in parts(events)[0])


def test_a_switch_that_adds_is_less_than_half_of_why_halves_wait_longer() -> None:
    """Chapter 06, section 9: the larger part is there without it, and halves that nothing hides are two more."""
    whole, ring, halves = layer_timeline(cut(False), 8), layer_timeline(cut(False), 8, nvls=False), cut(True)
    assert layer_timeline(halves, 8) == layer_timeline(halves, 8, nvls=False), "a half gains nothing from it"
    grown, without = (waiting(layer_timeline(halves, 8)) - waiting(line) for line in (whole, ring))
    assert 0.5 < without / grown < 0.65
    assert [len(unhidden(line)) for line in (whole, ring, layer_timeline(halves, 8))] == [2, 2, 6]
    assert layer_timeline(cut(False), 8, "a100") == layer_timeline(cut(False), 8, "a100", nvls=False)


def test_a_layer_without_a_known_order_is_rejected() -> None:
    with pytest.raises(ValueError, match="recomputation"):
        layer_timeline(LLAMA.override({"model.recompute_granularity": "full"}), 8)


def test_the_picture_says_how_long_a_rank_waits() -> None:
    wait = [Event(0, "qkv", "forward", 0.0, 0.002), Event(0, "all_reduce", "collective", 0.002, 0.005, bytes=8)]
    wait.append(Event(0, "qkv, input gradient", "backward", 0.005, 0.006))
    assert viz.layer_timelines({"a layer": wait}).sentence == "a layer: 6.0 ms, of which 3.0 only waiting."


def test_a_message_beside_a_product_is_not_waited_for_and_times_are_counted_from_the_first_start() -> None:
    made = [Event(0, "fc1 input_grad", "input_grad", 7.0, 7.002), Event(0, "all_reduce tp", "collective", 7.002, 7.006)]
    made += [Event(0, "wait", "wait", 7.005, 7.006), Event(0, "fc1 weight_grad", "weight_grad", 7.003, 7.005)]
    made.append(Event(0, "fc2 input_grad", "input_grad", 7.009, 7.01))
    figure = viz.layer_timelines({"recorded": made})
    assert figure.sentence == "recorded: 10.0 ms, of which 2.0 only waiting.", "a gap without a message is no waiting"
