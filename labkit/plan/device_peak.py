"""The moment of a step at which a GPU rank has most allocated, and what is alive then. No torch.

Each action of the rank's row keeps or frees activations, and has temporaries while it runs. A forward with the loss
needs the logits. A backward needs them again, as gradients; then the output layer needs its weight gradient; then the
layers need their gradients and what is computed again. The exponentials are gone after the first of the three. In a
merged pair the forward keeps a layer when the backward has freed one, so the two have a layer more than one of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from labkit.config import RunConfig
from labkit.plan.activations import Share
from labkit.plan.device_libraries import Term
from labkit.plan.engine_activations import extra_bytes
from labkit.plan.float8 import saved_bytes
from labkit.plan.fsdp_units import gathered_bytes, unsharded_gradients
from labkit.plan.multi_token import depth_bytes
from labkit.plan.sizes import padded_vocab
from labkit.plan.stage_activations import action_bytes, backward_bytes, stage_bytes
from labkit.plan.stages import StageContents
from labkit.plan.weight_gradients import deferred_bytes, largest_gradient, output_gradient
from labkit.plan.workload import Workload
from labkit.schedules import Schedule

GRADIENTS_AT_ONCE = 2
"""Tensors of the largest size that one operation of a backward needs: the gradients of its output and of its input."""
FUSED_LOGIT_BYTES = 4
"""A further float32 copy of each logit that Megatron's `fused_vocab_parallel_cross_entropy` keeps during the loss: its
compiled parts do not write the exponentials in place. Source: megatron/core/fusions/fused_cross_entropy.py."""


class Moment(NamedTuple):
    """Where the peak is."""

    kept: int
    """Bytes of activations."""
    beside: int
    """Bytes of temporaries."""
    action: str
    """The action that runs, such as `7F3`."""
    in_flight: dict[int, int]
    """Stage -> microbatches whose activations are alive."""


def peak_terms(
    workload: Workload, share: Share, stages: dict[int, StageContents], schedule: Schedule, place: int
) -> tuple[Term, ...]:
    """Return what is alive at the peak and not after a step."""
    moment = _peak(workload, share, stages, schedule, place)
    flying = ", ".join(f"{count} of stage {stage}" for stage, count in moment.in_flight.items())
    terms = [
        Term("activations", moment.kept, f"microbatches in flight: {flying or 'none'}"),
        Term("temporaries", moment.beside, f"{moment.action}: {_temporaries(workload, share, stages)}"),
    ]
    if deferred := deferred_bytes(workload, share, list(stages.values())):
        terms.append(Term("deferred gradients", deferred, "inputs and logits' gradients that wait"))
    if workload.fsdp:
        gathered = gathered_bytes(workload.config, list(stages.values()))
        terms.append(Term("gathered weights", gathered, "what is outside of layers, and two layers"))
    return tuple(terms)


def _peak(workload: Workload, share: Share, stages: dict[int, StageContents], schedule: Schedule, place: int) -> Moment:
    """Return the moment where the sum of what is kept and of the temporaries is largest."""
    kept, whole, forward, backward = np.zeros((4, schedule.num_stages))
    config = workload.config
    partly = config.model.num_microbatches_with_partial_activation_checkpoints
    keeps_all = config.replaced({"model.recompute_granularity": "none"}) if partly else config
    for stage, holds in stages.items():
        kept[stage] = whole[stage] = _kept(workload, config, share, holds)
        if partly:
            whole[stage] = _kept(workload, keeps_all, share, holds)
        forward[stage] = _loss_bytes(workload, share, holds) + _mask_bytes(workload, holds)
        backward[stage] = max(forward[stage], _backward_bytes(workload, share, holds))
    changes = action_bytes(config, schedule, place, kept, whole)
    row = slice(schedule.offsets[place], schedule.offsets[place + 1])
    is_forward, on = schedule.kinds[row] == 0, schedule.stages[row]
    during = np.cumsum(changes) - np.where(is_forward, 0, changes)  # a backward begins with all that it will free
    for second in np.flatnonzero(schedule.merged[row]):
        grows, shrinks, layers = changes[second - 1], -changes[second], len(stages[int(on[second - 1])].layers)
        before = during[second - 1] - grows
        during[second - 1 : second + 1] = before + max(0, grows - shrinks) + grows / max(1, layers)
    beside = np.where(is_forward, forward[on], backward[on])
    peak = int(np.argmax(during + beside))
    flying = np.bincount(on[: peak + 1], np.sign(changes[: peak + 1]), schedule.num_stages)
    flying[on[peak]] += not is_forward[peak] and changes[peak] < 0  # the one that runs backward
    action = str(schedule.action(row.start + peak))
    return Moment(int(during[peak]), int(beside[peak]), action, {s: int(n) for s, n in enumerate(flying) if n})


def _kept(workload: Workload, config: RunConfig, share: Share, holds: StageContents) -> int:
    """Return the bytes that one microbatch keeps on a stage."""
    return (
        stage_bytes(config, share, holds)
        + extra_bytes(
            config.model, share, workload.extras, holds.layers, config.moe, megatron=workload.libraries.megatron
        )
        + saved_bytes(workload, config, share, holds.layers)
        + depth_bytes(workload, config, share, holds)
    )


def _backward_bytes(workload: Workload, share: Share, holds: StageContents) -> int:
    """Return the bytes of temporaries of the output layer or of the layers, less the exponentials that are gone."""
    config, logits = workload.config, _logits(workload, share, holds)
    output = logits * share.element_bytes + output_gradient(config, holds)
    layers = backward_bytes(config, share, holds, GRADIENTS_AT_ONCE) + largest_gradient(config, holds)
    layers += unsharded_gradients(config, holds) if workload.fsdp else 0
    return max(output, layers) - logits * share.wide


def _temporaries(workload: Workload, share: Share, stages: dict[int, StageContents]) -> str:
    """Return in words what the temporaries are the largest of."""
    logits = sum(_logits(workload, share, holds) for holds in stages.values())
    return f"the largest of {logits:,} logits, the output layer's gradient, and {GRADIENTS_AT_ONCE} x the widest tensor"


def _loss_bytes(workload: Workload, share: Share, holds: StageContents) -> int:
    """Return the bytes that the loss of a microbatch needs beside its exponentials."""
    each = share.element_bytes + (FUSED_LOGIT_BYTES if workload.libraries.fused_cross_entropy else 0)
    return _logits(workload, share, holds) * each


def _logits(workload: Workload, share: Share, holds: StageContents) -> int:
    """Return the number of logits of a microbatch on this rank; 0 on a stage without the loss."""
    model = workload.config.model
    return share.tokens(model) * padded_vocab(model, share.tp) // share.tp if holds.loss else 0


def _mask_bytes(workload: Workload, holds: StageContents) -> int:
    """Return the bytes of the attention mask that a batch brings, which the first and last stage receive."""
    if not workload.extras.attention_mask or not (holds.embedding or holds.loss):
        return 0
    return workload.config.train.micro_batch_size * workload.config.model.seq_length**2
