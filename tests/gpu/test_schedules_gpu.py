"""Pipelines on CUDA: when actions ran, the weight-gradient store under autograd's own threads, ranks on one GPU."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch

from labkit.comm.stream_clock import StreamClock
from labkit.config import ModelConfig, OptimConfig, ParallelConfig, RunConfig, ScheduleConfig, TrainConfig
from labkit.events import Event, recording
from labkit.launch import run
from labkit.parallel import Group, ParallelMLP, WeightGradStore
from labkit.schedules import build_schedule

pytestmark = pytest.mark.gpu

MODEL = ModelConfig(layers=4, hidden=64, heads=4, vocab_size=1024, seq_length=64)
ACTIONS = ("forward", "backward", "input_grad", "weight_grad")


def test_an_action_is_timed_where_it_ran_and_the_host_does_not_wait_for_it() -> None:
    a = torch.randn(4096, 4096, device="cuda")
    torch.mm(a, a)
    with recording(0) as recorder:
        clock = StreamClock(a.device)
        torch.cuda.synchronize()
        before = time.perf_counter()
        for number in range(4):
            with clock.span(f"0F{number}", "forward", microbatch=number):
                for _ in range(20):
                    torch.mm(a, a)
        launched = time.perf_counter()
        torch.cuda.synchronize()
        after = time.perf_counter()
    events = recorder.events
    assert [event.name for event in events] == [f"0F{number}" for number in range(4)]
    for event, following in pairwise(events):
        assert event.start < event.end <= following.start
    assert events[0].start > before - 1e-3 and events[-1].end < after + 1e-3, "on the clock of the host"
    total = sum(event.duration for event in events)
    assert 0.5 * (after - before) < total < 1.05 * (after - before), "the products fill the time"
    assert launched - before < total, "the host ran ahead"


def test_i_and_w_equal_b_where_backward_runs_on_another_thread() -> None:
    alone = Group("tp", (0,), 0)
    gradients = []
    for split in (False, True):
        layer = ParallelMLP("mlp", 64, 128, group=alone, gradient_accumulation_fusion=True, device="cuda")
        layer.fc1.weight.main_grad = torch.zeros_like(layer.fc1.weight)  # type: ignore[attr-defined]
        x = torch.randn(8, 2, 64, generator=torch.Generator().manual_seed(1)).cuda().requires_grad_()
        store = WeightGradStore()
        if split:
            with store.collecting(0):
                layer(x).square().sum().backward()
            assert layer.fc2.weight.grad is None and not layer.fc1.weight.main_grad.any()
            store.run(0)
        else:
            layer(x).square().sum().backward()
        gradients.append([x.grad, layer.fc1.weight.main_grad, layer.fc2.weight.grad, layer.fc2.bias.grad])  # type: ignore[union-attr]
    for whole, parts in zip(*gradients, strict=True):
        assert torch.equal(whole, parts)


def run_config(pp: int, schedule: str) -> RunConfig:
    return RunConfig(
        model=MODEL,
        parallel=ParallelConfig(pp=pp),
        schedule=ScheduleConfig(name=schedule),
        optim=OptimConfig(precision="fp64", lr=1e-3),
        train=TrainConfig(steps=3, micro_batch_size=2, global_batch_size=8),
    )


def trained(config: RunConfig) -> tuple[list[float], list[Event]]:
    from labkit.train import pretrain

    result = pretrain(config)
    return result.losses, [event for event in result.events if event.kind in ACTIONS and event.chunk is not None]


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble_h1", "zbv"])
def test_two_pipeline_ranks_on_one_gpu_train_like_one_and_their_events_are_the_row(name: str) -> None:
    [(alone, _)] = run(trained, 1, run_config(1, "auto"), backend="gloo", device="cuda", timeout=180)
    config = run_config(2, name)
    schedule = build_schedule(config.schedule, pp=2, microbatches=4)
    for rank, (losses, events) in enumerate(run(trained, 2, config, backend="gloo", device="cuda", timeout=180)):
        assert losses == pytest.approx(alone, rel=1e-9)
        row = [str(action) for action in schedule.actions(rank)]
        assert [event.name for event in events][-len(row) :] == row
        last = events[-len(row) :]
        assert all(event.duration > 0 for event in last)
        assert all(event.end <= following.start + 1e-6 for event, following in pairwise(last))
