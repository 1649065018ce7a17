"""Failed captures on a GPU, workspaces of cuBLAS, and what may change between replays.

Tests that fail a capture on purpose run in a process each: where the repair does not succeed, they break no other.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from graph_rules import Machine, stack
from graph_rules_changes import *  # noqa: F403

from labkit.graphs import make_graphed_callables
from labkit.graphs.cuda.local_backend import LocalBackend

pytestmark = pytest.mark.gpu

START = """
import torch
from labkit.graphs import GraphCaptureError, make_graphed_callables
from labkit.graphs.cuda.local_backend import LocalBackend
from labkit.parallel.random import RngTracker

tracker = RngTracker("cuda")
tracker.add("mine", 7)
backend = LocalBackend([tracker])

def drawn():
    with tracker.fork("mine"):
        named = torch.rand(4, device="cuda")
    return torch.cat([named, torch.rand(4, device="cuda")])

def refused(body, pool):
    try:
        with backend.capturing(pool, "broken"):
            body()
    except GraphCaptureError as error:
        return str(error)
    raise AssertionError("the capture did not fail")

def waits():
    with tracker.fork("mine"):
        x = torch.rand(4, device="cuda")
    x.sum().item()

def works(pool):
    drawn()
    torch.cuda.empty_cache()
    torch.empty(8, pin_memory=True)
    with backend.capturing(pool, "good") as graph:
        y = drawn() * 2
    states = torch.cuda.get_rng_state(), tracker.get_states()
    graph.replay()
    replayed = y.clone()
    torch.cuda.set_rng_state(states[0])
    tracker.set_states(states[1])
    assert torch.equal(replayed, drawn() * 2)
    graph.reset()
"""

WAITING = """
pool = backend.new_pool()
torch.cuda.manual_seed(1)
before = torch.cuda.get_rng_state()
assert "cannot be captured" in refused(waits, pool)
assert torch.equal(torch.cuda.get_rng_state(), before)
works(pool)
"""

UNJOINED = """
pool, other = backend.new_pool(), torch.cuda.Stream()
def unjoined():
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        torch.zeros(4, device="cuda").add_(1)
refused(unjoined, pool)
works(pool)
"""

LIVING = """
pool = backend.new_pool()
x = torch.ones(64, 64, device="cuda")
with backend.warming_up(pool):
    x @ x
backend.before_captures(pool)
with backend.capturing(pool, "first") as first:
    y = x @ x
refused(waits, pool)
y.zero_()
first.replay()
assert torch.equal(y, torch.full_like(y, 64.0))
works(pool)
first.replay()
assert torch.equal(y, torch.full_like(y, 64.0))
"""

HUNDRED = """
def lots():
    with tracker.fork("mine"):
        x = torch.rand(1 << 20, device="cuda")
    x.sum().item()
for i in range(100):
    refused(lots, backend.new_pool())
    if i == 10:
        torch.cuda.empty_cache()
        held = torch.cuda.memory_reserved()
works(backend.new_pool())
torch.cuda.empty_cache()
assert torch.cuda.memory_reserved() <= held, (torch.cuda.memory_reserved(), held)
"""

TRAINED = """
layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)).cuda()
bad = torch.nn.Module()
bad.forward = lambda x: x * x.detach().sum().item()
sample = lambda: (torch.randn(4, 8, device="cuda", requires_grad=True),)
try:
    make_graphed_callables((layer, bad), (sample(), sample()))
except GraphCaptureError:
    pass
call = make_graphed_callables(layer, sample())
x = torch.randn(4, 8, device="cuda", requires_grad=True)
state = torch.cuda.get_rng_state()
y = call(x).clone()
torch.cuda.set_rng_state(state)
assert torch.equal(layer(x), y)
"""


@pytest.fixture
def machine() -> Machine:
    return Machine("local", "cuda")


def output_of(script: str) -> str:
    """What a process of its own prints."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout


@pytest.mark.parametrize("script", [WAITING, UNJOINED, LIVING, HUNDRED, TRAINED],
                         ids=["waiting", "unjoined", "beside living graphs", "a hundred", "in a set"])  # fmt: skip
def test_a_process_goes_on_after_a_failed_capture(script: str) -> None:
    output_of(START + script)


# ---- workspaces of cuBLAS, and the graphs that read them ----


def test_a_pool_holds_no_workspace(machine: Machine) -> None:
    """32 MiB on Hopper, where the layer's own tensors have some kilobytes."""
    [layer] = stack(machine, 1)
    for warmup in (0, 2):
        call = make_graphed_callables(layer, (machine.random(grad=True),), num_warmup=warmup)
        assert call.pool.live_bytes < 1 << 20
        call.reset()


def test_workspaces_are_as_many_bytes_as_predicted() -> None:
    """Measured at the first use of a stream: other tests of this process may have had it before."""
    script = """
import torch
from labkit.graphs import predict_workspaces
from labkit.graphs.cuda.local_backend import LocalBackend
pool = LocalBackend().new_pool()
LocalBackend().before_captures(pool)
print(pool.workspace_bytes, predict_workspaces(torch.cuda.get_device_capability()))
"""
    measured, predicted = map(int, output_of(script).split())
    assert measured == predicted


def test_a_reset_takes_nothing_from_living_graphs() -> None:
    """pytorch#193402: a split product writes through its workspace, and torch from 2.12 on frees that at a reset."""
    backend = LocalBackend()
    x = torch.randn(64, 1 << 16, device="cuda", dtype=torch.bfloat16)
    expected = x @ x.t()
    graphs, results = [], []
    for pool in (first := backend.new_pool(), first, backend.new_pool()):
        backend.before_captures(pool)
        with backend.capturing(pool, "product") as graph:
            results.append(x @ x.t())
        graphs.append(graph)
    graphs[0].reset()
    graphs[2].reset()
    torch.cuda.empty_cache()
    taken = [torch.full((1 << 20,), 7, device="cuda", dtype=torch.int64) for _ in range(16)]
    graphs[1].replay()
    torch.cuda.synchronize()
    assert torch.equal(results[1], expected)
    assert all(bool((block == 7).all()) for block in taken), "a replay wrote over other tensors"
