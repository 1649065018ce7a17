"""Learning-rate shapes against their formulas, written out independently per style."""

import itertools
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from labkit.config import OptimConfig, RunConfig, TrainConfig
from labkit.train.lr_schedule import STYLES, WSD_TAILS, LearningRate, build_lr_schedule


def rate(**fields) -> LearningRate:
    return LearningRate(**{"max_lr": 8.0, "min_lr": 2.0, "warmup_steps": 10, "decay_steps": 110, **fields})


def test_warm_up_is_linear_from_zero_to_the_peak_in_every_style():
    for style in STYLES:
        schedule = rate(style=style, wsd_decay_steps=20)
        assert [schedule(step) for step in (0, 1, 5, 10)] == pytest.approx([0.0, 0.8, 4.0, 8.0])


@pytest.mark.parametrize(
    ("style", "step", "expected"),
    [
        ("constant", 11, 8.0),
        ("constant", 10_000, 8.0),
        ("cosine", 60, 5.0),
        ("cosine", 35, 2.0 + 6.0 * 0.5 * (1 + math.sqrt(0.5))),
        ("cosine", 110, 2.0),
        ("cosine", 111, 2.0),
        ("linear", 60, 5.0),
        ("linear", 35, 6.5),
        ("linear", 500, 2.0),
        ("inverse-square-root", 40, 4.0),
        ("inverse-square-root", 90, 8.0 / 3),
    ],
)
def test_shapes(style, step, expected):
    assert rate(style=style)(step) == pytest.approx(expected)


def test_inverse_square_root_stops_at_the_floor():
    schedule = rate(style="inverse-square-root", min_lr=4.0, decay_steps=1000)
    assert schedule(40) == pytest.approx(4.0)
    assert schedule(90) == 4.0


@pytest.mark.parametrize(
    ("tail", "share_at_quarter"),
    [
        ("linear", 0.75),
        ("cosine", 0.5 * (1 + math.sqrt(0.5))),
        ("exponential", 2 * 0.5**0.25 - 1),
        ("minus-sqrt", 0.5),
    ],
)
def test_wsd_is_flat_and_then_follows_its_tail(tail, share_at_quarter):
    schedule = rate(style="wsd", wsd_decay_steps=40, wsd_decay_style=tail)
    assert {schedule(step) for step in range(10, 71)} == {8.0}
    assert schedule(80) == pytest.approx(2.0 + 6.0 * share_at_quarter)
    assert schedule(110) == pytest.approx(2.0)


@given(
    style=st.sampled_from(STYLES),
    tail=st.sampled_from(sorted(WSD_TAILS)),
    warmup=st.integers(0, 50),
    length=st.integers(2, 200),
    floor=st.floats(0.0, 1.0),
)
def test_after_the_warm_up_it_never_rises_and_stays_between_floor_and_peak(style, tail, warmup, length, floor):
    schedule = LearningRate(
        max_lr=1.0, min_lr=floor, style=style, warmup_steps=warmup, decay_steps=warmup + length,
        wsd_decay_steps=max(1, length // 3), wsd_decay_style=tail,
    )  # fmt: skip
    rates = [schedule(step) for step in range(warmup, warmup + length + 20)]
    assert all(floor - 1e-12 <= value <= 1.0 + 1e-12 for value in rates)
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(rates))


def test_build_takes_the_length_of_the_run_and_a_tenth_of_it_for_the_tail():
    schedule = build_lr_schedule(OptimConfig(lr=1.0, lr_schedule="wsd", wsd_decay_style="linear"), 200)
    assert (schedule.decay_steps, schedule.wsd_decay_steps) == (200, 20)
    assert (schedule(180), schedule(190)) == (1.0, pytest.approx(0.5))


@given(
    style=st.sampled_from(STYLES),
    warmup=st.integers(0, 30),
    decay=st.none() | st.integers(1, 30),
    tail=st.none() | st.integers(1, 30),
    steps=st.integers(1, 30),
    lr=st.sampled_from((0.0, 1e-3)),
    floor=st.sampled_from((0.0, 1e-3, 2e-3)),
)
def test_what_the_rules_let_pass_has_a_rate_at_every_step(style, warmup, decay, tail, steps, lr, floor):
    tail = tail if style == "wsd" else None  # elsewhere it is refused for having no effect
    decay, floor = (None, 0.0) if style == "constant" else (decay, floor)  # likewise
    optim = OptimConfig(
        lr=lr, min_lr=floor, lr_schedule=style, warmup_steps=warmup, decay_steps=decay, wsd_decay_steps=tail
    )
    assume(RunConfig(optim=optim, train=TrainConfig(steps=steps)).problems() == [])
    schedule = build_lr_schedule(optim, steps)
    assert all(0.0 <= schedule(step) <= lr for step in range(2 * steps))
    assert floor <= schedule(steps + 30)
