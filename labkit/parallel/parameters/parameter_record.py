"""One record per parameter: its part of the whole model, and how its gradients arrive.

`record_of(parameter)` returns the record; its first call makes the record. Two attributes stay on the parameter itself,
because code outside labkit reads them there. `full_name` is the name of the parameter in every layout. `main_grad` is
the tensor where backwards add up; Transformer Engine and Megatron's optimizers read `weight.main_grad`.

`DistributedDataParallel` does not zero its buffers at the start of a step. The first gradient of a step overwrites the
old contents, and later gradients are added; `add_gradient` does both. `NaiveDataParallel` zeroes its buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class Replicated:
    """Rows along dimension 0 that neighbouring ranks of a tensor-parallel group hold alike: there are fewer key/value
    heads than ranks.

    The full tensor is a row of blocks, and `ranks` neighbours share a block. Each neighbour has the last `rows` of the
    block at the end of its part; the other rows are cut. With two query heads and one key/value head over two ranks:

        full   q0 q1 k v        rank 0   q0 k v        rank 1   q1 k v

    A rank's gradient of the replicated rows comes from its own query heads alone. `finalize_model_grads` adds these
    gradients up.
    """

    ranks: int
    """Neighbours that share a block: 2 or more, a divisor of the group's size."""
    rows: int
    """Replicated rows at the end of each neighbour's part."""


@dataclass(slots=True)
class ParameterRecord:
    """Everything that labkit knows of a parameter besides its values. The defaults fit a parameter of a user's own
    module, which every rank holds whole."""

    # ---- its part of the model: written where the parameter is made, read by checkpoints, norms and parity ----
    full_shape: tuple[int, ...] = ()
    """Shape in one process, without padding."""
    tensor_model_parallel: bool = False
    """The ranks of a tensor-parallel group hold different parts. This name and the next two are Megatron's."""
    partition_dim: int = -1
    """The dimension that is cut; -1 for none."""
    partition_stride: int = 1
    """Number of stacked blocks, each split separately (2 for SwiGLU's [gate; up])."""
    replicated: Replicated | None = None
    """The rows of the part that neighbouring ranks hold alike."""
    expert_parallel: bool = False
    """Dimension 0 counts experts, and the ranks of `ep` hold different experts. `partition_dim` and `partition_stride`
    then describe the cut of each expert over `etp`, counted in the stacked tensor."""

    # ---- which ranks' gradients belong together: written by the module that holds it, read by `gradients` ----
    allreduce: bool = True
    """False for experts (Megatron's name): their gradients are reduced over `edp` instead of `dp_cp`."""
    sequence_parallel: bool = False
    """The gradient is a partial sum over the tensor-parallel group: norms and biases see a part of the sequence."""
    shared: bool = False
    """A second copy of a tied weight; gradient norms and checkpoints leave it out."""
    shared_embedding: bool = False
    """A copy of a word embedding that several stages hold; the copies' gradients are added."""
    copied_over: str = ""
    """Group that adds up the gradients of other copies: `pos_embd` for positions, `pp_half` for relative biases."""

    # ---- how a gradient reaches `main_grad`: written by the data-parallel wrapper, during a capture by graphs ----
    has_gradient: bool = True
    """`main_grad` holds gradients of this step. The wrapper sets False at the start of a step. `add_gradient`, or a
    layer that multiplies straight into `main_grad`, sets True with the first gradient."""
    added_elsewhere: bool = False
    """An engine's layer or a captured graph always adds to `main_grad` and never reads `has_gradient`. The wrapper then
    zeroes `main_grad` at the start of a step."""
    on_gradient: Callable[[Tensor], None] | None = None
    """The wrapper's hook. Code that adds to `main_grad` outside autograd calls the hook with the parameter."""
    hook_handle: RemovableHandle | None = None
    """Handle that removes the wrapper's hook from the parameter."""
    main_grad_shard: Tensor | None = None
    """This rank's part of the reduced gradient, for a parameter with copies under the distributed optimizer."""

    @property
    def has_copies(self) -> bool:
        """Other pipeline stages hold the same parameter."""
        return self.shared_embedding or bool(self.copied_over)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields of the model without the wrapper's fields, such as hooks."""
        kept = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _OF_THE_WRAPPER}
        return ParameterRecord, tuple(kept.values())


_OF_THE_WRAPPER = ("has_gradient", "added_elsewhere", "on_gradient", "hook_handle", "main_grad_shard")
torch.serialization.add_safe_globals([ParameterRecord, Replicated])


def record_of(parameter: Tensor) -> ParameterRecord:
    """Return the record of a parameter."""
    try:
        return parameter.record  # pyright: ignore[reportAttributeAccessIssue]
    except AttributeError:
        made = parameter.record = ParameterRecord()  # pyright: ignore[reportAttributeAccessIssue]
        return made


def name_of(parameter: Tensor, otherwise: str = "a parameter") -> str:
    """Return the parameter's name in the whole model, or `otherwise` for a parameter that labkit did not make."""
    return getattr(parameter, "full_name", otherwise)


MEGATRON_MARKS = (
    "allreduce",
    "sequence_parallel",
    "shared",
    "shared_embedding",
    "tensor_model_parallel",
    "partition_dim",
    "partition_stride",
)
"""Attributes that Megatron's modules set on their parameters."""


def adopt_marks(parameter: nn.Parameter) -> None:
    """Copy `MEGATRON_MARKS` that a user's module set as attributes of the parameter. Data-parallel wrappers call
    this."""
    set_there: dict[str, Any] = vars(parameter)
    for mark in MEGATRON_MARKS:
        if mark in set_there:
            setattr(record_of(parameter), mark, set_there[mark])


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Put a gradient into `parameter.main_grad`: the first of a step overwrites, later gradients are added."""
    record = record_of(parameter)
    put_gradient(gradient, main_grad_of(parameter), replace=not record.has_gradient)
    record.has_gradient = True


def put_gradient(gradient: Tensor, main_grad: Tensor, *, replace: bool) -> None:
    """Add a gradient to `main_grad`, or with `replace` overwrite `main_grad`."""
    if replace:
        main_grad.copy_(gradient)
    else:
        main_grad.add_(gradient)


@cache
def _adds_in_fp32(device: torch.device) -> bool:
    """Return True if GEMMs of the device read 16-bit operands and add in fp32, as torch has them from Ampere on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def weight_gradient(
    grad_NO: Tensor, x_NI: Tensor, main_grad: Tensor | None = None, *, replace: bool = False
) -> Tensor | None:
    """Return dL/dW = grad^T x, [O, I]. With `main_grad` add the product there, or with `replace` write it there, and
    return None.

    The GEMM itself adds, so no gradient tensor is made, and an fp32 `main_grad` takes products of 16-bit operands
    unrounded. Without a GEMM of two types, as on a CPU, the product is made in 16 bits first.
    """
    if main_grad is None:
        return grad_NO.t() @ x_NI
    if main_grad.dtype == x_NI.dtype:
        if replace:
            torch.mm(grad_NO.t(), x_NI, out=main_grad)
        else:
            main_grad.addmm_(grad_NO.t(), x_NI)
    elif main_grad.dtype == torch.float32 and x_NI.dtype.itemsize == 2 and _adds_in_fp32(x_NI.device):
        if replace:
            torch.mm(grad_NO.t(), x_NI, out_dtype=torch.float32, out=main_grad)
        else:
            torch.addmm(main_grad, grad_NO.t(), x_NI, out_dtype=torch.float32, out=main_grad)
    else:
        put_gradient(grad_NO.t() @ x_NI, main_grad, replace=replace)
    return None


def call_on_gradient(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
    """Register `hook` for every gradient of the parameter, in place of an earlier wrapper's hook."""
    record = record_of(parameter)
    if record.hook_handle is not None:
        record.hook_handle.remove()
    record.hook_handle, record.on_gradient = parameter.register_post_accumulate_grad_hook(hook), hook


def main_grad_of(parameter: Tensor) -> Tensor:
    """Return the gradient for the optimizer, made by the data-parallel wrapper."""
    grad: Tensor | None = getattr(parameter, "main_grad", None)
    assert grad is not None, f"{name_of(parameter)} has no main_grad: wrap the model first"
    return grad
