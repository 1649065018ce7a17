"""One record per parameter: its part of the whole model, and how its gradients arrive.

`record_of(parameter)` returns the record; the first question makes it. Two attributes stay on the parameter itself,
because people outside labkit read them there: `full_name`, the name that the parameter has in every layout, and
`main_grad`, the tensor where backwards add up (Transformer Engine and Megatron's optimizers read `weight.main_grad`).

`DistributedDataParallel` does not zero its buffers at the start of a step: the first gradient of a step overwrites the
old contents, and later gradients are added. `add_gradient` does both. `NaiveDataParallel` zeroes its buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class Replicated:
    """Rows along dimension 0 that neighbouring ranks of a tensor-parallel group hold alike: key/value heads that are
    fewer than the ranks.

    The full tensor is one block after the other, and `ranks` neighbours share a block. The last `rows` of the block are
    at the end of each neighbour's part; the others are cut. With two query heads and one key/value head over two ranks:

        full   q0 q1 k v        rank 0   q0 k v        rank 1   q1 k v

    A rank's gradient of the replicated rows comes from its own query heads alone: `finalize_model_grads` adds them up.
    """

    ranks: int
    """Neighbours that share a block; 2 or more, a divisor of the group's size."""
    rows: int
    """At the end of each neighbour's part."""


@dataclass(slots=True)
class ParameterRecord:
    """Everything that labkit knows of a parameter besides its values. The defaults fit a parameter of a user's own
    module, which every rank holds whole."""

    # ---- its part of the model: written where the parameter is made, read by checkpoints, norms and parity ----
    full_shape: tuple[int, ...] = ()
    """Shape in one process, without padding."""
    tensor_model_parallel: bool = False
    """The ranks of a tensor-parallel group hold different parts (Megatron's name, as the next two)."""
    partition_dim: int = -1
    """The dimension that is cut; -1 where nothing is."""
    partition_stride: int = 1
    """How many stacked blocks are cut each by itself (2 for SwiGLU's [gate; up])."""
    replicated: Replicated | None = None
    """The rows of the part that neighbouring ranks hold alike."""
    expert_parallel: bool = False
    """Dimension 0 counts experts, and the ranks of `ep` hold different ones; `partition_dim` and `partition_stride`
    then say how `etp` cuts each expert, counted in the stacked tensor."""

    # ---- which ranks' gradients belong together: written by the module that holds it, read by `gradients` ----
    allreduce: bool = True
    """False for experts (Megatron's name): their gradients are reduced over `edp` instead of `dp_cp`."""
    sequence_parallel: bool = False
    """Its gradient is a partial sum over the tensor-parallel group: norms and biases see a part of the sequence."""
    shared: bool = False
    """A second copy of a tied weight; norms and checkpoints leave the copy out."""
    shared_embedding: bool = False
    """Either copy of a word embedding that first and last stage both hold; their gradients are added."""

    # ---- how a gradient reaches `main_grad`: written by the data-parallel wrapper, during a capture by graphs ----
    has_gradient: bool = True
    """`main_grad` holds gradients of this step. The wrapper sets False at the start of a step; whoever writes the first
    gradient sets True (`add_gradient`, or a layer that multiplies straight into `main_grad`)."""
    added_elsewhere: bool = False
    """Somebody always adds to `main_grad` and never asks `has_gradient`: an engine's layer, a captured graph. The
    wrapper then zeroes `main_grad` at the start of a step."""
    on_gradient: Callable[[Tensor], None] | None = None
    """The wrapper's hook. Whoever adds to `main_grad` where autograd runs no hook calls it with the parameter."""
    hook_handle: RemovableHandle | None = None
    """Takes the wrapper's hook off the parameter."""
    main_grad_shard: Tensor | None = None
    """Of a tied embedding under the distributed optimizer: this rank's part of the reduced gradient."""

    def __reduce__(self) -> tuple[Any, ...]:
        """What stands in a file that holds the parameter: its part of the model, without the wrapper's hooks."""
        kept = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _OF_THE_WRAPPER}
        return ParameterRecord, tuple(kept.values())


_OF_THE_WRAPPER = ("has_gradient", "added_elsewhere", "on_gradient", "hook_handle", "main_grad_shard")
torch.serialization.add_safe_globals([ParameterRecord, Replicated])


def record_of(parameter: Tensor) -> ParameterRecord:
    """The record of a parameter."""
    try:
        return parameter.record  # pyright: ignore[reportAttributeAccessIssue]
    except AttributeError:
        made = parameter.record = ParameterRecord()  # pyright: ignore[reportAttributeAccessIssue]
        return made


def name_of(parameter: Tensor, otherwise: str = "a parameter") -> str:
    """The parameter's name in the whole model, or `otherwise` for a parameter that labkit did not make."""
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
    """Take over marks that a user's own module set as attributes of the parameter, as modules for Megatron do:
    those of `MEGATRON_MARKS`. The data-parallel wrappers call this."""
    set_there: dict[str, Any] = vars(parameter)
    for mark in MEGATRON_MARKS:
        if mark in set_there:
            setattr(record_of(parameter), mark, set_there[mark])


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Bring a gradient into `parameter.main_grad`: written for the first of a step, added for the later ones."""
    record = record_of(parameter)
    put_gradient(gradient, main_grad_of(parameter), replace=not record.has_gradient)
    record.has_gradient = True


def put_gradient(gradient: Tensor, main_grad: Tensor, *, replace: bool) -> None:
    """Add a gradient to `main_grad`, or with `replace` write the gradient over the old contents."""
    if replace:
        main_grad.copy_(gradient)
    else:
        main_grad.add_(gradient)


def weight_gradient(
    grad_NO: Tensor, x_NI: Tensor, main_grad: Tensor | None = None, *, replace: bool = False
) -> Tensor | None:
    """dL/dW = grad^T x, [O, I]. With `main_grad` the product is added there, or with `replace` put there, and None is
    returned: no gradient tensor is made."""
    if main_grad is None:
        return grad_NO.t() @ x_NI
    if main_grad.dtype != x_NI.dtype:
        return put_gradient(grad_NO.t() @ x_NI, main_grad, replace=replace)
    if replace:
        torch.mm(grad_NO.t(), x_NI, out=main_grad)
    else:
        main_grad.addmm_(grad_NO.t(), x_NI)
    return None


def call_on_gradient(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
    """Have `hook` called for every gradient; an earlier wrapper of the same parameter is forgotten."""
    record = record_of(parameter)
    if record.hook_handle is not None:
        record.hook_handle.remove()
    record.hook_handle, record.on_gradient = parameter.register_post_accumulate_grad_hook(hook), hook


def main_grad_of(parameter: Tensor) -> Tensor:
    """The gradient that the optimizer uses, made by the data-parallel wrapper."""
    grad: Tensor | None = getattr(parameter, "main_grad", None)
    assert grad is not None, f"{name_of(parameter)} has no main_grad: wrap the model first"
    return grad
