"""AdamW on `main_grad`: weight decay and learning rate of each parameter, and the precision of its updated copy.

torch's fused AdamW does the update (decoupled weight decay, arXiv 1711.05101). labkit decides the precisions:

    weights   gradient (main_grad)   updated copy
    fp64      fp64                   the parameter itself
    fp32      fp32                   the parameter itself
    bf16      fp32, or bf16          an fp32 master, rounded into the parameter after each step
    fp16      fp32                   the same; the loss, and so the gradient, is scaled (`loss_scaler.py`)

bf16 gradients (`optim.grad_reduce_in_bf16`) become fp32 for the update, 4 bytes each while it runs, and are clipped
there.

Every data-parallel rank keeps the whole state with `Optimizer`, and a share of the state with `DistributedOptimizer`
(`distributed_optimizer.py`). Both are `MegatronOptimizer`s, built from the same `ParameterGroup`s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from labkit.comm.groups import Group, ParallelGroups, single_process_groups
from labkit.config import OptimConfig
from labkit.parallel.data_parallel.gradients import counted_elements, is_first_replica, split_gradient
from labkit.parallel.parameters.parameter_record import main_grad_of, name_of, record_of

LOW_PRECISION = (torch.bfloat16, torch.float16)
Condition = Callable[[str, nn.Parameter], bool]
"""A predicate over a parameter's full name and the parameter."""


def is_bias_or_norm(name: str, param: nn.Parameter) -> bool:
    """Return True for biases and norm weights, which are one-dimensional: the default `no_wd_decay_cond`."""
    return param.ndim == 1 or name.endswith(".bias")


@dataclass
class ParameterGroup:
    """Parameters that share their weight decay and learning rate."""

    weight_decay_factor: float
    """Multiplies `optim.weight_decay`: 0 or 1."""
    lr_factor: float
    """Multiplies the learning rate of the step: 1 or `lr_mult`."""
    names: list[str] = field(default_factory=list)
    """Full names of the parameters, the same in every layout."""
    params: list[nn.Parameter] = field(default_factory=list)
    """The parameters, in the order of `names`."""


def named_parameters(chunks: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Return name -> parameter, each parameter of a rank once; the name is `full_name`, else the module path."""
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for chunk in chunks:
        for path, param in chunk.named_parameters():
            name = name_of(param, path)
            if id(param) in seen:
                continue
            if name in found:
                name = f"{name} ({path})"
            seen.add(id(param))
            found[name] = param
    return found


def parameter_groups(
    chunks: Sequence[nn.Module],
    *,
    no_wd_decay_cond: Condition | None = None,
    scale_lr_cond: Condition | None = None,
    lr_mult: float = 1.0,
) -> list[ParameterGroup]:
    """Sort parameters by two yes/no questions into at most four groups. Empty groups are left out.

    Parameters with `no_wd_decay_cond` have no weight decay (default: biases and norms). Parameters with `scale_lr_cond`
    have their learning rate multiplied by `lr_mult` (default: none). Megatron's `get_param_groups` asks the same.
    """
    no_decay = no_wd_decay_cond or is_bias_or_norm
    groups = {
        (decays, scaled): ParameterGroup(float(decays), lr_mult if scaled else 1.0)
        for decays in (True, False)
        for scaled in (False, True)
    }
    for name, param in named_parameters(chunks).items():
        if not param.requires_grad:
            continue
        key = (not no_decay(name, param), scale_lr_cond is not None and scale_lr_cond(name, param))
        groups[key].names.append(name)
        groups[key].params.append(param)
    return [group for group in groups.values() if group.params]


@dataclass(frozen=True, slots=True)
class UpdatedPart:
    """Elements of a parameter that this rank updates: the part of the optimizer's state that a checkpoint stores."""

    parameter: nn.Parameter
    """The parameter."""
    first: int
    """First of the elements in the rank's flattened parameter."""
    master: Tensor
    """The tensor that AdamW updates, and the key of its moments: as the parameter, or flat."""
    copy: int
    """Place of this rank among the data-parallel ranks that update the same elements."""
    copies: int
    """Number of these ranks."""


class MegatronOptimizer(Protocol):
    """The methods that `train_step` needs of an optimizer, sharded or not."""

    groups: list[ParameterGroup]
    """The updated parameters, in the given order."""
    norm_groups: tuple[Group, ...]
    """Groups over which the global norm is summed, one after the other. Together they connect all ranks."""
    adamw: torch.optim.AdamW
    """torch's optimizer over the masters."""

    def updated_parts(self) -> Iterator[UpdatedPart]:
        """Yield all elements that this rank updates."""
        ...

    def gradient_pieces(self) -> list[Tensor]:
        """Return the finalised gradients that this rank counts in the global norm.

        Over all ranks of `norm_groups`, each element of the model occurs exactly once: no replica, no copy of a tied
        weight.
        """
        ...

    def uncounted_pieces(self) -> list[Tensor]:
        """Return the other finalised gradients of this rank, which add nothing to the norm.

        If one of them is not finite, no rank may take the step.
        """
        ...

    def step(self, lr: float, factor: float = 1.0) -> None:
        """Update the parameters from `factor` times their gradients, at learning rate `lr` times a group's factor."""
        ...

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes on this rank by use: `parameter`, `gradient`, `master`, `moments` and `padding`."""
        ...


class Optimizer:
    """AdamW over parameter groups, with the whole state on every data-parallel rank. It reads each `main_grad`."""

    def __init__(
        self, groups: Iterable[ParameterGroup], optim: OptimConfig, *, layout: ParallelGroups | None = None
    ) -> None:
        """Keep fp32 masters of 16-bit parameters. The rank of an empty pipeline stage updates nothing.

        layout: this rank's process groups, for the global norm; None means a single process.
        """
        self.groups = list(groups)
        self._layout = layout or single_process_groups()
        self.norm_groups = (self._layout.dp_cp, self._layout.mp)
        self.masters: list[list[torch.Tensor]] = [[_master(p) for p in group.params] for group in self.groups]
        self.adamw = adamw(self.groups, self.masters, optim)

    def updated_parts(self) -> Iterator[UpdatedPart]:
        """Yield every parameter as a whole, with a copy on each data-parallel rank."""
        for group, masters in zip(self.groups, self.masters):
            for param, master in zip(group.params, masters):
                copies = self._layout.dp_cp if record_of(param).allreduce else self._layout.edp
                yield UpdatedPart(param, 0, master, copies.rank, copies.size)

    def _parameters(self) -> list[nn.Parameter]:
        return [param for group in self.groups for param in group.params]

    def gradient_pieces(self) -> list[Tensor]:
        """Return gradients that count in the norm, once over tp x pp; only the first data-parallel replica has any."""
        return [grad for param in self._parameters() for grad in self._split(param)[0]]

    def uncounted_pieces(self) -> list[Tensor]:
        """Return the gradients that `gradient_pieces` leaves out: those of replicas and of a tied weight's copy."""
        return [grad for param in self._parameters() for grad in self._split(param)[1]]

    def _split(self, param: nn.Parameter) -> tuple[list[Tensor], list[Tensor]]:
        first = is_first_replica(param, self._layout)
        return split_gradient(main_grad_of(param), counted_elements(param, self._layout) if first else 0)

    @torch.no_grad()
    def step(self, lr: float, factor: float = 1.0) -> None:
        """Update every parameter from `factor` times its `main_grad`, at learning rate `lr` times a group's factor."""
        for group, masters, state in zip(self.groups, self.masters, self.adamw.param_groups):
            state["lr"] = lr * group.lr_factor
            give_gradients(masters, [main_grad_of(param) for param in group.params], factor)
        self.adamw.step()
        for group, masters in zip(self.groups, self.masters):
            for param, master in zip(group.params, masters):
                master.grad = None
                if master is not param:
                    param.copy_(master)

    def state_bytes(self) -> dict[str, int]:
        """Return bytes by use. `master` is 0 if AdamW updates the parameter itself.

        Adam's two moments have their master's type. They count before the first step creates them, too.
        """
        pairs = [(p, m) for group, masters in zip(self.groups, self.masters) for p, m in zip(group.params, masters)]
        return {
            "parameter": sum(param.nbytes for param, _ in pairs),
            "gradient": sum(main_grad_of(param).nbytes for param, _ in pairs),
            "master": sum(master.nbytes for param, master in pairs if master is not param),
            "moments": sum(2 * master.nbytes for _, master in pairs),
            "padding": 0,
        }


def give_gradients(masters: Sequence[Tensor], gradients: Sequence[Tensor], factor: float) -> None:
    """Give each master its gradient times `factor`, in the master's type: the gradient itself, scaled in place, or a
    wider copy."""
    wide = [gradient.to(master.dtype) for master, gradient in zip(masters, gradients, strict=True)]
    if factor != 1.0 and wide:
        torch._foreach_mul_(wide, factor)  # pyright: ignore[reportPrivateImportUsage]
    for master, gradient in zip(masters, wide):
        master.grad = gradient


def _master(param: nn.Parameter) -> torch.Tensor:
    """Return the tensor that AdamW updates: a float32 copy of a 16-bit `param`, else `param` itself."""
    return param.detach().float() if param.dtype in LOW_PRECISION else param


def adamw(
    groups: Sequence[ParameterGroup], masters: Sequence[Sequence[Tensor]], optim: OptimConfig
) -> torch.optim.AdamW:
    """Return torch's fused AdamW over `masters`, the tensors to update for each of `groups`. All may be empty."""
    return torch.optim.AdamW(
        [
            {"params": list(own), "weight_decay": optim.weight_decay * group.weight_decay_factor}
            for group, own in zip(groups, masters, strict=True)
        ]
        or [{"params": []}],  # torch refuses a list without groups
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        fused=True,
    )
