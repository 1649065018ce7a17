"""Learning rates: a linear warm-up, then one of five shapes.

`step` counts finished optimizer steps, as in Megatron. The first step of a run is step 0: with a warm-up its learning
rate is 0, and step `warmup_steps` has the peak. The learning rate depends on nothing but the step, so a resumed run
needs only its step number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from labkit.config import OptimConfig

SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda r: 1.0 - r,
    "cosine": lambda r: 0.5 * (1.0 + math.cos(math.pi * r)),
}
"""Shapes of the decay from 1 at r = 0 to 0 at r = 1."""

WSD_TAILS: dict[str, Callable[[float], float]] = SHAPES | {
    "exponential": lambda r: 2.0 * 0.5**r - 1.0,
    "minus-sqrt": lambda r: 1.0 - math.sqrt(r),
}
"""Shapes of the last phase of `wsd`: warm-up, stable, decay (arXiv 2404.06395; tails: arXiv 2405.18392)."""

STYLES = ("constant", "cosine", "linear", "inverse-square-root", "wsd")


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """The learning rate as a function of the step: `LearningRate(...)(step)`. `labkit.config` checks its numbers."""

    max_lr: float
    """Peak, at the end of the warm-up."""
    min_lr: float = 0.0
    """Smallest rate of the decay, and the rate of every step after `decay_steps`; unused by `constant`."""
    style: str = "cosine"
    """One of STYLES."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0."""
    decay_steps: int = 1
    """Step at the end of the decay, counted from the start of the run."""
    wsd_decay_steps: int = 0
    """Length of the last phase of `wsd`."""
    wsd_decay_style: str = "exponential"
    """Shape of the last phase of `wsd`: one of WSD_TAILS."""

    def __call__(self, step: int) -> float:
        """Return the learning rate of the optimizer step after `step` finished steps."""
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            return self.max_lr * step / self.warmup_steps
        if self.style == "constant":
            return self.max_lr
        if step > self.decay_steps:
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.max_lr * math.sqrt(max(self.warmup_steps, 1) / max(step, 1)))
        return self.min_lr + self._share(step) * (self.max_lr - self.min_lr)

    def _share(self, step: int) -> float:
        """Return the share of `max_lr - min_lr` that remains at `step`."""
        if self.style != "wsd":
            return SHAPES[self.style]((step - self.warmup_steps) / (self.decay_steps - self.warmup_steps))
        start = self.decay_steps - self.wsd_decay_steps
        return 1.0 if step <= start else WSD_TAILS[self.wsd_decay_style]((step - start) / self.wsd_decay_steps)


def build_lr_schedule(optim: OptimConfig, steps: int) -> LearningRate:
    """Return the learning rate of a run of `steps` optimizer steps."""
    decay_steps = optim.decay_steps if optim.decay_steps is not None else steps
    tail = optim.wsd_decay_steps if optim.wsd_decay_steps is not None else max(1, decay_steps // 10)
    return LearningRate(
        max_lr=optim.lr,
        min_lr=optim.min_lr,
        style=optim.lr_schedule,
        warmup_steps=optim.warmup_steps,
        decay_steps=decay_steps,
        wsd_decay_steps=tail,
        wsd_decay_style=optim.wsd_decay_style,
    )
