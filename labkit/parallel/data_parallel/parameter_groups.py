"""Which parameter gets which weight decay and learning rate, sharded or not.

Both optimizers, the one that is whole on every rank and the distributed one, are built from these groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from labkit.config import OptimConfig
from labkit.parallel.parameters.parameter_record import name_of

Condition = Callable[[str, nn.Parameter], bool]
"""A predicate over a parameter's full name and the parameter."""


def is_bias_or_norm(name: str, param: nn.Parameter) -> bool:
    """The default `no_wd_decay_cond`: biases and norm weights, which are the one-dimensional parameters."""
    return param.ndim == 1 or name.endswith(".bias")


@dataclass
class ParameterGroup:
    """Parameters that share their weight decay and learning rate."""

    weight_decay_factor: float
    """Multiplies `optim.weight_decay`: 0 or 1."""
    lr_factor: float
    """Multiplies the learning rate of the step: 1 or `lr_mult`."""
    names: list[str] = field(default_factory=list)
    """Full names, the same in every layout."""
    params: list[nn.Parameter] = field(default_factory=list)
    """The parameters, in the order of `names`."""


def named_parameters(chunks: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Every parameter of a rank once, by the name it has in every layout (`full_name`, else its module path)."""
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
    """Sort parameters by two yes/no questions into at most four groups, empty ones left out.

    `no_wd_decay_cond` says which parameters have no weight decay (default: biases and norms), `scale_lr_cond` which
    have their learning rate multiplied by `lr_mult` (default: none). As in Megatron's `get_param_groups`.
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


def adamw(
    groups: Sequence[ParameterGroup], masters: Sequence[Sequence[Tensor]], optim: OptimConfig
) -> torch.optim.AdamW:
    """Torch's fused AdamW over `masters`, the tensors that are updated for each of `groups`. All may be empty."""
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
