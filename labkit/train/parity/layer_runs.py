"""Layers, and halves of them, on the ranks of one tensor-parallel group, to be held against one process by name.

The microscope compares whole runs of training; this compares a forward and a backward of one's own functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from labkit.comm.groups import Group, ParallelGroups, initialize_model_parallel
from labkit.config import RunConfig
from labkit.models.blocks import TransformerLayer
from labkit.models.build import Build
from labkit.train.parity.assemble import join_shards
from labkit.train.parity.comparison import tensor_difference

Half = Callable[[Tensor, nn.Module, Group], Tensor]
"""Computes y from x, from the module that holds this rank's parts of the weights, and from its group."""


def all_tensor_parallel(config: RunConfig) -> ParallelGroups:
    """Make the groups of this rank when all ranks share each layer."""
    world = torch.distributed.get_world_size()
    return initialize_model_parallel(config.override({"parallel.tp": world, "parallel.pp": 1}).parallel)


def float64_layer(config: RunConfig, groups: ParallelGroups, index: int = 0) -> TransformerLayer:
    """Build a layer whose weights are drawn whole, from seed 0; a rank keeps its parts."""
    build = Build(config=config.model, group=groups.tp, seed=0, dtype=torch.float64, device=groups.device)
    return TransformerLayer(index, build)


def run_half(
    config: RunConfig, half: str, x_SBH: Tensor, dy_SBH: Tensor, by_hand: Half | None = None
) -> dict[str, Tensor]:
    """Run a half of layer 0 forward and backward on this rank, all ranks being tensor-parallel.

    half: `attention` or `mlp`.
    x_SBH, dy_SBH: input, and gradient of the output, [S, B, H]; alike on all ranks.
    by_hand: makes y of the weights of labkit's module; None calls the module itself.

    Returns `y`, `x` (the gradient of the input) and each parameter's gradient, by name and on the host. A parameter
    that is not used, such as the norm before the MLP, is missing.
    """
    groups = all_tensor_parallel(config)
    module: nn.Module = getattr(float64_layer(config, groups), half)
    x, dy = x_SBH.to(groups.device, copy=True).requires_grad_(), dy_SBH.to(groups.device)
    y: Tensor = module(x) if by_hand is None else by_hand(x, module, groups.tp)
    y.backward(dy)  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in module.named_parameters()} | {"x": x.grad}
    return {"y": y.detach().cpu()} | {name: grad.cpu() for name, grad in gradients.items() if grad is not None}


def errors_by_name(ranks: Sequence[Mapping[str, Tensor]], whole: Mapping[str, Tensor]) -> dict[str, float]:
    """Return for each tensor of one process the relative error of what the ranks have, ||a - b|| / ||b||.

    Parts are joined along the dimension that was cut; of tensors that every rank has whole, the worst counts.
    """
    return {name: _error([rank[name] for rank in ranks], tensor) for name, tensor in whole.items()}


def _error(held: Sequence[Tensor], whole: Tensor) -> float:
    cut = [dim for dim, size in enumerate(whole.shape) if held[0].shape[dim] != size]
    found = [join_shards(held, cut[0])] if cut else held
    return max(tensor_difference(tensor, whole) for tensor in found)
