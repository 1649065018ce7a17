"""What to try against the largest loss of a step, and what the prediction says it would bring. No torch.

A remedy changes fields of the configuration. It is named only if the changed run is legal, and is predicted to take
less time for each sample and to lose a smaller share. Whether it fits into memory is not checked here; `labkit plan`
does that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from labkit.config import ConfigError, RunConfig
from labkit.config.errors import counted
from labkit.plan.machine import Machine
from labkit.plan.rank_steps import AXES
from labkit.plan.step_time import predict_step
from labkit.plan.waterfall import COMPUTE, ROWS, Row, Waterfall, predicted_rows
from labkit.plan.workload import Workload

_STRAGGLER = 1.1
"""A rank is named as slow if its actions take this many times as long as the lower median of its peers."""
_SLOW = 1.5
"""Computation is called slow if it takes this many times as long as predicted."""
_LATE = 3.0
"""The same for communication, whose predictions are less exact."""
_UNEVEN = 1.05
"""A stage is named as long if its actions take this many times as long as the mean of the stages."""


class Remedy(NamedTuple):
    """A change of the configuration."""

    fields: dict[str, Any]
    words: str
    """What the change is, beside its fields."""


def headline(workload: Workload, machine: Machine, found: Waterfall) -> str:
    """Return one sentence: the largest loss, its share of the measured step, and what to try."""
    row = found.largest
    share = f"{row.measured / found.measured:.0%} of the step is {_loss(row, workload)}"
    advice = _slower_than_predicted(row, found) or _advice(row, found) or _best_remedy(row, workload, machine, found)
    return f"{share}; {advice}" if advice else f"{share}."


def _loss(row: Row, workload: Workload) -> str:
    if row.key == "fill":
        microbatches = counted(workload.microbatches, "microbatch")
        return f"the pipeline's fill and drain, with {microbatches} on pp {workload.config.parallel.pp}"
    named = {"gemm": "GEMMs below the machine's peak", "unexplained": "not explained by the Events",
             "actions": "waits for single slow actions of other stages", "stages": "waits for longer stages",
             "pp": "messages between stages, and waits for them", "host": "the host's, between actions"}  # fmt: skip
    return named.get(row.key, ROWS[row.key])


def _slower_than_predicted(row: Row, found: Waterfall) -> str:
    """Return what to look at if the row takes so much longer than predicted that no field of the configuration is to
    blame; an empty text otherwise."""
    if row.key in AXES and row.measured > _LATE * row.predicted > 0:
        ratio = row.measured / row.predicted
        return (
            f"it takes {ratio:,.0f} times as long as predicted, so look at links, cores and other programs first; the "
            "others wait in a collective for a rank that comes late."
        )
    rows = [each for each in found.rows if each.key in ("ideal", *COMPUTE)]
    ratio = sum(each.measured for each in rows) / max(sum(each.predicted for each in rows), 1e-12)
    if row.key not in COMPUTE or ratio < _SLOW:
        return ""
    return (
        f"all computation takes {ratio:.1f} times as long as predicted, so look at clocks, cores and other programs "
        "first, and whether the file of the machine is of this one."
    )


def _advice(row: Row, found: Waterfall) -> str:
    """Return what to look at where no field of the configuration helps; an empty text for the other rows."""
    if row.key == "stragglers":
        slow = [f"rank {rank} ({ratio:.2f})" for rank, _, ratio in found.slowest if ratio > _STRAGGLER]
        who = f"compute longer than their peers: {', '.join(slow[:4])}" if slow else "no rank is slow in all steps"
        return f"{who}; look at the clocks, the cores and the other programs of their machines."
    if row.key == "stages":
        stage = max(range(len(found.stage_loads)), key=found.stage_loads.__getitem__)
        measured, predicted = found.stage_loads[stage], found.predicted_loads[stage]
        cause = "move layers away from it" if predicted > _UNEVEN else "the layers do not explain it: look at its ranks"
        where = f"the actions of pipeline rank {stage} take {measured:.2f} times the mean"
        return f"{where} (predicted {predicted:.2f}); {cause}."
    return {
        "actions": "the same action takes much longer at times: other programs, or routing that changes.",
        "unexplained": "ranks began or ended the step at different times, such as one that writes files.",
    }.get(row.key, "")


def _best_remedy(row: Row, workload: Workload, machine: Machine, found: Waterfall) -> str:
    """Return the first remedy that the prediction likes, in words; an empty text if none is."""
    before = found.prediction.seconds / workload.config.train.global_batch_size
    had = row.predicted / found.predicted
    for remedy in _remedies(row.key, workload):
        try:
            config = workload.config.replaced(remedy.fields)
            if config.problems(workload.world_size):
                continue
            changed = Workload(config, workload.world_size, software=workload.software)
            step = predict_step(changed, machine)
        except (ConfigError, ValueError):  # not legal, or without times
            continue
        after = step.seconds / config.train.global_batch_size
        share = predicted_rows(changed, machine, step)[row.key] / step.seconds
        if after >= before or share >= had:
            continue
        options = " ".join(f"--{name} {str(value).lower()}" for name, value in remedy.fields.items())
        return (
            f"try {options} ({remedy.words}): predicted to bring it from {had:.0%} to {share:.0%}, "
            f"and the time of a sample down by {1 - after / before:.0%}."
        )
    return ""


def _remedies(key: str, workload: Workload) -> Iterator[Remedy]:
    """Yield the remedies against a row, the best first."""
    config = workload.config
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    larger = Remedy({"train.global_batch_size": 4 * batch}, f"{4 * workload.microbatches} microbatches")
    wider = Remedy({"train.micro_batch_size": 2 * micro}, "larger GEMMs, fewer launches")
    if key == "fill":
        yield larger
        yield Remedy({"parallel.vpp": 2 * config.parallel.vpp}, "interleaved stages")
    elif key == "pp":
        yield Remedy({"schedule.overlap_p2p_comm": True}, "messages during computation")
        yield larger
    elif key == "recompute":
        yield Remedy({"model.recompute_granularity": "none"}, "if the activations fit")
        yield Remedy({"model.recompute_granularity": "selective"}, "if the activations fit")
    elif key == "dp":
        yield Remedy({"optim.overlap_grad_reduce": True}, "gradients during the last backward")
        yield larger
    elif key in ("tp", "cp", "ep"):
        yield from _less_communication(key, config)
    elif key == "optimizer":
        yield Remedy({"optim.distributed_optimizer": True}, "each replica updates its share")
        yield larger
    elif key == "host":
        yield larger
    else:
        if key == "attention" and config.model.attention_backend in ("unfused", "math"):
            yield Remedy({"model.attention_backend": "fused"}, "a fused kernel")
        yield wider
        yield Remedy({**wider.fields, "train.global_batch_size": 2 * batch}, wider.words)


def _less_communication(axis: str, config: RunConfig) -> Iterator[Remedy]:
    if axis == "tp" and not config.parallel.sequence_parallel:
        yield Remedy({"parallel.sequence_parallel": True}, "norms sharded, too")
    size = getattr(config.parallel, axis)
    fields: dict[str, Any] = {f"parallel.{axis}": size // 2}
    if axis == "tp" and size == 2:
        fields["parallel.sequence_parallel"] = False
    yield Remedy(fields, "more replicas instead, if the model fits")
