"""Search for the loss, parameter or gradient that is not finite, and for its rank. Does it end the run?

| not finite  | `train.on_not_finite: stop` | `skip`            | adaptive loss scale (fp16)              |
|-------------|-----------------------------|-------------------|-----------------------------------------|
| a weight    | ends the run                | ends the run      | ends the run                            |
| a loss      | ends the run                | skips the step    | as `on_not_finite` says                 |
| a gradient  | ends the run                | skips the step    | skips the step, and the scale shrinks   |

No weight changes in such a step. `train_step` counts skipped steps, and the tenth in a row ends the run.

Nothing here runs in a good step. When all ranks know that a number is not finite (`gradient_statistics`), each rank
searches its losses, parameters and gradients. The findings of all ranks make one sentence, the same on every rank. The
sentence names experts, whose weights are stacked, by their numbers in the whole layer.

A reduction spreads a NaN to all its ranks. So the data-parallel wrappers note before each reduction if this rank's own
gradients were finite (`spoiled_before_reduction`). They do so in the pass over memory that scales the buffer. The
sentence does not name ranks that only received the NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.collectives import gather_objects
from labkit.comm.groups import Group, ParallelGroups
from labkit.comm.ledger import comm_scope
from labkit.parallel.data_parallel.gradients import is_expert
from labkit.parallel.parameters.parameter_record import main_grad_of, name_of, record_of
from labkit.parallel.vocab.token_ids import TokenIdChecks
from labkit.train.pipeline import Pipeline

KINDS = ("parameter", "loss", "gradient")
"""Kinds of findings, causes first: a bad parameter makes a bad loss, and a bad loss makes bad gradients."""
_ADVICE_TO_SKIP = ". train.on_not_finite = skip skips such steps"
NAMED = 3
"""Most names in a sentence; the others are counted."""


@dataclass(frozen=True)
class Finding:
    """A parameter, loss or gradient that is not finite on one rank."""

    kind: str
    """One of `KINDS`."""
    name: str
    """Full name of the parameter; for a loss `microbatch 3`."""
    values: str
    """Number of bad values, such as `1 NaN of 4096`."""
    rank: int
    """Global rank."""
    coordinates: str
    """The rank's place in the layout, such as `tp 1, dp 0, pp 1`."""
    depth: tuple[int, int]
    """(stage, place in the stage), from the input to the output."""
    received: bool = False
    """True if the data-parallel reduction brought it to this rank."""


def cause_of_skip(
    reports: Sequence[dict[str, Any]], ids: TokenIdChecks, pipeline: Pipeline, *, step: int, lr: float
) -> str:
    """Return the number that is not finite, and its rank, for a step that is skipped. All ranks call this.

    Raises on all ranks: TokenIdError if the cause is a token id, FloatingPointError if the table above ends the run.
    """
    if ids.late:
        ids.look_together(pipeline.groups.world)
    optim, stops = pipeline.config.optim, pipeline.config.train.on_not_finite == "stop"
    adapts = optim.precision == "fp16" and optim.loss_scale is None
    named = optim.check_for_nan_in_grad or (stops and not adapts)  # before the end of a run, a search costs nothing
    stages = pipeline.schedule.stages_of(pipeline.groups.pp.rank)
    found = find(reports, pipeline.chunks, stages, pipeline.groups, gradients=named)
    said = sentence(found) if found or named else "a gradient is not finite (optim.check_for_nan_in_grad names it)"
    losses = [finding.values for finding in found if finding.kind == "loss"]
    if any(finding.kind == "parameter" for finding in found):
        what, advice = "a weight is not finite", ""
    elif stops and losses:
        what, advice = f"the loss is {'nan' if 'NaN' in ''.join(losses) else 'inf'}", _ADVICE_TO_SKIP
    elif stops and not adapts:
        scale = f". {pipeline.loss_scaler.advice}" if optim.precision == "fp16" else ""
        what, advice = "a gradient is not finite", f"{_ADVICE_TO_SKIP}{scale}"
    else:
        return said
    raise FloatingPointError(
        f"{what} at step {step + 1} (learning rate {lr:.3g}): {said}; no weight was changed in this step. Lower "
        f"optim.lr, lengthen optim.warmup_steps, or look for bad samples in the data{advice}"
    )


def find(
    reports: Sequence[dict[str, Any]],
    chunks: Sequence[nn.Module],
    stages: Sequence[int],
    groups: ParallelGroups,
    *,
    gradients: bool = True,
) -> list[Finding]:
    """Return all findings of all ranks, the likeliest cause first, alike on every rank. All ranks call this.

    reports: metrics of the loss function for each microbatch on this rank.
    chunks: this rank's model chunks, wrapped; `stages` are their stages.
    gradients: search `main_grad`s as well.

    A NaN spreads through a step in this order: parameters from the input on, losses by microbatch, gradients from the
    output back. In each kind, findings that a rank only received come last.
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
    """Name the experts whose part of stacked weights [E/ep, ..] is not finite: ` of experts 4, 5 and 2 more`."""
    if not record_of(parameter).expert_parallel:
        return ""
    first, finite = groups.ep.rank * len(tensor), tensor.detach().flatten(1).isfinite().all(dim=1).tolist()
    bad = [first + place for place, fine in enumerate(finite) if not fine]
    more = f" and {len(bad) - NAMED} more" if len(bad) > NAMED else ""
    return f" of expert{'s' if len(bad) > 1 else ''} {', '.join(map(str, bad[:NAMED]))}{more}"


def _parameters(
    chunks: Sequence[nn.Module], stages: Sequence[int]
) -> Iterator[tuple[str, nn.Parameter, tuple[int, int], bool]]:
    """Yield (full name, parameter, depth, own). `own`: this rank's gradient may have been bad before the reduction."""
    seen: set[int] = set()
    for chunk, stage in zip(chunks, stages, strict=True):
        noted = getattr(chunk, "spoiled_before_reduction", None)
        spoiled = None if noted is None else noted()
        for place, (path, parameter) in enumerate(getattr(chunk, "module", chunk).named_parameters()):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                own = spoiled is None or any(parameter is other for other in spoiled)
                yield name_of(parameter, path), parameter, (stage, place), own


def _bad_values(x: Tensor) -> str:
    """Return text such as `2 NaN and 1 infinite of 64`, or an empty string if all are finite."""
    nan, infinite = (int(bad.sum()) for bad in (x.isnan(), x.isinf()))
    words = [f"{count} {word}" for count, word in ((nan, "NaN"), (infinite, "infinite")) if count]
    return f"{' and '.join(words)} of {x.numel()}" if words else ""


def coordinates(groups: ParallelGroups, *, of_experts: bool = False) -> str:
    """Return this rank's place on each axis of more than one rank, such as `tp 1, dp 0`; `alone` without such axes.

    of_experts: take the axes of expert parameters, such as `etp 0, ep 1, edp 0, pp 1`.
    """
    names = ("etp", "ep", "edp", "pp") if of_experts else ("tp", "cp", "dp", "pp")
    axes: dict[str, Group] = {name: getattr(groups, name) for name in names}
    return ", ".join(f"{name} {group.rank}" for name, group in axes.items() if group.size > 1) or "alone"


def sentence(findings: Sequence[Finding]) -> str:
    """Return the origin as a sentence: findings of the first kind, on ranks that did not only receive them."""
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
