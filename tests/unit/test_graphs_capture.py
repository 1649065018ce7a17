"""`make_graphed_callables` beyond the rules that all implementations share: functions, pools, failures, any order."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from graph_rules import Body, Machine, all_equal, grads, run_pipeline, stack
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from labkit.events import recording
from labkit.graphs import GraphCaptureError, make_graphed_callables, plan_buffers
from labkit.graphs.backend import choose_impl, get_backend
from labkit.parallel.random import RngTracker

HOST = Machine("emulated", "cpu")


def x(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(*(shape or (4, 8))).requires_grad_(grad)


# ---- what may be captured ----


def test_a_function_is_captured_like_a_module() -> None:
    graphed = make_graphed_callables(lambda a, b: (a * b).sum(), (x(), x(grad=False)))
    a, b = x(), x(grad=False)
    y = graphed(a, b)
    y.backward()
    assert torch.equal(y, (a * b).sum())
    assert torch.equal(a.grad, b)  # type: ignore[arg-type]


def test_nested_arguments_keep_their_structure() -> None:
    def function(pair: tuple[Tensor, dict[str, Tensor]], *, more: list[Tensor]) -> dict[str, Any]:
        return {"sum": pair[0] + pair[1]["b"] + more[0], "parts": [pair[0] * 2, None]}

    graphed = make_graphed_callables(function, ((x(), {"b": x()}),), sample_kwargs={"more": [x()]})
    a, b, c = x(), x(), x()
    found = graphed((a, {"b": b}), more=[c])
    assert torch.equal(found["sum"], a + b + c)
    assert torch.equal(found["parts"][0], a * 2)
    assert found["parts"][1] is None
    with pytest.raises(TypeError, match="nested in another way"):
        graphed((a, {"other": b}), more=[c])
    with pytest.raises(GraphCaptureError, match=r"argument 0\[1\]\['b'\] is \(2, 8\)"):
        graphed((a, {"b": x(2, 8)}), more=[c])


def test_an_input_may_be_a_view_or_lie_elsewhere() -> None:
    [layer], [eager] = stack(HOST, 1), stack(HOST, 1)
    graphed = make_graphed_callables(layer, (x(),))
    wide = x(8, 4)
    assert torch.equal(graphed(wide.t()), eager(wide.t()))
    graphed(wide.t()).square().sum().backward()
    first, wide.grad = wide.grad, None
    eager(wide.t()).square().sum().backward()
    assert torch.equal(first, wide.grad)  # type: ignore[arg-type]
    assert torch.equal(graphed(graphed.static_inputs[0].t().reshape(4, 8)), graphed.static_outputs[0])  # type: ignore[arg-type]


def test_the_implementation_follows_the_device() -> None:
    assert choose_impl("auto", torch.device("cpu")) == "emulated"
    assert choose_impl("auto", torch.device("cuda")) == "local"
    assert choose_impl("transformer_engine", torch.device("cuda")) == "transformer_engine"
    for impl in ("local", "transformer_engine"):
        with pytest.raises(ValueError, match=f"impl='{impl}' captures tensors on cuda, and these are on cpu"):
            choose_impl(impl, torch.device("cpu"))
    with pytest.raises(ValueError, match="impl='cuda' is unknown; choose one of auto, "):
        choose_impl("cuda", torch.device("cpu"))
    with pytest.raises(ValueError, match="no backend is called 'transformer_engine'"):
        get_backend("transformer_engine")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": [1, -1], "num_layers_per_chunk": [1]}, "add up to 1, and there are 2 callables"),
        ({"order": [1, 2, 3, -3, -2, -1]}, "2 callables cannot be shared out equally over the 3 chunks"),
        ({"order": [1, -1, -1]}, "must come first"),
        ({"num_warmup": -1}, "give 0 or more"),
        ({"sample_kwargs": ({},)}, "1 sample_kwargs for 2 sample_args"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_graphed_callables(tuple(stack(HOST, 2)), ((x(),), (x(),)), **options)


def test_autocast_that_keeps_its_casts_is_refused() -> None:
    [layer] = stack(HOST, 1)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(GraphCaptureError, match="cache_enabled=False"):
        make_graphed_callables(layer, (x(),))


# ---- memory ----


def test_captures_share_a_pool_that_is_handed_on() -> None:
    first, second = stack(HOST, 2)
    one = make_graphed_callables(first, (x(),))
    other = make_graphed_callables(second, (x(),), pool=one.pool)
    assert other.pool is one.pool
    assert {step.owner for step in one.pool.history} >= {"callable 0 forward", "callable 0 backward"}
    one.reset()
    assert other.pool.live_bytes > 0
    pool = other.pool
    other.reset()
    assert pool.live_bytes == 0


def test_a_capture_that_fails_in_the_middle_gives_everything_back() -> None:
    pool = get_backend("emulated").new_pool()
    good, bad = stack(HOST, 1)[0], Body(HOST, lambda self, x: self.linear(x) * self.linear(x).sum().item())
    parameter = next(good.parameters())
    parameter.grad = torch.ones_like(parameter)
    hook = parameter.register_post_accumulate_grad_hook(lambda _: None)
    before = torch.get_rng_state()
    for _ in range(3):
        with pytest.raises(GraphCaptureError, match="item"):
            make_graphed_callables((good, bad), ((x(),), (x(),)), pool=pool, num_warmup=0)
        before = torch.get_rng_state()
    assert pool.live_bytes == 0
    assert parameter.grad is not None
    assert list(parameter._post_accumulate_grad_hooks) == [hook.id]  # type: ignore[attr-defined]
    assert torch.equal(torch.get_rng_state(), before)


def test_gradients_without_copies_are_the_graphs_own() -> None:
    [layer] = stack(HOST, 1)
    graphed = make_graphed_callables(layer, (x(),), clone_param_grads=False)
    graphed(x()).sum().backward()
    addresses = {g.data_ptr() for g in graphed.captured.grad_parameters if g is not None}
    assert {g.data_ptr() for g in grads([layer]) if g is not None} == addresses


def test_the_gradient_that_is_sent_away_is_a_copy() -> None:
    """Of a chunk's first layer: the next backward would write over it while it is still under way."""
    layers = stack(HOST, 2)
    graphed = make_graphed_callables(tuple(layers), [(x(),) for _ in range(4)], order=[1, 1, -1, -1],
                                     num_layers_per_chunk=[2], reuse_buffers=True)  # fmt: skip
    received = [x() * 1 for _ in range(2)]  # no leaves, as behind an embedding
    sent: list[Tensor] = []
    for one in received:
        one.register_hook(sent.append)
    outputs = [graphed[2 * m + 1](graphed[2 * m](received[m])) for m in range(2)]
    outputs[0].sum().backward()
    first = sent[0].clone()
    outputs[1].square().sum().backward()
    assert torch.equal(sent[0], first)


def test_main_grad_must_stay_where_it_was() -> None:
    [layer] = stack(HOST, 1)
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
    graphed = make_graphed_callables(layer, (x(),))
    graphed(x()).sum().backward()
    next(layer.parameters()).main_grad = torch.zeros(8)  # type: ignore[attr-defined]
    with pytest.raises(GraphCaptureError, match="main_grad was moved"):
        graphed(x())


# ---- surroundings ----


class Drops(nn.Module):
    """Dropout from a named random state."""

    def __init__(self, rng: RngTracker) -> None:
        super().__init__()
        self.rng = rng
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, given: Tensor) -> Tensor:
        with self.rng.fork("mine"):
            return nn.functional.dropout(given * self.weight, 0.5)


def test_named_random_states_are_found_and_left_as_they_were() -> None:
    trackers = [RngTracker(), RngTracker()]
    for tracker in trackers:
        tracker.add("mine", 3)
    layer, eager = Drops(trackers[0]), Drops(trackers[1])
    graphed = make_graphed_callables(nn.Sequential(layer), (x(),))
    for _ in range(3):
        given = x()
        assert torch.equal(graphed(given), eager(given))
    assert torch.equal(*(tracker.get_states()["mine"] for tracker in trackers))


def test_replays_leave_events() -> None:
    layers = tuple(stack(HOST, 1))
    graphed = make_graphed_callables(layers, ((x(),), (x(),)), order=[1, 1, -1, -1])
    with recording(0) as recorder:
        graphed[1](x()).sum().backward()
    found = [(event.name, event.kind) for event in recorder.events]
    assert found == [(f"chunk 0 layer 0 microbatch 1 {way}", "graph_replay") for way in ("forward", "backward")]


def test_a_graphed_callable_has_the_attributes_of_its_callable() -> None:
    layer = nn.Linear(8, 8)
    graphed = make_graphed_callables(layer, (x(),))
    assert graphed.weight is layer.weight
    assert list(graphed.parameters()) == list(layer.parameters())
    assert repr(graphed) == "GraphedCallable(callable 0, impl=emulated)"
    assert [graph.name for graph in graphed.graphs[:2]] == ["callable 0 forward", "callable 0 backward"]
    with pytest.raises(AttributeError):
        _ = graphed.nothing


def test_two_runs_are_equal_to_the_bit() -> None:
    def run() -> list[Tensor | None]:
        layers = stack(HOST, 2, dropout=0.1)
        samples = [(x(),) for _ in range(6)]
        torch.manual_seed(4)
        graphed = make_graphed_callables(tuple(layers), samples, order=[1, 1, -1, 1, -1, -1], num_layers_per_chunk=[2],
                                         reuse_buffers=True)  # fmt: skip
        inputs = [torch.randn(4, 8) for _ in range(3)]
        return [*run_pipeline([1, 1, -1, 1, -1, -1], [2], graphed, inputs, True), *grads(layers)]

    assert all_equal(run(), run())


# ---- any order ----


def any_order(chunks: int, microbatches: int, seed: int) -> list[int]:
    """Forwards and backwards of every chunk in any order that keeps a backward behind its forward."""
    chosen, rng = [], random.Random(seed)
    left = {chunk: [microbatches, microbatches] for chunk in range(1, chunks + 1)}
    while any(forwards or backwards for forwards, backwards in left.values()):
        chunk = rng.choice(sorted(left))
        forwards, backwards = left[chunk]
        if forwards and (forwards == backwards or rng.random() < 0.5):
            chosen.append(chunk)
            left[chunk][0] -= 1
        elif backwards > forwards:
            chosen.append(-chunk)
            left[chunk][1] -= 1
    return chosen


@settings(max_examples=8)
@given(st.integers(1, 3), st.integers(1, 4), st.lists(st.integers(1, 2), min_size=3, max_size=3), st.integers(0, 999))
def test_any_order_of_graphs_equals_the_eager_run(chunks: int, microbatches: int, layers: list[int], seed: int) -> None:
    order, per_chunk = any_order(chunks, microbatches, seed), layers[:chunks]
    graphed_layers, eager = stack(HOST, sum(per_chunk)), stack(HOST, sum(per_chunk))
    samples = [(x(),) for _ in range(sum(per_chunk) * microbatches)]
    graphed = make_graphed_callables(
        tuple(graphed_layers), samples, order=order, num_layers_per_chunk=per_chunk, reuse_buffers=True, num_warmup=1
    )
    addresses = {one.static_inputs[0].data_ptr() for one in graphed}
    assert len(addresses) == plan_buffers(order, per_chunk).num_buffers
    for _ in range(2):
        inputs = [x(grad=False) for _ in range(microbatches)]
        found = run_pipeline(order, per_chunk, graphed, inputs, True)
        assert all_equal(found, run_pipeline(order, per_chunk, eager, inputs, False))
        assert all_equal(grads(graphed_layers), grads(eager))
