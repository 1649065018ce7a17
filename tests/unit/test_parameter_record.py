"""One record per parameter: its defaults, the marks of Megatron's modules, and the first gradient of a step."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.comm.groups import single_process_groups
from labkit.parallel.data_parallel.naive import NaiveDataParallel
from labkit.parallel.parameters import parameter_record
from labkit.parallel.parameters.parameter_record import (
    ParameterRecord,
    add_gradient,
    adopt_marks,
    main_grad_of,
    record_of,
    weight_gradient,
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


class Written(TorchDispatchMode):
    """Every operation that is no view, and the tensor that it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.is_view is False:
            self.found.append((str(func), made))
        return made


@pytest.mark.parametrize(("replace", "gemm"), [(True, "aten.mm.dtype_out"), (False, "aten.addmm.dtype_out")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gpu_adds_16_bit_products_to_main_grad_in_one_gemm(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, replace: bool, gemm: str
) -> None:
    """On tensors without memory; `tests/gpu/test_precision_gpu.py` has the numbers."""
    monkeypatch.setattr(parameter_record, "_adds_in_fp32", lambda device: True)
    main_grad = torch.empty(3 * 64 * 32, device="meta")[64 * 32 : 2 * 64 * 32].view(64, 32)
    grad_NO, x_NI = torch.empty(16, 64, dtype=dtype, device="meta"), torch.empty(16, 32, dtype=dtype, device="meta")
    with Written() as seen:
        assert weight_gradient(grad_NO, x_NI, main_grad, replace=replace) is None
    [(name, written)] = seen.found
    assert name == gemm and written is main_grad


def test_a_cpu_rounds_a_16_bit_product_before_it_adds() -> None:
    generator = torch.Generator().manual_seed(1)
    grad_NO, x_NI = (torch.randn(16, size, generator=generator).bfloat16() for size in (64, 32))
    main_grad = torch.full((64, 32), torch.nan)
    weight_gradient(grad_NO, x_NI, main_grad, replace=True)
    assert torch.equal(main_grad, main_grad.bfloat16().float())
    product = grad_NO.double().t() @ x_NI.double()
    torch.testing.assert_close(main_grad.double(), product, rtol=2**-8, atol=2**-16)
    weight_gradient(grad_NO, x_NI, main_grad)
    torch.testing.assert_close(main_grad.double(), 2 * product, rtol=2**-8, atol=2**-15)


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
