"""Loss scales: the rule step by step, and against torch's own scaler."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.config import OptimConfig
from labkit.train.loss_scaler import LARGEST_SCALE, LossScaler, build_loss_scaler


def adaptive(scale: float, **numbers: float) -> LossScaler:
    return LossScaler(scale, adaptive=True, **numbers)


def scales(scaler: LossScaler, steps: str) -> list[float]:
    """The scale after each step; `x` is an overflow, `.` a good step."""
    found = []
    for step in steps:
        scaler.update(step == "x")
        found.append(scaler.scale)
    return found


def test_patience_is_used_up_once_and_comes_back_only_with_growth():
    scaler = adaptive(64.0, min_scale=8.0, growth_interval=3, hysteresis=2)
    assert scales(scaler, "x") == [64.0], "the first overflow is forgiven"
    assert scales(scaler, "..x") == [64.0, 64.0, 32.0], "two good steps do not restore the patience"
    assert scales(scaler, "x") == [16.0], "used up, every overflow lowers"
    assert scales(scaler, "...") == [16.0, 16.0, 32.0], "three good steps in a row raise"
    assert scales(scaler, "x") == [32.0], "and restore the patience"
    assert scales(scaler, "..x...") == [32.0, 32.0, 16.0, 16.0, 16.0, 32.0], "an overflow restarts the count"
    assert scales(scaler, "xxxxx") == [32.0, 16.0, 8.0, 8.0, 8.0], "never below the minimum"


def test_it_does_not_grow_past_what_the_fp32_loss_can_bear():
    scaler = adaptive(LARGEST_SCALE / 2, growth_interval=1)
    assert scales(scaler, "...") == [LARGEST_SCALE] * 3
    assert torch.tensor(1.0).mul(scaler.scale).isfinite()
    assert not torch.tensor(1.0).mul(2 * scaler.scale).isfinite()


@given(
    steps=st.text("x.", max_size=60),
    interval=st.integers(1, 5),
)
def test_with_a_hysteresis_of_one_it_is_torchs_grad_scaler(steps: str, interval: int):
    ours = adaptive(1024.0, min_scale=1e-30, growth_interval=interval, hysteresis=1)
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=interval)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for step in steps:
        theirs.scale(weight.sum()).backward()
        if step == "x":
            weight.grad.fill_(math.inf)
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        ours.update(step == "x")
        assert ours.scale == pytest.approx(theirs.get_scale(), rel=1e-6)


def test_steps_that_no_smaller_scale_cures_are_counted():
    scaler = adaptive(4.0, min_scale=2.0, hysteresis=1)
    counts = []
    for step in "xxxx.x":
        scaler.update(step == "x")
        counts.append(scaler.hopeless_steps)
    assert counts == [0, 1, 2, 3, 0, 1], "the first overflow could still lower the scale"
    constant = LossScaler(8.0)
    for found_inf in (True, True):
        constant.update(found_inf)
    assert (constant.scale, constant.hopeless_steps) == (8.0, 2)


@pytest.mark.parametrize(
    ("scaler", "advice"),
    [
        (
            LossScaler(2.0**26),
            "optim.loss_scale = 67108864 may be too large for fp16: lower it, or set it to null",
        ),
        (
            adaptive(2.0**16, min_scale=2.0**15),
            "optim.min_loss_scale = 32768 may be too large for fp16: lower",
        ),
        (LossScaler(), "A smaller loss scale does not help: look for an operation without a finite gradient"),
        (adaptive(2.0**16), "A smaller loss scale does not help"),
    ],
)
def test_a_scale_that_is_held_too_large_is_what_the_advice_names(scaler: LossScaler, advice: str):
    assert scaler.advice.startswith(advice)


def test_the_gradient_is_that_of_the_scaled_loss():
    x = torch.tensor(3.0, requires_grad=True)
    adaptive(1024.0).scale_loss(x * x).backward()
    assert x.grad == 6.0 * 1024.0


def test_each_precision_gets_the_scale_it_needs():
    for precision in ("fp32", "bf16", "fp64"):
        assert build_loss_scaler(OptimConfig(precision=precision)).scale == 1.0
    constant = build_loss_scaler(OptimConfig(precision="fp16", loss_scale=128.0))
    assert (constant.adaptive, constant.scale) == (False, 128.0)
    found = build_loss_scaler(
        OptimConfig(precision="fp16", initial_loss_scale=4.0, min_loss_scale=2.0, loss_scale_window=7, hysteresis=3)
    )
    assert (found.adaptive, found.scale, found.min_scale, found.growth_interval, found.hysteresis) == (
        True,
        4.0,
        2.0,
        7,
        3,
    )


def test_a_checkpoint_of_a_constant_scale_leaves_an_adaptive_one_as_new_and_takes_its_own():
    constant, found = LossScaler(8.0), adaptive(64.0, hysteresis=1)
    constant.update(True)
    found.restore(constant.state())
    assert (found.scale, found.hopeless_steps) == (64.0, 0)
    assert scales(found, "x.x") == [32.0, 32.0, 16.0]
    again = adaptive(64.0, hysteresis=1)
    again.restore(found.state())
    assert again.state() == found.state()
    constant.restore(found.state())
    assert (constant.scale, constant.hopeless_steps) == (8.0, 0)
