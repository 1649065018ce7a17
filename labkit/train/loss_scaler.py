"""Loss scales for fp16 (arXiv 1710.03740, section 3.2).

fp16 has no number between 0 and 6e-8, where many gradients lie. The scaler multiplies the loss by a scale before the
backward, which multiplies all gradients too. The training step divides the gradients by the scale in fp32, before
clipping. If the scale is too large, a gradient overflows. Then all ranks skip the step and, after some such steps, the
scaler lowers the scale.

A scaler has Python numbers only. All ranks agree on the argument of `update`, so all have the same scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from labkit.config import OptimConfig

LARGEST_SCALE = 2.0**127
"""Upper limit of the scale: the largest power of two in fp32, the type of the loss."""


class LossScaler(Protocol):
    """The properties and methods that the training step needs of a loss scale."""

    @property
    def scale(self) -> float:
        """The factor of this step's loss."""
        ...

    @property
    def hopeless_steps(self) -> int:
        """Number of skipped steps in a row at the smallest scale of this scaler."""
        ...

    @property
    def advice(self) -> str:
        """A sentence that tells the user how to mend many hopeless steps."""
        ...

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return `loss` times `scale`, for its backward."""
        ...

    def update(self, found_inf: bool) -> None:
        """Take in a step. `found_inf`: a gradient was not finite on some rank."""
        ...

    def state(self) -> dict[str, float]:
        """The numbers that steps move, for a checkpoint."""
        ...

    def restore(self, state: Mapping[str, float]) -> None:
        """Set the numbers that `state` returned; a scaler of another kind in the checkpoint leaves this one as new."""
        ...


class ConstantLossScaler:
    """A constant scale; 1 does not scale."""

    def __init__(self, scale: float = 1.0) -> None:
        """Raises ValueError for a scale that is not a positive number."""
        _check_positive("the loss scale", scale)
        self.scale = scale
        self.hopeless_steps = 0

    @property
    def advice(self) -> str:
        """Suggest a lower scale if it is above 1, because it may cause the overflow."""
        return _lower("optim.loss_scale", self.scale, "lower it, or set it to null for a scale that adapts")

    def scale_loss(self, loss: Tensor) -> Tensor:
        """`loss` times `scale`."""
        return loss * self.scale

    def update(self, found_inf: bool) -> None:
        """Count hopeless steps; the scale stays."""
        self.hopeless_steps = self.hopeless_steps + 1 if found_inf else 0

    def state(self) -> dict[str, float]:
        """The count of hopeless steps."""
        return {"hopeless_steps": self.hopeless_steps}

    def restore(self, state: Mapping[str, float]) -> None:
        """Set the count of hopeless steps."""
        self.hopeless_steps = int(state.get("hopeless_steps", 0))


class DynamicLossScaler:
    """A scale that adapts: as large as the gradients allow (Megatron's DynamicGradScaler).

    An overflow resets the count of good steps and uses up one unit of hysteresis. The overflow that uses up the last
    unit, and each later one, lowers the scale, but not below its minimum. Only `growth_interval` good steps in a row
    raise the scale and restore the hysteresis. With a hysteresis of 1 the rule is that of torch's `GradScaler`, which
    has no minimum.
    """

    def __init__(
        self,
        initial_scale: float,
        *,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
    ) -> None:
        """Raises ValueError for numbers with which the scale could not move so."""
        _check_positive("min_scale", min_scale)
        _check_positive("initial_scale", initial_scale)
        if initial_scale < min_scale:
            raise ValueError(f"initial_scale is {initial_scale:g}; it must be at least min_scale = {min_scale:g}")
        if not 1.0 < growth_factor < math.inf:
            raise ValueError(f"growth_factor is {growth_factor:g}; it must be above 1, as in 2")
        if not 0.0 < backoff_factor < 1.0:
            raise ValueError(f"backoff_factor is {backoff_factor:g}; it must be between 0 and 1, as in 0.5")
        if growth_interval < 1 or hysteresis < 1:
            raise ValueError(
                f"growth_interval is {growth_interval} and hysteresis {hysteresis}; both must be at least 1"
            )
        self.scale, self.min_scale = initial_scale, min_scale
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self.good_steps = 0
        """Steps without overflow since the last overflow or growth."""
        self.hysteresis_left = hysteresis
        """Overflows until the scale is lowered; at or below 0 each overflow lowers it."""
        self.hopeless_steps = 0

    @property
    def advice(self) -> str:
        """Suggest a lower minimum if it is above 1, because it may cause the overflow."""
        return _lower("optim.min_loss_scale", self.min_scale, "lower it")

    def scale_loss(self, loss: Tensor) -> Tensor:
        """`loss` times `scale`."""
        return loss * self.scale

    def update(self, found_inf: bool) -> None:
        """Move the scale after a step with or without overflow."""
        self.hopeless_steps = self.hopeless_steps + 1 if found_inf and self.scale <= self.min_scale else 0
        if found_inf:
            self.good_steps = 0
            self.hysteresis_left -= 1
            if self.hysteresis_left <= 0:
                self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.good_steps = 0
            self.hysteresis_left = self.hysteresis
            grown = self.scale * self.growth_factor
            self.scale = grown if grown <= LARGEST_SCALE else self.scale

    def state(self) -> dict[str, float]:
        """Scale, counts of good and hopeless steps, and the hysteresis that is left."""
        return {name: getattr(self, name) for name in _MOVING}

    def restore(self, state: Mapping[str, float]) -> None:
        """Set them, if they are those of an adaptive scale."""
        if state.keys() >= set(_MOVING):
            self.scale = float(state["scale"])
            self.good_steps, self.hysteresis_left, self.hopeless_steps = (int(state[name]) for name in _MOVING[1:])


_MOVING = ("scale", "good_steps", "hysteresis_left", "hopeless_steps")


def _lower(name: str, value: float, how: str) -> str:
    """Return advice for gradients that overflow at the scale `value` of `name`. A scale up to 1 causes no overflow."""
    if value > 1.0:
        return f"{name} = {value:.10g} may be too large for fp16: {how}"
    return "A smaller loss scale does not help: look for an operation without a finite gradient"


def _check_positive(name: str, value: float) -> None:
    if not 0.0 < value < math.inf:
        raise ValueError(f"{name} is {value:g}; it must be a finite number above 0, as in 65536")


def build_loss_scaler(optim: OptimConfig) -> LossScaler:
    """Return the scaler for `optim.precision`: for fp16 constant (`optim.loss_scale`) or dynamic, else a scale of 1."""
    if optim.precision != "fp16":
        return ConstantLossScaler()
    if optim.loss_scale is not None:
        return ConstantLossScaler(optim.loss_scale)
    return DynamicLossScaler(
        optim.initial_loss_scale,
        min_scale=optim.min_loss_scale,
        growth_interval=optim.loss_scale_window,
        hysteresis=optim.hysteresis,
    )
