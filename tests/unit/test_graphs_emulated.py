"""Emulated capture and replay: the bits of the eager run at the recorded addresses, and Python's part only once."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torchgen
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from labkit.comm.capturing import (
    GraphCaptureError,
    active_capture,
    graph_warmup,
    is_graph_capturing,
    is_graph_warmup,
    recorded_call,
)
from labkit.graphs import make_graphed_callables
from labkit.graphs.emulated import recording
from labkit.graphs.emulated.arena import Arena, block_of
from labkit.graphs.emulated.emulated_backend import EmulatedBackend, EmulatedGraph

BACKEND = EmulatedBackend()


@pytest.fixture
def pool() -> Iterator[Arena]:
    yield BACKEND.new_pool()


class Layer(nn.Module):
    """A transformer layer with dropout: norms, attention, GELU, views, in-place additions."""

    def __init__(self, hidden: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.dropout = heads, 0.3
        self.norm, self.qkv = nn.LayerNorm(hidden), nn.Linear(hidden, 3 * hidden)
        self.proj, self.up, self.down = (
            nn.Linear(hidden, hidden),
            nn.Linear(hidden, 4 * hidden),
            nn.Linear(4 * hidden, hidden),
        )

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, h)
        x = x + F.dropout(self.proj(mixed), self.dropout)
        return self.down(F.gelu(self.up(x))).add_(x)


def graphs_of(
    function: Callable[..., Tensor], inputs: list[Tensor], wanted: list[Tensor], dy: Tensor, pool: Arena
) -> tuple[EmulatedGraph, EmulatedGraph, Tensor, tuple[Tensor, ...]]:
    with BACKEND.capturing(pool, "forward") as forward:
        y = function(*inputs)
    with BACKEND.capturing(pool, "backward") as backward:
        grads = torch.autograd.grad(y, wanted, dy)
    return forward, backward, y.detach(), grads


@pytest.mark.parametrize("autocast", [False, True])
def test_replay_is_the_eager_run_to_the_bit(pool: Arena, autocast: bool) -> None:
    torch.manual_seed(0)
    layer, x, dy = Layer(), torch.randn(2, 8, 16, requires_grad=True), torch.randn(2, 8, 16)
    wanted = [x, *layer.parameters()]

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return layer(x).float()

    forward, backward, y, grads = graphs_of(run, [x], wanted, dy, pool)
    addresses = [t.data_ptr() for t in (y, *grads)]
    for step in range(3):
        with torch.no_grad():
            for tensor in (*wanted, dy):  # in place: parameters and static inputs stay where they are
                tensor.copy_(torch.randn(tensor.shape))
        torch.manual_seed(step)
        expected = run(x)
        expected_grads = torch.autograd.grad(expected, wanted, dy)
        state = torch.get_rng_state()
        torch.manual_seed(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=not autocast):  # of no concern to a replay
            forward.replay()
            backward.replay()
        assert torch.equal(y, expected)
        assert all(map(torch.equal, grads, expected_grads))
        assert torch.equal(torch.get_rng_state(), state)
    assert [t.data_ptr() for t in (y, *grads)] == addresses


def test_python_runs_at_capture_alone(pool: Arena) -> None:
    counter, scale = [], 2.0
    x = torch.ones(3)

    def body() -> Tensor:
        counter.append(1)
        return x * scale if x.shape[0] == 3 else x

    with BACKEND.warming_up(pool):
        body()
    with BACKEND.capturing(pool, "body") as graph:
        y = body()
    scale = 5.0  # frozen as it was
    for _ in range(20):
        graph.replay()
    assert len(counter) == 2 and torch.equal(y, torch.full((3,), 2.0))
    assert graph.num_operations == 1


def test_one_pool_serves_graph_after_graph(pool: Arena) -> None:
    """A dead tensor's block is taken by the next capture; read too late, it holds the other graph's values."""
    x = torch.ones(100)
    with BACKEND.capturing(pool, "first") as first:
        a = x + 1
    weak = BACKEND.weak_ref(a)
    address = a.data_ptr()
    del a
    with BACKEND.capturing(pool, "second") as second:
        b = x + 2
    assert b.data_ptr() == address
    first.replay()
    assert (weak == 2).all()
    second.replay()
    assert (weak == 3).all() and (b == 3).all()
    assert pool.peak_bytes == 512 and pool.reserved_bytes >= 512
    assert [(step.kind, step.owner) for step in pool.history] == [
        ("alloc", "first"), ("free", "first"), ("alloc", "second"),
    ]  # fmt: skip


def test_intermediate_results_share_memory_within_a_graph(pool: Arena) -> None:
    x = torch.randn(1000)
    with BACKEND.capturing(pool, "chain") as graph:
        y = x
        for _ in range(20):
            y = (y + 1).sin()
    assert pool.peak_bytes == 3 * 4096  # y, y + 1 and its sine
    expected = x
    for _ in range(20):
        expected = (expected + 1).sin()
    graph.replay()
    assert torch.equal(y, expected)


def test_saved_activations_are_free_once_the_backward_is_captured(pool: Arena) -> None:
    layer, x, dy = Layer(), torch.randn(2, 8, 16, requires_grad=True), torch.randn(2, 8, 16)
    gc.disable()
    try:
        with BACKEND.capturing(pool, "forward"):
            y = layer(x)
        saved = pool.live_bytes
        with BACKEND.capturing(pool, "backward"):
            (dx,) = torch.autograd.grad(y, x, dy)
        del y
        assert saved > 10 * dx.nbytes and pool.live_bytes == dx.nbytes
    finally:
        gc.enable()


def test_in_place_changes_to_outside_tensors_are_made_at_each_replay(pool: Arena) -> None:
    main_grad, weight, x = torch.zeros(4, 3), torch.randn(4, 3), torch.randn(5, 3)
    with BACKEND.capturing(pool, "accumulate") as graph:
        main_grad.addmm_((x @ weight.t()).t(), x)
    one = (x @ weight.t()).t() @ x
    main_grad.zero_()
    graph.replay()
    graph.replay()
    torch.testing.assert_close(main_grad, 2 * one)


def test_empty_tensors_views_and_constants(pool: Arena) -> None:
    x = torch.randn(4, 6)
    with BACKEND.capturing(pool, "views") as graph:
        buffer = torch.empty(6, 4)
        buffer.copy_(x.t())
        zeros = torch.zeros(6, 4)
        zeros[1:3].add_(buffer[1:3])
        nothing = x[:0].sum(dim=0)
        picked = zeros.gather(0, torch.arange(4).view(1, 4))
        left, right = torch.split(buffer, 3)
        y = torch.cat([right, left]) + zeros + torch.full((4,), 3.0)
        largest = y.max(dim=1)
        ordered, places = torch.sort(y, stable=True)
    for _ in range(2):
        x.copy_(torch.randn(4, 6))
        graph.replay()
        z = torch.zeros(6, 4)
        z[1:3] = x.t()[1:3]
        expected = torch.cat([x.t()[3:], x.t()[:3]]) + z + 3.0
        assert torch.equal(y, expected) and torch.equal(picked[0], z.diagonal())
        assert torch.equal(largest.values, expected.max(dim=1).values) and nothing.shape == (6,)
        assert torch.equal(ordered, expected.sort().values) and torch.equal(places, expected.sort(stable=True).indices)


def test_in_place_views_change_no_address(pool: Arena) -> None:
    x = torch.randn(2, 3)
    with BACKEND.capturing(pool, "views") as graph:
        y = x * 2
        y.unsqueeze_(0).transpose_(1, 2)
        z = y + 1
        y.squeeze_(0).mul_(3)
    for _ in range(3):
        x.copy_(torch.randn(2, 3))
        graph.replay()
        assert torch.equal(z, (x * 2).t()[None] + 1) and torch.equal(y, (x * 2).t() * 3)


def test_views_in_place_are_no_steps_of_the_graph(pool: Arena) -> None:
    """Made again at replay they would change the shape of the address that later steps read."""
    x = torch.randn(2, 3)
    with BACKEND.capturing(pool, "views") as graph:
        y = x * 2
        y.unsqueeze_(0)
        z = y.sum(1)
    assert graph.num_operations == 2
    for _ in range(3):
        x.copy_(torch.randn(2, 3))
        graph.replay()
        assert torch.equal(z, (x * 2).sum(0)[None])


def test_conjugates_and_what_they_are_views_of_are_told_apart(pool: Arena) -> None:
    """Both lie at one address, in one shape: how it is read is part of it."""
    x = torch.randn(3, 3, dtype=torch.complex64)
    with BACKEND.capturing(pool, "conjugates") as graph:
        plain, conjugate = x @ x, x @ x.conj()
        negative, imaginary = x.conj().imag.clone(), x.imag.clone()
    for _ in range(2):
        x.copy_(torch.randn(3, 3, dtype=torch.complex64))
        graph.replay()
        assert torch.equal(plain, x @ x) and torch.equal(conjugate, x @ x.conj())
        assert torch.equal(negative, -imaginary) and torch.equal(imaginary, x.imag)


def test_an_operation_that_writes_to_an_argument_and_returns_nothing_of_size_is_a_step(pool: Arena) -> None:
    """As kernels of libraries do: they fill what they are given, and what they return is a formality."""
    library = torch.library.Library("labkit_test", "DEF")
    library.define("fill(Tensor(a!) into, Tensor x) -> Tensor")
    library.impl("fill", lambda into, x: into.copy_(x).new_empty(0), "CPU")
    x, into = torch.randn(3), torch.zeros(3)
    with BACKEND.capturing(pool, "fill") as graph:
        nothing = torch.ops.labkit_test.fill(into, x)
    x.copy_(torch.randn(3))
    graph.replay()
    assert torch.equal(into, x) and nothing.shape == (0,)


def test_the_same_capture_makes_the_same_history() -> None:
    """Addresses depend on nothing but what is captured: every rank and every run has the same ones."""

    def history() -> list[object]:
        pool, layer = BACKEND.new_pool(), Layer()
        x, dy = torch.randn(2, 8, 16, requires_grad=True), torch.randn(2, 8, 16)
        for _ in range(3):
            graphs_of(layer, [x], [x, *layer.parameters()], dy, pool)
        return list(pool.history)

    assert history() == history()


_ROWS = torch.tensor([0, 1, 1, 2, 3, 5])
OPERATIONS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: a + b,
    lambda a, b: a @ b.t() @ b,
    lambda a, b: a.t().contiguous().t() * 0.5,
    lambda a, b: F.layer_norm(a, (8,)),
    lambda a, b: torch.softmax(a, dim=-1),
    lambda a, b: a.clone().mul_(b),
    lambda a, b: F.dropout(a, 0.5),
    lambda a, b: torch.where(a > b, a, b),
    lambda a, b: torch.cat([a[:, 4:], b[:, :4]], dim=1),
    lambda a, b: a.double().cumsum(0).float() * 0.1,
    lambda a, b: a.topk(8, dim=1).values,
    lambda a, b: torch.zeros_like(a).index_add(0, _ROWS, b),
    lambda a, b: F.silu(a.unflatten(1, (2, 4)).transpose(1, 2)).reshape(6, 8),
    lambda a, b: a.masked_fill(b > 0, 0.25),
]


@given(
    program=st.lists(st.tuples(st.integers(0, len(OPERATIONS) - 1), st.integers(0, 5), st.integers(0, 5)), max_size=12),
    seed=st.integers(0, 1000),
)
def test_random_programs_replay_to_the_bit(program: list[tuple[int, int, int]], seed: int) -> None:
    """Forward and backward of random programs over six registers; overwritten registers give memory back."""
    pool, leaf, dy = BACKEND.new_pool(), torch.randn(6, 8, requires_grad=True), torch.randn(6, 8)

    def run(x: Tensor) -> Tensor:
        registers = [x * 1.0] * 6
        for operation, source, target in program:
            registers[target] = OPERATIONS[operation](registers[source], registers[target])
        return torch.stack(registers).sum(0)

    forward, backward, y, (dx,) = graphs_of(run, [leaf], [leaf], dy, pool)
    with torch.no_grad():
        leaf.copy_(torch.randn(6, 8))
    torch.manual_seed(seed)
    expected = run(leaf)
    (expected_dx,) = torch.autograd.grad(expected, leaf, dy)
    torch.manual_seed(seed)
    forward.replay()
    backward.replay()
    for made, wanted in ((y, expected), (dx, expected_dx)):  # a program may overflow, and its gradient is then NaN
        torch.testing.assert_close(made, wanted, rtol=0, atol=0, equal_nan=True)


# ---- state ----


def test_state_of_a_capture() -> None:
    assert not is_graph_capturing() and not is_graph_warmup() and active_capture() is None
    with graph_warmup():
        assert is_graph_warmup() and not is_graph_capturing()
    calls: list[bool] = []
    enabled = gc.isenabled()
    with BACKEND.capturing(BACKEND.new_pool(), "state") as graph:
        assert is_graph_capturing() and active_capture() is not None and not gc.isenabled()
        assert recorded_call(lambda: calls.append(active_capture() is None)) is None
    assert gc.isenabled() == enabled and not is_graph_capturing()
    graph.replay()
    assert calls == [True, True]
    assert recorded_call(lambda: 3) == 3


def test_a_failed_capture_leaves_nothing_behind(pool: Arena) -> None:
    x = torch.randn(4)
    with pytest.raises(ZeroDivisionError), BACKEND.capturing(pool, "failing") as graph:
        y = x * 2
        y = 1 / 0
    assert not is_graph_capturing() and active_capture() is None and gc.isenabled()
    assert x.tolist() and x.to("cpu") is x  # methods are torch's own again
    with pytest.raises(GraphCaptureError, match="capture failed"):
        graph.replay()
    with BACKEND.capturing(pool, "next") as graph:
        y = x * 3
    graph.replay()
    assert torch.equal(y, x * 3)


def test_reset_lets_go_of_outside_tensors(pool: Arena) -> None:
    x = torch.randn(4)
    outside = StorageWeakRef(x.untyped_storage())
    with BACKEND.capturing(pool, "held") as graph:
        y = x * 2
    assert graph.num_operations == 1
    del x
    graph.replay()  # the graph keeps what it reads
    graph.reset()
    assert outside.expired() and graph.num_operations == 0 and y.shape == (4,)
    with pytest.raises(GraphCaptureError, match="reset"):
        graph.replay()


def test_nesting_is_refused(pool: Arena) -> None:
    with BACKEND.capturing(pool, "whole") as whole:
        torch.ones(1)
    outer = BACKEND.capturing(pool, "outer")
    with pytest.raises(GraphCaptureError, match="'inner' cannot"), outer, BACKEND.capturing(pool, "inner"):
        pass
    with pytest.raises(GraphCaptureError, match="'whole' cannot be replayed"), BACKEND.capturing(pool, "outer"):
        whole.replay()


def test_a_moved_parameter_is_refused_and_an_updated_one_is_read(pool: Arena) -> None:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    with torch.no_grad(), BACKEND.capturing(pool, "linear") as graph:
        y = layer(x)
    with torch.no_grad():
        layer.weight.add_(1.0)
    graph.replay()
    assert torch.equal(y, layer(x))
    layer.weight.data = layer.weight.data.clone()
    with pytest.raises(GraphCaptureError, match=r"parameter of shape \(3, 3\).*moved"):
        graph.replay()


def test_static_gradients_lie_outside_the_pool() -> None:
    graphed = make_graphed_callables(lambda x: (2 * x).t(), (torch.randn(3, 4, requires_grad=True),))
    [static] = graphed.captured.grad_outputs
    assert static.shape == (4, 3) and static.stride() == (1, 4) and not static.requires_grad
    assert block_of(static) is None and block_of(graphed.static_outputs[0]) is not None


def test_what_is_computed_in_place_at_replay_runs_one_kernel_in_both_forms() -> None:
    """As torch's own list of operations says: structured, with an `out=` form of the same arguments."""
    listed = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    entries = {entry.split("(")[0]: entry for entry in listed.read_text().split("\n- func: ")[1:]}
    for name in recording._STRUCTURED:
        operation, _, overload = name.partition(".")
        assert "structured_delegate" in entries[name], name
        assert recording._into(getattr(getattr(torch.ops.aten, operation), overload or "default")) is not None, name
