"""One record per parameter: its defaults, the marks of Megatron's modules, and the first gradient of a step."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from labkit.parallel.data_parallel.naive import NaiveDataParallel
from labkit.parallel.groups import single_process_groups
from labkit.parallel.parameters.parameter_record import (
    ParameterRecord,
    add_gradient,
    adopt_marks,
    main_grad_of,
    record_of,
)
from labkit.parallel.parameters.weights import make_parameter


def test_the_first_question_makes_the_record_and_changes_nothing_else() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    assert record_of(parameter) is record_of(parameter) and record_of(parameter) == ParameterRecord()
    assert list(vars(parameter)) == ["record"]


def test_a_made_parameter_knows_its_part_of_the_model() -> None:
    parameter = make_parameter("layers.0.norm.weight", (4,), fill=1.0)
    assert parameter.full_name == "layers.0.norm.weight"  # type: ignore[attr-defined]
    assert record_of(parameter) == ParameterRecord(full_shape=(4,))


def test_the_first_gradient_of_a_step_is_written_and_the_next_is_added() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.main_grad = torch.full((3,), torch.nan)  # type: ignore[attr-defined]
    record_of(parameter).has_gradient = False
    for number in (1.0, 2.0):
        add_gradient(parameter, torch.ones(3))
        assert record_of(parameter).has_gradient and main_grad_of(parameter).tolist() == [number] * 3


def test_a_gradient_without_a_wrapper_is_named() -> None:
    parameter = make_parameter("final_norm.weight", (4,), fill=1.0)
    with pytest.raises(AssertionError, match=r"final_norm\.weight has no main_grad: wrap the model first"):
        add_gradient(parameter, torch.ones(4))


def test_marks_of_a_module_written_for_megatron_are_taken_over() -> None:
    module = nn.Linear(3, 3)
    module.weight.allreduce, module.bias.sequence_parallel = False, True  # type: ignore[attr-defined]
    alone = single_process_groups()
    NaiveDataParallel(module, alone.dp_cp, alone.edp)
    assert record_of(module.weight) == ParameterRecord(allreduce=False)
    assert record_of(module.bias) == ParameterRecord(sequence_parallel=True)
    other = nn.Parameter(torch.zeros(2))
    other.partition_dim, other.unknown = 1, True  # type: ignore[attr-defined]
    adopt_marks(other)
    assert record_of(other) == ParameterRecord(partition_dim=1)


def test_a_file_keeps_a_parameters_part_of_the_model_and_no_hook() -> None:
    """`torch.load` with its defaults takes the record; the wrapper that hangs on a hook stays out of the file."""
    parameter = make_parameter("layers.0.norm.weight", (4,), fill=1.0)
    record_of(parameter).on_gradient = lambda gradient: None  # a function that cannot be pickled
    record_of(parameter).allreduce = False
    stored = io.BytesIO()
    torch.save({"p": parameter}, stored)
    stored.seek(0)
    assert record_of(torch.load(stored)["p"]) == ParameterRecord(full_shape=(4,), allreduce=False)
