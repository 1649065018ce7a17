"""Sublayers on the ranks of one tensor-parallel group: numbers to be compared by name, and timelines.

The microscope compares whole runs of training; this compares one forward and backward of functions written by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.comm.groups import Group, ParallelGroups, initialize_model_parallel
from labkit.comm.ledger import CommLedger, CommRecord
from labkit.config import RunConfig
from labkit.events import Event
from labkit.launch import Ranks
from labkit.models.blocks import TransformerLayer
from labkit.models.build import Build
from labkit.parallel import mappings
from labkit.train.parity.assemble import join_shards
from labkit.train.parity.comparison import tensor_difference

Sublayer = Callable[[Tensor, nn.Module, Group], Tensor]
"""Computes y from x, from the module that holds this rank's parts of the weights, and from its group."""


def all_tensor_parallel(config: RunConfig) -> ParallelGroups:
    """Make the groups of this rank when all ranks share each layer."""
    world = torch.distributed.get_world_size()
    return initialize_model_parallel(config.override({"parallel.tp": world, "parallel.pp": 1}).parallel)


def float64_layer(config: RunConfig, groups: ParallelGroups, index: int = 0) -> TransformerLayer:
    """Build a layer whose weights are drawn whole, from seed 0; a rank keeps its parts."""
    build = Build(config=config.model, group=groups.tp, seed=0, dtype=torch.float64, device=groups.device)
    return TransformerLayer(index, build)


def run_sublayer(
    config: RunConfig, name: str, x_SBH: Tensor, dy_SBH: Tensor, by_hand: Sublayer | None = None
) -> dict[str, Tensor]:
    """Run a sublayer of layer 0 forward and backward on this rank, all ranks being tensor-parallel.

    name: `attention` or `mlp`.
    x_SBH, dy_SBH: input, and gradient of the output, [S, B, H]; alike on all ranks.
    by_hand: makes y of the weights of labkit's module; None calls the module itself.

    Returns `y`, `x` (the gradient of the input) and each parameter's gradient, by name and on the host. A parameter
    that is not used, such as the norm before the MLP, is missing.
    """
    groups = all_tensor_parallel(config)
    module: nn.Module = getattr(float64_layer(config, groups), name)
    x, dy = x_SBH.to(groups.device, copy=True).requires_grad_(), dy_SBH.to(groups.device)
    y: Tensor = module(x) if by_hand is None else by_hand(x, module, groups.tp)
    y.backward(dy)  # type: ignore[no-untyped-call]
    gradients = {key: p.grad for key, p in module.named_parameters()} | {"x": x.grad}
    return {"y": y.detach().cpu()} | {key: grad.cpu() for key, grad in gradients.items() if grad is not None}


def run_cut_mlp(
    config: RunConfig, way: Sequence[str], slots: Sequence[Sequence[str]], x_NH: Tensor
) -> tuple[Tensor, Tensor, list[CommRecord]]:
    """Run Y = GeLU(X A) B on this rank, with A and B cut in any way; the gradient of Y is 1 everywhere.

    way: how A [H, 4H] and B [4H, H] are cut, `column` or `row`. They are drawn whole; a rank keeps its part.
    slots: operators before A, before the GeLU, before B and at the end, by their names in `CUT_OPERATORS`.
    x_NH: X, whole and alike on all ranks.

    Returns Y, dX and the messages of this rank, forward and backward.
    """
    groups, hidden = all_tensor_parallel(config), x_NH.shape[1]
    x = x_NH.to(groups.device, copy=True).requires_grad_()
    draws, products = torch.Generator().manual_seed(0), []
    for kind, shape in zip(way, ((4 * hidden, hidden), (hidden, 4 * hidden)), strict=True):
        stored = torch.randn(shape, generator=draws, dtype=x.dtype)  # the transpose of A, then that of B
        part = stored.chunk(groups.tp.size, 0 if kind == "column" else 1)[groups.tp.rank].to(groups.device)
        products.append(lambda x, part=part: F.linear(x, part))
    y: Tensor = x
    with CommLedger() as ledger:
        for names, step in zip(slots, (products[0], F.gelu, products[1], None), strict=True):
            for name in names:
                y = CUT_OPERATORS[name](y, groups.tp)
            y = y if step is None else step(y)
        y.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return y.detach().cpu(), x.grad.cpu(), ledger.records


def _of_width(operator: Callable[[Tensor, Group], Tensor]) -> Callable[[Tensor, Group], Tensor]:
    """Let an operator that cuts or joins dimension 0 work on dimension 1 of a matrix."""
    return lambda x, group: operator(x.T.contiguous(), group).T


CUT_OPERATORS: dict[str, Callable[[Tensor, Group], Tensor]] = {
    "f": mappings.copy_to_tensor_model_parallel_region,
    "g": mappings.reduce_from_tensor_model_parallel_region,
    "split": mappings.scatter_to_tensor_model_parallel_region,
    "gather": mappings.gather_from_tensor_model_parallel_region,
    "g_split": _of_width(mappings.reduce_scatter_to_sequence_parallel_region),
    "gather_f": _of_width(mappings.gather_from_sequence_parallel_region),
}
"""What can be between two products of a cut MLP; chapter 03 has a table of what each does."""


def errors_by_name(ranks: Sequence[Mapping[str, Tensor]], whole: Mapping[str, Tensor]) -> dict[str, float]:
    """Return for each tensor of one process the relative error of what the ranks have, ||a - b|| / ||b||.

    Parts are joined along the dimension that was cut; of tensors that every rank has whole, the worst counts.
    """
    return {name: _error([rank[name] for rank in ranks], tensor) for name, tensor in whole.items()}


def _error(held: Sequence[Tensor], whole: Tensor) -> float:
    cut = [dim for dim, size in enumerate(whole.shape) if held[0].shape[dim] != size]
    found = [join_shards(held, cut[0])] if cut else held
    return max(tensor_difference(tensor, whole) for tensor in found)


def earliest_events(
    ranks: Ranks, calls: Mapping[str, Callable[[], list[Event]]], rounds: int = 7
) -> dict[str, list[Event]]:
    """Return rank 0's events of each call in that of several rounds in which they ended earliest.

    A machine runs other programs, too, and what they delay ends later. The ends of all events count, from the first
    start on: the last one alone would not tell where a message is the longest.

    calls: name -> what every rank runs; it returns the events of its rank. All calls run in each round.
    """
    seen = [{name: ranks.run(call)[0] for name, call in calls.items()} for _ in range(rounds)]
    return {name: min((each[name] for each in seen), key=_ends) for name in calls}


def _ends(events: Sequence[Event]) -> float:
    return sum(event.end for event in events) - len(events) * min(event.start for event in events)
