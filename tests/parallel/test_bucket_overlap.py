"""Buckets behind a backward that sleeps, over a slow link: when they leave, how the link is shared, what they bring."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from labkit.comm.collectives import all_reduce_async
from labkit.config import ParallelConfig
from labkit.events import Event, recording
from labkit.launch import RankError
from labkit.models.synthetic_load import SleepingLayer
from labkit.parallel import DistributedDataParallel, barrier, delayed, initialize_model_parallel
from labkit.plan import Link

LAYERS, ELEMENTS = 4, 1000
LINK = Link(latency=0.01, bandwidth=1e6)  # 4 kB in 4 ms


def step(overlap: bool) -> tuple[list[Event], list[float]]:
    """Events of a rank's second step (the first learns when gradients are complete), and its gradients."""
    groups = initialize_model_parallel(ParallelConfig())
    layers = [SleepingLayer(f"layer {i}", ELEMENTS, forward=0.002, backward=0.02) for i in range(LAYERS)]
    model = DistributedDataParallel(
        torch.nn.Sequential(*layers), groups, bucket_size=2 * ELEMENTS, overlap_grad_reduce=overlap
    )
    with delayed(LINK.latency, bandwidth=LINK.bandwidth, group="dp_cp"):
        for _ in range(2):
            barrier(groups.world)
            with recording(groups.rank) as recorder:
                model.zero_grad_buffer()
                model(torch.full((3,), float(groups.rank))).sum().backward()
                model.finish_grad_sync()
    return recorder.events, [layer.weight.main_grad.sum().item() for layer in layers]


@pytest.mark.parametrize(("overlap", "buckets", "early"), [(True, 2, 1), (False, 1, 0)])
def test_buckets_leave_with_their_last_gradient_and_share_the_link(on_ranks, overlap, buckets, early) -> None:
    for events, gradients in on_ranks(step, 2, overlap):
        backwards = [event for event in events if event.kind == "backward"]
        sent = sorted((event for event in events if event.kind == "collective"), key=lambda event: event.start)
        assert [event.name for event in backwards] == [f"backward layer {i}" for i in reversed(range(LAYERS))]
        assert [event.bytes for event in sent] == [4 * ELEMENTS * LAYERS // buckets] * buckets
        assert sum(event.start < backwards[-1].start for event in sent) == early
        if overlap:
            assert backwards[1].end <= sent[0].start <= backwards[2].start, "two layers are a bucket"
        for event in sent:
            assert event.duration >= LINK.seconds(event.bytes or 0) - 1e-9
        for before, after in pairwise(sent):
            assert after.end - before.end >= LINK.seconds(after.bytes or 0) - 1e-9, "one after another"
        assert gradients == pytest.approx([3.0] * LAYERS), "d sum(y) / d w adds up to the elements of y"


def no_bandwidth() -> None:
    with delayed(0.0, bandwidth=0.0):
        all_reduce_async(torch.zeros(1), initialize_model_parallel(ParallelConfig()).world).wait()


def test_a_link_that_carries_nothing_is_refused(on_ranks) -> None:
    with pytest.raises(RankError, match=r"0\.0 bytes per second carries nothing; give a positive bandwidth"):
        on_ranks(no_bandwidth, 2)
