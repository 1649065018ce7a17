"""Data parallelism in its naive form: one flat gradient buffer, one all-reduce after the last backward.

Every replica holds all parameters of its stage and sees its own microbatches (arXiv 1909.08053, section 3). After the
last backward of a step, an all-reduce averages the gradients of all replicas. Parameters of experts have a second
buffer, reduced over the ranks that hold the same experts; `record_of(parameter).allreduce` is False for them. Nothing
overlaps here. Tests compare the bucketed, overlapping form with this one.
"""

from __future__ import annotations

import torch
from torch import nn

from labkit.comm.collectives import all_reduce
from labkit.comm.groups import Group
from labkit.comm.ledger import comm_scope
from labkit.parallel.data_parallel.finite import scale_and_check_finite
from labkit.parallel.data_parallel.wrapper import ChunkWrapper
from labkit.parallel.parameters.parameter_record import add_gradient, adopt_marks, record_of


class NaiveDataParallel(ChunkWrapper):
    """Gives each parameter of `module` a `main_grad`, and averages these over `group` in `finish_grad_sync`.

    Gradients reach `main_grad` in one of two ways. A hook adds `.grad` to it and drops `.grad`. Or a linear layer with
    `gradient_accumulation_fusion` adds its weight gradient itself and returns none. Gradients add up over the
    microbatches of a step until `zero_grad_buffer`.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        expert_group: Group | None = None,
        *,
        grad_dtype: torch.dtype | None = None,
        average: bool = True,
    ) -> None:
        """Wrap `module`.

        group: the data-parallel (times context-parallel) ranks, which reduce their gradients.
        expert_group: the ranks with the same experts (`edp`); None without experts. Tokens of an expert come from all
            replicas, so its gradients are divided by the size of `group` too.
        grad_dtype: type of the buffers; None is fp32 for 16-bit parameters, else the parameters' own type.
        average: divide by the size of `group`; False leaves the sum, for a loss normalised by a global token count.

        Raises ValueError for experts without their group.
        """
        super().__init__(module)
        self.group = group
        self.average = average
        self._not_finite: list[torch.Tensor | None] = []
        params = [p for p in module.parameters() if p.requires_grad]
        for param in params:
            adopt_marks(param)
        dense = [p for p in params if record_of(p).allreduce]
        experts = [p for p in params if not record_of(p).allreduce]
        if experts and expert_group is None:
            raise ValueError("experts (parameters with allreduce = False) need expert_group; give it groups.edp")
        dtype = grad_dtype or _grad_dtype(params)
        self.grad_buffer = _attach_main_grads(dense, dtype)
        self._kinds = [dense]
        self._reduced = [(self.grad_buffer, group)]
        if expert_group is not None:
            self._kinds.append(experts)
            self._reduced.append((_attach_main_grads(experts, dtype), expert_group))
        for param in params:
            param.register_post_accumulate_grad_hook(_move_to_main_grad)

    def zero_grad_buffer(self) -> None:
        """Set every `main_grad` to zero, at the start of a step."""
        for buffer, _ in self._reduced:
            buffer.zero_()

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply every `main_grad`."""
        for buffer, _ in self._reduced:
            buffer.mul_(factor)

    def start_grad_sync(self, *parameters: nn.Parameter) -> None:
        """Only check that a synchronisation is allowed, because `finish_grad_sync` reduces everything."""
        self._check_may_sync("start_grad_sync")

    def finish_grad_sync(self) -> None:
        """All-reduce each whole buffer over its group. Scaling comes first, so that the sum cannot overflow."""
        self._check_may_sync("finish_grad_sync")
        factor = 1.0 / self.group.size if self.average else 1.0
        self._not_finite = [None] * len(self._reduced)
        for kind, (buffer, group) in enumerate(self._reduced):
            if buffer.numel() and (factor, group.size) != (1.0, 1):
                self._not_finite[kind] = scale_and_check_finite(buffer, factor)
                with comm_scope(phase="gradients"):
                    all_reduce(buffer, group)

    def spoiled_before_reduction(self) -> list[nn.Parameter] | None:
        """Return the parameters whose gradient may not have been finite on this rank before the reduction.

        A buffer is checked whole: they are all dense parameters or none, and all experts' parameters or none. A buffer
        that nobody reduced counts as bad. None if there was no reduction. The host waits for the device.
        """
        if all(found is None for found in self._not_finite):
            return None
        pairs = zip(self._kinds, self._not_finite, strict=True)
        return [param for params, found in pairs if found is None or found.item() for param in params]


def _grad_dtype(params: list[nn.Parameter]) -> torch.dtype:
    """Return fp32 for 16-bit parameters, else the widest dtype among them."""
    widest = torch.float32
    for param in params:
        if param.dtype.itemsize > 2:
            widest = torch.promote_types(widest, param.dtype)
    return widest


def _attach_main_grads(params: list[nn.Parameter], dtype: torch.dtype) -> torch.Tensor:
    """Return one zeroed buffer, with a view for each parameter as its `main_grad`."""
    device = params[0].device if params else torch.device("cpu")
    buffer = torch.zeros(sum(p.numel() for p in params), dtype=dtype, device=device)
    offset = 0
    for param in params:
        param.main_grad = buffer[offset : offset + param.numel()].view_as(param)  # pyright: ignore[reportAttributeAccessIssue]
        offset += param.numel()
    return buffer


def _move_to_main_grad(param: torch.Tensor) -> None:
    """Post-accumulate hook: add `.grad` to `main_grad` and drop `.grad`.

    Autograd also calls it if a fused layer has added its gradient itself and returned none.
    """
    if param.grad is not None:
        add_gradient(param, param.grad)
        param.grad = None
