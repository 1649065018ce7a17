"""The input-gradient all-reduce hides behind the weight-gradient GEMM.

A collective that sleeps and a GEMM that sleeps need no processor, so the times say what overlaps and what does not,
however busy the machine is. Most tests need no ranks: a group of two with a transport of its own on one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from labkit.comm import collectives, gloo
from labkit.comm.pending import Pending
from labkit.events import Event, recording
from labkit.parallel import Group, delayed, layers
from labkit.parallel.layers import ColumnParallelLinear

COLLECTIVE, GEMM = 0.020, 0.030
ROUNDING = 1e-6
"""Seconds: an Event's duration is the difference of two clock readings, each a rounded double."""


def loopback(x: Tensor, group: Group, op: str, in_place: bool) -> Callable[[], Tensor]:
    """A transport to which the other rank is always a zero tensor."""
    return lambda: x if in_place else x.clone()


@pytest.fixture
def sleeping_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    real = layers.weight_gradient

    def slow(grad_NO: Tensor, x_NI: Tensor, main_grad: Tensor | None = None, **how: bool) -> Tensor | None:
        time.sleep(GEMM)
        return real(grad_NO, x_NI, main_grad, **how)

    monkeypatch.setattr(layers, "weight_gradient", slow)
    monkeypatch.setattr(gloo, "all_reduce", loopback)


def backward_seconds(collective: float) -> tuple[float, list[Event]]:
    """The fastest of several backward passes, and its events."""
    layer = ColumnParallelLinear("fc1", 4, 4, group=Group("tp", (0, 1), 0))
    best, events = float("inf"), []
    for _ in range(10):
        y, _ = layer(torch.ones(2, 1, 4, requires_grad=True))
        with delayed(collective, operation="all_reduce", phase="backward"), recording(0) as recorder:
            started = time.perf_counter()
            y.sum().backward()
            seconds = time.perf_counter() - started
        if seconds < best:
            best, events = seconds, recorder.events
    return best, events


@pytest.mark.usefixtures("sleeping_gemm")
def test_a_collective_of_20_ms_hides_under_a_gemm_of_30_ms() -> None:
    alone, _ = backward_seconds(0.0)
    hidden, events = backward_seconds(COLLECTIVE)
    assert alone >= GEMM
    assert hidden - alone < COLLECTIVE / 2
    named = {event.kind: event for event in events}
    assert named["input_grad"].end <= named["collective"].start <= named["weight_grad"].start, "issued before the GEMM"
    assert named["wait"].start >= named["weight_grad"].end, "awaited after the GEMM"
    assert named["collective"].duration >= COLLECTIVE - ROUNDING


@pytest.mark.usefixtures("sleeping_gemm")
def test_what_exceeds_the_gemm_is_exposed() -> None:
    """The counterpart: the measurement does see a collective that is too long to hide."""
    alone, _ = backward_seconds(0.0)
    exposed, _ = backward_seconds(GEMM + COLLECTIVE)
    assert exposed - alone > COLLECTIVE / 2


def real_events() -> list[str]:
    group = Group("tp", (0, 1), torch.distributed.get_rank(), torch.distributed.group.WORLD)
    layer = ColumnParallelLinear("fc1", 4, 4, group=group)
    y, _ = layer(torch.ones(2, 1, 4, requires_grad=True))
    with recording(group.rank) as recorder:
        y.sum().backward()
    starts = [(e.start, e.kind) for e in recorder.events]
    by_kind = {e.kind: e for e in recorder.events}
    assert by_kind["collective"].start <= by_kind["weight_grad"].start
    assert by_kind["wait"].start >= by_kind["weight_grad"].end
    return [kind for _, kind in sorted(starts)]


def test_the_order_is_the_same_between_real_ranks(on_ranks) -> None:
    order = ["input_grad", "collective", "weight_grad", "wait"]
    assert on_ranks(real_events, 2) == [order, order]


def seconds_on_a_rank() -> dict[str, float]:
    """The fastest backward pass of each kind between real ranks, with a weight gradient that takes 30 ms."""
    from unittest.mock import patch

    group = Group("tp", (0, 1), torch.distributed.get_rank(), torch.distributed.group.WORLD)
    layer = ColumnParallelLinear("fc1", 4, 4, group=group)
    real_gemm, real_reduce = layers.weight_gradient, collectives.all_reduce_async

    def slow(grad_NO: Tensor, x_NI: Tensor, main_grad: Tensor | None = None, **how: bool) -> Tensor | None:
        time.sleep(GEMM)
        return real_gemm(grad_NO, x_NI, main_grad, **how)

    def awaited_at_once(x: Tensor, *args, **settings) -> Pending:
        pending = real_reduce(x, *args, **settings)
        pending.wait()
        return pending

    def once(collective: float) -> float:
        y, _ = layer(torch.ones(2, 1, 4, requires_grad=True))
        collectives.barrier(group)
        with delayed(collective, operation="all_reduce", phase="backward"):
            started = time.perf_counter()
            y.sum().backward()
            return time.perf_counter() - started

    best = dict.fromkeys(("alone", "hidden", "serial"), float("inf"))
    with patch.object(layers, "weight_gradient", slow):
        for _ in range(15):
            best["alone"] = min(best["alone"], once(0.0))
            best["hidden"] = min(best["hidden"], once(COLLECTIVE))
            with patch.object(collectives, "all_reduce_async", awaited_at_once):
                best["serial"] = min(best["serial"], once(COLLECTIVE))
    return best


def test_between_real_ranks_a_collective_of_20_ms_hides_under_a_gemm_of_30_ms(on_ranks) -> None:
    for best in on_ranks(seconds_on_a_rank, 2):
        assert best["alone"] >= GEMM
        assert best["hidden"] - best["alone"] < COLLECTIVE / 2
        assert best["serial"] - best["alone"] > COLLECTIVE / 2, "the same measurement sees what is not hidden"
