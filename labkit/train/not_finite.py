"""Search for the loss, parameter or gradient that is not finite, and for its rank.

Nothing here runs in a good step. Once all ranks agree that a number is not finite (`gradient_statistics`), each looks
through what it holds, and the findings of all ranks make one sentence, the same on every rank. Of experts, whose
weights are stacked, it says which, by their numbers in the whole layer.

A reduction spreads a NaN to all its ranks. The data-parallel wrappers therefore note, in the pass over memory that
scales a buffer before its reduction, whether this rank's own share was finite (`spoiled_before_reduction`); ranks that
only received the NaN are not named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labkit.parallel.collectives import comm_scope, gather_objects
from labkit.parallel.data_parallel.gradients import is_expert
from labkit.parallel.groups import Group, ParallelGroups
from labkit.parallel.parameters.parameter_record import main_grad_of, name_of, record_of

KINDS = ("parameter", "loss", "gradient")
"""Kinds of findings, causes first: a bad weight makes a bad loss, and that bad gradients."""
NAMED = 3
"""So many names a sentence holds; the others are counted."""


@dataclass(frozen=True)
class Finding:
    """Something that is not finite on one rank."""

    kind: str
    """One of `KINDS`."""
    name: str
    """Full name of the parameter, or `microbatch 3` of a loss."""
    values: str
    """Numbers of bad values, as in `1 NaN of 4096`."""
    rank: int
    """Global rank."""
    coordinates: str
    """The rank's place in the layout, as in `tp 1, dp 0, pp 1`."""
    depth: tuple[int, int]
    """(stage, place in it), from the input to the output."""
    received: bool = False
    """It came to this rank through the data-parallel reduction."""


def find(
    reports: Sequence[dict[str, Any]],
    chunks: Sequence[nn.Module],
    stages: Sequence[int],
    groups: ParallelGroups,
    *,
    gradients: bool = True,
) -> list[Finding]:
    """Everything that is not finite on any rank, the most telling first, alike on every rank. Called by all ranks.

    reports: what the loss function reported of each microbatch on this rank.
    chunks: this rank's model chunks, wrapped; `stages` are their stages.
    gradients: whether `main_grad`s are looked through as well.

    Order: parameters from the input on, losses by microbatch, gradients from the output back, which is the way a NaN
    spreads through a step. Within each, ranks that merely received it come last.
    """
    with comm_scope(layer="not finite", phase="report"):
        by_rank = gather_objects(list(_own(reports, chunks, stages, groups, gradients)), groups.world)
    found = [finding for findings in by_rank for finding in findings]
    return sorted(found, key=_telling)


def _telling(finding: Finding) -> tuple[Any, ...]:
    backward = finding.kind == "gradient"
    stage, place = finding.depth
    depth = (-stage, -place) if backward else (stage, place)
    return KINDS.index(finding.kind), finding.received, depth, finding.rank


def _own(
    reports: Sequence[dict[str, Any]],
    chunks: Sequence[nn.Module],
    stages: Sequence[int],
    groups: ParallelGroups,
    gradients: bool,
) -> Iterator[Finding]:
    where = groups.rank, coordinates(groups)
    for microbatch, report in enumerate(reports):
        if values := _bad_values(torch.as_tensor(report["loss_sum"])):
            yield Finding("loss", f"microbatch {microbatch}", values, *where, (0, microbatch))
    for name, parameter, depth, own in _parameters(chunks, stages):
        where = groups.rank, coordinates(groups, of_experts=is_expert(parameter))
        if values := _bad_values(parameter.detach()):
            yield Finding("parameter", name + _which_experts(parameter, parameter, groups), values, *where, depth)
        if gradients and parameter.requires_grad and (values := _bad_values(grad := main_grad_of(parameter))):
            experts = _which_experts(parameter, grad, groups)
            yield Finding("gradient", name + experts, values, *where, depth, received=not own)


def _which_experts(parameter: nn.Parameter, tensor: Tensor, groups: ParallelGroups) -> str:
    """` of expert 5`, ` of experts 4, 5 and 2 more`: whose part of stacked weights [E/ep, ..] is not finite."""
    if not record_of(parameter).expert_parallel:
        return ""
    first, finite = groups.ep.rank * len(tensor), tensor.detach().flatten(1).isfinite().all(dim=1).tolist()
    bad = [first + place for place, fine in enumerate(finite) if not fine]
    more = f" and {len(bad) - NAMED} more" if len(bad) > NAMED else ""
    return f" of expert{'s' if len(bad) > 1 else ''} {', '.join(map(str, bad[:NAMED]))}{more}"


def _parameters(
    chunks: Sequence[nn.Module], stages: Sequence[int]
) -> Iterator[tuple[str, nn.Parameter, tuple[int, int], bool]]:
    """(full name, parameter, depth, whether its gradient may have been bad on this rank before the reduction)."""
    seen: set[int] = set()
    for chunk, stage in zip(chunks, stages, strict=True):
        look = getattr(chunk, "spoiled_before_reduction", None)
        spoiled = None if look is None else look()
        for place, (path, parameter) in enumerate(getattr(chunk, "module", chunk).named_parameters()):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                own = spoiled is None or any(parameter is other for other in spoiled)
                yield name_of(parameter, path), parameter, (stage, place), own


def _bad_values(x: Tensor) -> str:
    """`2 NaN and 1 infinite of 64`, or nothing where all are finite."""
    nan, infinite = (int(bad.sum()) for bad in (x.isnan(), x.isinf()))
    words = [f"{count} {word}" for count, word in ((nan, "NaN"), (infinite, "infinite")) if count]
    return f"{' and '.join(words)} of {x.numel()}" if words else ""


def coordinates(groups: ParallelGroups, *, of_experts: bool = False) -> str:
    """`tp 1, dp 0, pp 1`: this rank's place along each axis of more than one rank; `alone` without any.

    of_experts: along the axes of expert parameters, as in `etp 0, ep 1, edp 0, pp 1`.
    """
    names = ("etp", "ep", "edp", "pp") if of_experts else ("tp", "cp", "dp", "pp")
    axes: dict[str, Group] = {name: getattr(groups, name) for name in names}
    return ", ".join(f"{name} {group.rank}" for name, group in axes.items() if group.size > 1) or "alone"


def sentence(findings: Sequence[Finding]) -> str:
    """The origin in words: the first kind found, on the ranks that did not merely receive it."""
    if not findings:
        return "a sum over finite gradients overflowed"
    first = findings[0]
    alike = [f for f in findings if (f.kind, f.received) == (first.kind, first.received)]
    lead = {
        "loss": "the loss of {} is not finite",
        "parameter": "parameter {} is not finite",
        "gradient": "the gradient of {} is not finite",
    }[first.kind].format(first.name)
    text = f"{lead} on rank {first.rank} ({first.coordinates}): {first.values}"
    others = [f"{f.name} on rank {f.rank}" for f in alike[1:NAMED]]
    text += f"; also {', '.join(others)}" if others else ""
    return text + (f" and {len(alike) - NAMED} more" if len(alike) > NAMED else "")
