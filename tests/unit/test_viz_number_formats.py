"""Figures of number formats: the round of a step, gradients that a format loses, and tensors over its numbers."""

import pytest

from labkit.viz import gradient_range, number_rulers, precision_flow
from labkit.viz.number_formats import PLACES


def test_the_round_says_which_tensors_have_how_many_bits():
    types = dict.fromkeys(PLACES, "bf16") | {"main weight": "fp32", "loss": "fp32"}
    assert precision_flow(types).sentence.endswith("; 32 bits: loss, main weight.")
    with pytest.raises(ValueError, match="the round has weight"):
        precision_flow({"weight": "bf16"})
    with pytest.raises(ValueError, match="fp8 does not end in"):
        precision_flow(types | {"weight": "fp8"})


def test_the_share_of_lost_gradients_leaves_zeros_out():
    figure = gradient_range({"scale 1": [0.0, 1e-9, 1e-3, 0.5]}, {"scale 1": [1]})
    assert figure.sentence == "Gradients other than 0 in fp16: scale 1 33% lost."
    with pytest.raises(ValueError, match="other titles"):
        gradient_range({"a": [1.0]}, {"b": []})
    with pytest.raises(ValueError, match="other than 0"):
        gradient_range({"a": [0.0]}, {"a": []})


def test_rulers_say_where_tensors_and_numbers_end_and_leave_zeros_out():
    figure = number_rulers({"x": [0.0, 0.3, -6.0]}, {"e": [-1.0, 0.0, 0.5, 2.0]})
    assert figure.sentence == "x from 2^-2 to 2^3; e has 2 numbers from 2^-1 to 2^1."
    for tensors, formats in (({"x": [0.0]}, {"e": [1.0]}), ({}, {"e": [1.0]}), ({"x": [1.0]}, {})):
        with pytest.raises(ValueError, match="other than 0"):
            number_rulers(tensors, formats)
