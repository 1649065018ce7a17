"""Loss scales for fp16 (arXiv 1710.03740, section 3.2).

fp16 has no number between 0 and 6e-8, where many gradients lie. The scaler multiplies the loss by a scale before the
backward, which multiplies all gradients too. The training step divides the gradients by the scale in fp32, before
clipping. If the scale is too large, a gradient overflows. Then all ranks skip the step and, after some such steps, the
scaler lowers the scale.

The scale is a Python number. All ranks agree on the argument of `update`, so all have the same scale.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from labkit.config import OptimConfig

GROWTH, BACKOFF = 2.0, 0.5
"""Factors by which an adaptive scale is raised and lowered."""
LARGEST_SCALE = 2.0**127
"""Upper limit of the scale: the largest power of two in fp32, the type of the loss."""


class LossScaler:
    """The factor of the loss in its backward: constant, or adaptive (Megatron's DynamicGradScaler).

    An adaptive scale is as large as the gradients allow. An overflow resets the count of good steps and uses up one
    unit of hysteresis. The overflow that uses up the last unit, and each later one, lowers the scale, but not below its
    minimum. Only `growth_interval` good steps in a row raise the scale and restore the hysteresis. With a hysteresis of
    1 the rule is that of torch's `GradScaler`, which has no minimum.
    """

    def __init__(
        self,
        scale: float = 1.0,
        *,
        adaptive: bool = False,
        min_scale: float = 1.0,
        growth_interval: int = 1000,
        hysteresis: int = 2,
    ) -> None:
        """scale: the first one; a constant scale of 1 does not scale. The other numbers are those of an adaptive scale,
        which `labkit.config` has checked."""
        self.scale, self.adaptive = scale, adaptive
        self.min_scale = min_scale if adaptive else scale
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self.good_steps = 0
        """Steps without overflow since the last overflow or growth."""
        self.hysteresis_left = hysteresis
        """Overflows until the scale is lowered; at or below 0 each overflow lowers it."""
        self.hopeless_steps = 0
        """Number of skipped steps in a row at the smallest scale."""

    @property
    def advice(self) -> str:
        """A sentence that tells the user how to fix many hopeless steps.

        The smallest scale is to blame if it is above 1. A scale up to 1 causes no overflow.
        """
        if self.min_scale <= 1.0:
            return "A smaller loss scale does not help: look for an operation without a finite gradient"
        name = "optim.min_loss_scale" if self.adaptive else "optim.loss_scale"
        how = "lower it" if self.adaptive else "lower it, or set it to null for a scale that adapts"
        return f"{name} = {self.min_scale:.10g} may be too large for fp16: {how}"

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return `loss` times `scale`, for its backward."""
        return loss * self.scale

    def update(self, found_inf: bool) -> None:
        """Take in a step, and move an adaptive scale. `found_inf`: a gradient was not finite on some rank."""
        self.hopeless_steps = self.hopeless_steps + 1 if found_inf and self.scale <= self.min_scale else 0
        if not self.adaptive:
            return
        if found_inf:
            self.good_steps = 0
            self.hysteresis_left -= 1
            if self.hysteresis_left <= 0:
                self.scale = max(self.scale * BACKOFF, self.min_scale)
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.good_steps = 0
            self.hysteresis_left = self.hysteresis
            self.scale = self.scale * GROWTH if self.scale * GROWTH <= LARGEST_SCALE else self.scale

    @property
    def _moving(self) -> tuple[str, ...]:
        """The attributes that steps move; of them only an adaptive scale is not a count."""
        return ("scale", "good_steps", "hysteresis_left", "hopeless_steps") if self.adaptive else ("hopeless_steps",)

    def state(self) -> dict[str, float]:
        """Return the numbers that steps move, for a checkpoint."""
        return {name: getattr(self, name) for name in self._moving}

    def restore(self, state: Mapping[str, float]) -> None:
        """Set the numbers that `state` returned. Those of a constant scale leave an adaptive one as new."""
        if state.keys() >= set(self._moving):
            for name in self._moving:
                setattr(self, name, float(state[name]) if name == "scale" else int(state[name]))


def build_loss_scaler(optim: OptimConfig) -> LossScaler:
    """Return the scaler for `optim.precision`: of fp16 constant (`optim.loss_scale`) or adaptive, else a scale of 1."""
    if optim.precision != "fp16":
        return LossScaler()
    if optim.loss_scale is not None:
        return LossScaler(optim.loss_scale)
    return LossScaler(
        optim.initial_loss_scale,
        adaptive=True,
        min_scale=optim.min_loss_scale,
        growth_interval=optim.loss_scale_window,
        hysteresis=optim.hysteresis,
    )
