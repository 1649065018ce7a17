"""One rank that sleeps in every step is named in the metrics and on the terminal, and no other rank ever is."""

from __future__ import annotations

import os
import re
import time
from typing import Any

import pytest
from torch import nn

from labkit.config import RunConfig, presets
from labkit.launch import rank_info, run
from labkit.train import pretrain
from labkit.train.forward_step import gpt_forward_step

STEPS = 45


def small(**changes: Any) -> RunConfig:
    shape = {"layers": 2, "hidden": 16, "heads": 2, "seq_length": 16, "global_batch_size": 4, "steps": STEPS}
    return presets.tiny().override(shape | {"record_events": False} | changes)


def paced(config: RunConfig, slow: int, since: int) -> list[tuple[int, str]]:
    """Train while each rank sleeps 20 ms a microbatch, and rank `slow` 40 ms from the microbatch `since` on."""
    calls = 0

    def forward_step(data_iterator: Any, model: nn.Module) -> Any:
        nonlocal calls
        calls += 1
        time.sleep(0.04 if rank_info().rank == slow and calls > since else 0.02)
        return gpt_forward_step(data_iterator, model)

    result = pretrain(config, forward_step=forward_step)
    return [(step, said) for step, texts in result.series("slow_ranks") for said in texts]


@pytest.mark.parametrize("interval", [1, 10])
def test_a_rank_that_sleeps_is_named_within_20_steps(interval: int) -> None:
    shown: list[dict[str, Any]] = []
    config = small(log_interval=interval)
    results = run(paced, 2, config, 1, 0, progress=shown.append)
    assert results[0] == results[1], "every rank knows"
    ((step, said),) = results[0]
    assert step <= 20 + 2 * interval  # the first steps warm up
    assert re.match(r"rank 1 computes [12]\.\d times as long as the median of its stage for 20 steps \(host ", said)
    assert [values["slow_ranks"] for values in shown if "slow_ranks" in values] == [[said]]


@pytest.mark.sweep
def test_a_lone_rank_of_a_stage_that_becomes_slow_is_named() -> None:
    """Four microbatches a step: from step 43 on."""
    results = run(paced, 2, small(pp=2, steps=70), 0, 42 * 4)
    ((step, said),) = results[0]
    assert 42 + 16 <= step <= 42 + 25 and "rank 0 computes" in said and "as long as before" in said


@pytest.mark.sweep
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 2}, {"pp": 4}, {"ep": 2, "num_experts": 4}], ids=str)
def test_nobody_is_named_in_a_thousand_steps(layout: dict[str, Any]) -> None:
    """Four ranks, however few cores there are."""
    (result, *_) = run(pretrain, 4, small(steps=1000, log_interval=1, global_batch_size=8, layers=4, **layout))
    assert result.series("slow_ranks") == [], f"load {os.getloadavg()}"
