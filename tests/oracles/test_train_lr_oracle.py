"""Learning rates equal to megatron-core's OptimizerParamScheduler, step by step."""

import warnings
from types import SimpleNamespace

import pytest

from labkit.train.lr_schedule import STYLES, WSD_TAILS, LearningRate

pytestmark = pytest.mark.oracle


@pytest.fixture(scope="module")
def megatron_scheduler():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("megatron.core.optimizer_param_scheduler", reason="needs megatron-core")
    return module.OptimizerParamScheduler


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize(
    ("style", "tail"), [(style, "exponential") for style in STYLES if style != "wsd"] + [("wsd", t) for t in WSD_TAILS]
)
def test_every_step_of_a_run_and_beyond(megatron_scheduler, style, tail, warmup):
    ours = LearningRate(
        max_lr=3e-4,
        min_lr=1e-5,
        style=style,
        warmup_steps=warmup,
        decay_steps=60,
        wsd_decay_steps=15,
        wsd_decay_style=tail,
    )
    optimizer = SimpleNamespace(param_groups=[{}])
    theirs = megatron_scheduler(
        optimizer, 0.0, 3e-4, 1e-5, warmup, 60, "WSD" if style == "wsd" else style, 0.01, 0.01, 60, "constant",
        wsd_decay_steps=15, lr_wsd_decay_style=tail.replace("-", "_"),
    )  # fmt: skip
    for step in range(80):
        assert ours(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12, abs=1e-18), step
        theirs.step(1)
