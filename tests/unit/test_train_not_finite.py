"""Which loss, weight or gradient is not finite, in which order, and in which words."""

import math

import pytest
import torch
from torch import nn

from labkit.config import ParallelConfig
from labkit.parallel import NaiveDataParallel, initialize_model_parallel, single_process_groups
from labkit.train.not_finite import Finding, coordinates, find, sentence


def chunks(count: int = 2) -> list[NaiveDataParallel]:
    groups = single_process_groups()
    return [NaiveDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), groups.dp_cp) for _ in range(count)]


def names(found: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.kind, finding.name) for finding in found]


def test_causes_come_first_and_gradients_from_the_loss_back():
    first, second = chunks()
    first.module[0].bias.main_grad[1] = math.nan
    second.module[0].weight.main_grad[0, 0] = math.inf
    second.module[1].bias.main_grad[:] = math.nan
    groups = single_process_groups()
    found = find([{"loss_sum": 1.0}], [first, second], [0, 1], groups)
    assert names(found) == [("gradient", "1.bias"), ("gradient", "0.weight"), ("gradient", "0.bias")]
    assert names(find([], [first, second], [1, 0], groups))[0] == ("gradient", "0.bias"), "by stage, not by chunk"
    first.module[1].weight.data[0, 0] = math.nan
    found = find([{"loss_sum": 1.0}, {"loss_sum": torch.tensor(math.inf)}], [first, second], [0, 1], groups)
    assert names(found)[:2] == [("parameter", "1.weight"), ("loss", "microbatch 1")]
    assert sentence(found) == "parameter 1.weight is not finite on rank 0 (alone): 1 NaN of 4"
    assert not find([], [second], [1], groups, gradients=False)


def test_a_weight_of_two_chunks_is_named_once():
    first, second = chunks()
    second.module[0].weight = first.module[0].weight
    first.module[0].weight.main_grad[0, 0] = math.nan
    assert len(find([], [first, second], [0, 1], single_process_groups())) == 1


def finding(name: str, rank: int, received: bool = False) -> Finding:
    return Finding("gradient", name, "1 NaN of 2", rank, f"dp {rank}", (0, 0), received)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([], "a sum over finite gradients overflowed"),
        ([finding("a", 1)], "the gradient of a is not finite on rank 1 (dp 1): 1 NaN of 2"),
        (
            [finding("a", 1), finding("b", 1), finding("a", 0, received=True)],
            "the gradient of a is not finite on rank 1 (dp 1): 1 NaN of 2; also b on rank 1",
        ),
        (
            [finding(name, 0) for name in "abcde"],
            "the gradient of a is not finite on rank 0 (dp 0): 1 NaN of 2; also b on rank 0, c on rank 0 and 2 more",
        ),
    ],
)
def test_the_sentence_names_the_origin_and_counts_the_rest(found: list[Finding], expected: str):
    assert sentence(found) == expected


def test_values_are_counted_by_what_they_are():
    (chunk,) = chunks(1)
    chunk.module[0].weight.main_grad.view(-1)[:3] = torch.tensor([math.nan, math.inf, -math.inf])
    (found,) = find([], [chunk], [0], single_process_groups())
    assert found.values == "1 NaN and 2 infinite of 4"


def test_coordinates_name_the_axes_that_are_in_use():
    groups = initialize_model_parallel(ParallelConfig(tp=2, pp=2), rank=5, world_size=8)
    assert coordinates(groups) == "tp 1, dp 0, pp 1"
    assert coordinates(single_process_groups()) == "alone"


def test_only_ranks_whose_own_gradient_was_bad_are_the_origin():
    """The wrapper of a rank that merely received a NaN says so; one that never looked is believed to be the origin."""
    (chunk,) = chunks(1)
    chunk.module[0].weight.main_grad[0, 0] = math.nan
    groups = single_process_groups()
    assert not find([], [chunk], [0], groups)[0].received
    for spoiled, received in (([], True), (list(chunk.module.parameters()), False)):
        chunk.spoiled_before_reduction = lambda spoiled=spoiled: spoiled
        assert find([], [chunk], [0], groups)[0].received is received


def test_the_command_line_counts_skipped_steps():
    from labkit.cli.train_command import Trained, final_lines
    from labkit.config import presets

    lines = [
        {"step": 1, "loss_scale": 2.0, "skipped_steps": 1, "skipped_because": "the gradient of a is not finite"},
        {"step": 2, "loss_scale": 1.0, "skipped_steps": 1},
        {"step": 2, "validation_loss": 4.0},
    ]
    said = final_lines(Trained([5.0, 4.5], lines), presets.tiny())
    assert said[1] == "skipped 1 step without changing a weight, the last because the gradient of a is not finite"
    assert len(final_lines(Trained([5.0], [lines[1] | {"skipped_steps": 0}]), presets.tiny())) == 1
