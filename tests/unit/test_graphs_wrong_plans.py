"""Static inputs that are given back too early on purpose, and the step of a run that shows it."""

import pytest
import torch
from graph_training import GRAPHS, LAYERS, MICROBATCHES, small

from labkit.graphs.buffers import plan_buffers
from labkit.graphs.study.wrong_plans import given_back_as_in_4433, given_back_early, inputs_read
from labkit.train import pretrain
from labkit.train.parity.watched_step import WatchedStep

pytestmark = pytest.mark.usefixtures("one_thread")

FIRST_NORM = "layers.0.attention.norm.weight"


def gradients(step=1, **changes):
    watched = WatchedStep(step)
    pretrain(small(**changes), observer=watched)
    return watched.gradients


def wrong(found, right):
    assert found.keys() == right.keys()
    return {name for name in right if not torch.equal(found[name], right[name])}


def test_as_in_4433_even_one_microbatch_in_flight_reads_its_dy_in_the_place_of_its_input():
    right = gradients()
    assert wrong(gradients(**GRAPHS), right) == set()
    with given_back_as_in_4433():
        found = gradients(**GRAPHS)
    spoilt = wrong(found, right)
    assert FIRST_NORM in spoilt
    assert all(name == FIRST_NORM or name.startswith("embedding") for name in spoilt), "nothing before the first norm"
    assert wrong(gradients(**GRAPHS), right) == set(), "the patch ends with its block"


def test_only_forwards_take_a_buffer_that_is_given_back_early():
    in_turns, forwards_first = {**GRAPHS}, {**GRAPHS, "schedule.name": "gpipe"}
    right = gradients()
    with given_back_early(1):
        assert wrong(gradients(**in_turns), right) == set(), "one forward in flight"
        assert FIRST_NORM in wrong(gradients(**forwards_first), right)
    assert wrong(gradients(**forwards_first), right) == set()


def test_a_backward_reads_the_input_that_was_written_last():
    order = [1, 1, 1, -1, 1, -1, 1, -1, -1, -1]

    def read(early):
        found = inputs_read(plan_buffers(order, 1, early_release=early), order)
        return [found[0, 0, m].microbatch for m in range(5)]

    assert read(0) == [0, 1, 2, 3, 4]
    assert read(1) == [2, 3, 4, 3, 4], "two buffers, and each forward of the steady part takes the next backward's"
    assert read(1000) == [2, 3, 4, 4, 4], "one buffer"


def test_a_watched_step_keeps_the_inputs_of_that_step_alone():
    watched = WatchedStep(1, "attention.norm")
    pretrain(small(), observer=watched)
    assert {name: len(each) for name, each in watched.inputs.items()} == {
        f"layers.{layer}.attention.norm.weight": MICROBATCHES for layer in range(LAYERS)
    }
    first = WatchedStep(0, "attention.norm")
    pretrain(small(), observer=first)
    assert not torch.equal(first.inputs[FIRST_NORM][0], watched.inputs[FIRST_NORM][0])
