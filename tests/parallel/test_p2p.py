"""The nine send/receive functions in every mode: the right tensor, from the right side, in its own shape."""

import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from labkit import comm as p
from labkit.comm import posting_order
from labkit.config import ParallelConfig
from labkit.launch import run
from labkit.parallel import CommLedger, initialize_model_parallel
from labkit.parallel.deallocation import custom_backward, deallocate_output_tensor
from labkit.train import Timers

MODES = [(batched, variable) for batched in (True, False) for variable in (True, False)]


def _communicator(pp, mode):
    groups = initialize_model_parallel(ParallelConfig(pp=pp))
    return groups, p.p2p_communicator(groups, batch_p2p_comm=mode[0], variable_seq_lengths=mode[1])


def _relay(pp):
    """A value goes down the stages, each adds its own, and comes back: by single and by paired functions, each mode."""
    seen = []
    for mode in MODES:
        groups, c = _communicator(pp, mode)
        rank, shape, dtype = groups.pp.rank, (3, 2, 4), torch.float64
        first, last = rank == 0, rank == pp - 1
        for _ in range(2):
            x = p.recv_forward(c, shape, dtype)
            assert (x is None) == first
            y = (torch.zeros(shape, dtype=dtype) if x is None else x) + 10**rank
            p.send_forward(c, y)
            g = p.recv_backward(c, shape, dtype)
            assert (g is None) == last
            p.send_backward(c, None if first else (torch.zeros(shape, dtype=dtype) if g is None else g) + 1)
        seen.append((y.unique().tolist(), None if g is None else g.unique().tolist(), x is None or x.requires_grad))
        # steady state: activation k goes on while gradient k - 1 comes back
        x = p.recv_forward(c, shape, dtype)
        for k in range(3):
            g = p.send_forward_recv_backward(c, torch.full(shape, 100.0 * rank + k, dtype=dtype), shape, dtype)
            assert last or g.unique().tolist() == [-(100.0 * (rank + 1) + k)]
            assert first or x.unique().tolist() == [100.0 * (rank - 1) + k]
            gradient = torch.full(shape, -(100.0 * rank + k), dtype=dtype)
            if k < 2:
                x = p.send_backward_recv_forward(c, None if first else gradient, shape, dtype)
            else:
                p.send_backward(c, None if first else gradient)
    return seen


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_relay_down_and_back(pp):
    for rank, seen in enumerate(run(_relay, pp, pp)):
        total = float(sum(10**r for r in range(rank + 1)))
        back = None if rank == pp - 1 else [float(pp - 1 - rank)]
        assert seen == [([total], back, True)] * len(MODES)


def _ring(pp):
    """Model chunks make the pipeline a ring; every value names sender and direction, shapes differ by direction."""
    for mode in MODES:
        groups, c = _communicator(pp, mode)
        rank, before, after = groups.pp.rank, (groups.pp.rank - 1) % pp, (groups.pp.rank + 1) % pp
        act = torch.full((2, 1, 4), 10.0 + rank)
        grad = torch.full((2, 1, 4) if not mode[1] else (3, 2, 2), -(10.0 + rank))
        down = {"tensor_shape": (2, 1, 4), "dtype": torch.float32}
        a, g = p.send_forward_backward_recv_forward_backward(c, act, grad, recv_prev=True, recv_next=True, **down)
        assert (a.unique().item(), g.unique().item()) == (10.0 + before, -(10.0 + after)), (mode, a, g)
        assert (a.shape, g.shape) == (act.shape, grad.shape)
        a = p.send_forward_recv_forward(c, act, recv_prev=True, **down)
        g = p.send_backward_recv_backward(c, grad, recv_next=True, **down)
        assert (a.unique().item(), g.unique().item()) == (10.0 + before, -(10.0 + after)), mode
        if not mode[0]:
            under_way = p.send_forward_recv_forward(c, act, recv_prev=True, overlap_p2p_comm=True, **down)
            second = p.send_backward_recv_backward(c, grad, recv_next=True, overlap_p2p_comm=True, **down)
            assert under_way.wait()[0].unique().item() == 10.0 + before
            assert second.wait()[1].unique().item() == -(10.0 + after)
    return True


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_ring_never_crosses_the_two_directions(pp):
    assert all(run(_ring, pp, pp))


def _crossed():
    groups, c = _communicator(2, (True, False))
    posting_order.BATCHED = (("send", "B"), ("recv", "F"), ("send", "F"), ("recv", "B"))
    act, grad = torch.full((2,), 10.0 + groups.pp.rank), torch.full((2,), -(10.0 + groups.pp.rank))
    a, g = p.send_forward_backward_recv_forward_backward(
        c, act, grad, recv_prev=True, recv_next=True, tensor_shape=(2,), dtype=torch.float32
    )
    return a.tolist(), g.tolist()


def test_the_order_of_posting_is_what_keeps_them_apart():
    """With each send beside the receive from the same side, two stages get each other's gradient as activation."""
    assert run(_crossed, 2) == [([-11.0] * 2, [11.0] * 2), ([-10.0] * 2, [10.0] * 2)]


TIMERS = {
    "recv_forward": "forward-recv",
    "recv_backward": "backward-recv",
    "send_forward": "forward-send",
    "send_backward": "backward-send",
    "send_forward_recv_backward": "forward-send-backward-recv",
    "send_backward_recv_forward": "backward-send-forward-recv",
    "send_forward_recv_forward": "forward-send-forward-recv",
    "send_backward_recv_backward": "backward-send-backward-recv",
    "send_forward_backward_recv_forward_backward": "forward-backward-send-forward-backward-recv",
}
"""Megatron's timer of each function; all have level 2."""


@pytest.mark.oracle
def test_the_names_of_the_timers_are_megatrons():
    spec = importlib.util.find_spec("megatron")
    if spec is None or not (folders := list(spec.submodule_search_locations or ())):
        pytest.skip("needs megatron-core")
    source = (Path(folders[0]) / "core/pipeline_parallel/p2p_communication.py").read_text()
    bodies = re.findall(r"    def (\w+)\((.*?)(?=\n    def |\Z)", source, re.S)
    theirs = {name: set(re.findall(r"timers\('([\w-]+)', log_level=2\)\.start", body)) for name, body in bodies}
    assert {name: theirs[name] for name in TIMERS} == {name: {timer} for name, timer in TIMERS.items()}


class _MegatronTimers:
    """Megatron's interface: what is called, in order."""

    def __init__(self):
        self.calls = []

    def __call__(self, name, log_level=None):
        timer = type("Timer", (), {})()
        timer.start = lambda: self.calls.append((name, log_level, "start"))
        timer.stop = lambda: self.calls.append((name, log_level, "stop"))
        return timer


def _all_nine(c, timers):
    """Each function once on the rank whose peer needs its counterpart; at the ends four functions do nothing."""
    x, shape, down = torch.ones(2), (2,), {"tensor_shape": (2,), "dtype": torch.float32, "timers": timers}
    for _ in range(2):
        p.recv_forward(c, shape, torch.float32, timers=timers)
        p.send_forward(c, x, timers=timers)
        p.recv_backward(c, shape, torch.float32, timers=timers)
        p.send_backward(c, x, timers=timers)
        p.send_forward_recv_backward(c, x, shape, torch.float32, timers=timers)
        p.send_backward_recv_forward(c, x, shape, torch.float32, timers=timers)
        p.send_forward_recv_forward(c, x, recv_prev=True, **down)
        p.send_backward_recv_backward(c, x, recv_next=True, **down)
        p.send_forward_backward_recv_forward_backward(c, x, x, recv_prev=True, recv_next=True, **down)


def _timed():
    groups, c = _communicator(2, (False, False))
    theirs, levels = _MegatronTimers(), [Timers(2), Timers(1)]
    for timers in (None, theirs, *levels):
        _all_nine(c, timers)
    failing = _MegatronTimers()
    with pytest.raises(ValueError, match=r"\(2, 2\)"):
        lengths = p.p2p_communicator(groups, batch_p2p_comm=False, variable_seq_lengths=True)
        p.send_forward(lengths, torch.ones(2, 2), is_last_stage=False, timers=failing)
    return theirs.calls, [sorted(timers.take()) for timers in levels], failing.calls


def test_the_nine_run_megatrons_timers():
    idle = ({"recv_forward", "send_backward", "send_backward_recv_forward"},)
    idle += ({"recv_backward", "send_forward", "send_forward_recv_backward"},)
    for (calls, (finest, coarse), failing), nothing in zip(run(_timed, 2), idle, strict=True):
        names = [TIMERS[name] for name in TIMERS if name not in nothing]
        assert Counter(calls) == {(name, 2, what): 2 for name in names for what in ("start", "stop")}
        assert [name for name, _, what in calls if what == "start"] == [n for n, _, what in calls if what == "stop"]
        assert [what for *_, what in calls] == ["start", "stop"] * (len(calls) // 2)
        assert (finest, coarse) == (sorted(names), [])
        assert failing == [("forward-send", 2, "start"), ("forward-send", 2, "stop")]


def _ledger():
    groups, c = _communicator(2, (True, True))
    with CommLedger() as ledger:
        if groups.pp.rank == 0:
            p.send_forward(c, torch.ones(5, 2, 3))
        else:
            assert p.recv_forward(c, (), torch.float32).shape == (5, 2, 3)
    return [(r.operation, r.group, r.bytes) for r in ledger.records]


def test_ledger_sees_lengths_then_tensor():
    sender, receiver = run(_ledger, 2)
    assert sender == [("send", "pp", 24), ("send", "pp", 120)]
    assert receiver == [("recv", "pp", 24), ("recv", "pp", 120)]


def _refusals():
    groups, batched = _communicator(2, (True, True))
    messages = []
    for attempt in (
        lambda: p.p2p_communicator(groups, use_ring_exchange_p2p=True),
        lambda: p.send_forward_recv_forward(
            batched, None, recv_prev=False, tensor_shape=(), dtype=torch.float32, overlap_p2p_comm=True
        ),
        lambda: p.exchange(batched, send_next=torch.ones(2, 2)),
        lambda: p.send_backward(batched, None, is_first_stage=False),
    ):
        try:
            attempt()
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_refusals_say_why():
    for messages in run(_refusals, 2):
        ring, overlap, shape, gradient = messages
        assert "no ring_exchange" in ring
        assert "batch_p2p_comm to False" in overlap
        assert "(2, 2)" in shape
        assert "no gradient to send" in gradient


def test_deallocated_output_gives_the_same_gradients():
    def gradients(shrink):
        torch.manual_seed(0)
        layer = torch.nn.Linear(6, 5, dtype=torch.float64)
        x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
        y = torch.nn.functional.gelu(layer(x))
        grad = torch.randn_like(y)
        deallocate_output_tensor(y, shrink)
        assert y.numel() == (1 if shrink else 20)
        custom_backward(y, grad)
        return [x.grad, layer.weight.grad, layer.bias.grad]

    assert all(torch.equal(a, b) for a, b in zip(gradients(True), gradients(False), strict=True))


def test_views_and_leaves_are_not_shrunk():
    leaf = torch.ones(2, 3, requires_grad=True)
    view = (leaf * 2).t()
    for tensor in (leaf, view):
        deallocate_output_tensor(tensor)
    assert leaf.shape == (2, 3)
    assert view.shape == (3, 2)
