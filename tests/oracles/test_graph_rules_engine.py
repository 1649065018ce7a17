"""The rules of graphs, held by our adaptor and Transformer Engine's own Python source, whose captures are emulated."""

from __future__ import annotations

import gc
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import te_source
import torch
from graph_rules import *  # noqa: F403
from graph_rules import INTERLEAVED, ONE_CHUNK, Body, Machine, stack
from graph_rules_numbers import *  # noqa: F403
from torch import Tensor

from labkit.graphs import GraphCaptureError, capture, plan_buffers, sample_index
from labkit.graphs.cuda import te_adaptor

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(te_source.graph_source() is None, reason=te_source.WHY_NONE),
]


@pytest.fixture
def engine() -> Iterator[Callable[..., Any]]:
    with te_source.emulated_engine() as make:
        yield make


@pytest.fixture
def machine(engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(capture, "choose_impl", lambda impl, device: impl)  # the engine is for GPUs, and this is none
    monkeypatch.setattr(te_adaptor, "engine_function", lambda: engine)
    return Machine("transformer_engine", "cpu")


# ---- what only the engine has ----


def test_the_stored_signature_is_that_of_the_source(engine: Callable[..., Any]) -> None:
    stored = json.loads((Path(__file__).parents[1] / "te_signatures.json").read_text())
    names = [name for name, *_ in stored["signatures"]["make_graphed_callables"]["__call__"]]
    assert names == list(inspect.signature(engine).parameters)


def test_samples_lie_where_the_engine_looks_for_them(machine: Machine) -> None:
    """prefix_layers[c] M + m L_c + l: each sample is written by the call of its layer, chunk and microbatch alone."""
    order, layers, microbatches = INTERLEAVED, [1, 3], 4
    modules = stack(machine, 4)
    samples = tuple((machine.random(grad=True),) for _ in range(4 * microbatches))
    graphed = machine.make(tuple(modules), samples, order=order, num_layers_per_chunk=layers)
    for index, (one, (sample,)) in enumerate(zip(graphed, samples, strict=True)):
        given = machine.random(grad=True)
        assert torch.equal(one(given), modules[0 if index < 4 else 1 + (index - 4) % 3](given))
        assert torch.equal(sample, given)


def test_a_capture_that_fails_leaves_the_engine_as_it_was(machine: Machine, engine: Callable[..., Any]) -> None:
    layer = Body(machine, lambda self, x: self.linear(x) * x.sum().item())
    own_call, states = Body.__call__, torch.get_rng_state()
    with pytest.raises(RuntimeError):
        machine.make(layer, (machine.random(grad=True),))
    with pytest.raises(ZeroDivisionError):
        machine.make(Body(machine, lambda self, x: x / (1 // 0)), (machine.random(grad=True),))
    assert Body.__call__ is own_call
    assert not any(module._forward_hooks for module in layer.modules())
    assert not sys.modules[engine.__module__].is_graph_capturing()
    assert gc.isenabled()
    assert torch.get_rng_state().shape == states.shape


def test_weights_are_quantised_at_the_first_microbatch_alone(machine: Machine) -> None:
    seen, group = te_source.Quantisation.weight_updates_skipped, object()
    modules = stack(machine, 1)
    samples = tuple((machine.random(grad=True),) for _ in range(3))
    options = {"enabled": True, "recipe": "mine", "amax_reduction_group": group, "cache_quantized_params": True}
    te_source.QUANTISED_REGIONS.clear()
    graphed = machine.make(tuple(modules), samples, order=ONE_CHUNK, engine_options=options)
    assert te_source.QUANTISED_REGIONS
    for region in te_source.QUANTISED_REGIONS:
        assert region["enabled"] is True
        assert region["recipe"] == "mine"
        assert region["amax_reduction_group"] is group
    seen.clear()
    for one in graphed:
        one(machine.random(grad=True))
    assert seen == [False, True, True], "skipped for all but the first"


def test_one_graph_for_all_microbatches_asks_the_module_which_it_is(machine: Machine) -> None:
    [layer] = stack(machine, 1)
    options = {"enabled": True, "recipe": "mine", "cache_quantized_params": True}
    [graphed] = machine.make((layer,), ((machine.random(grad=True),),), order=[1, -1], engine_options=options)
    te_source.Quantisation.weight_updates_skipped.clear()
    for microbatch in range(3):
        layer.current_microbatch = microbatch  # type: ignore[assignment]
        graphed(machine.random(grad=True))
    assert te_source.Quantisation.weight_updates_skipped == [False, True, True]


def test_its_refusals_are_errors_of_the_user(machine: Machine) -> None:
    [layer] = stack(machine, 1)
    x = machine.random(grad=True)
    with pytest.raises(ValueError, match="makes its own"):
        machine.make((layer,), ((x,),), order=[1, -1], plan=plan_buffers([1, -1], 1))
    graphed = machine.make(layer, (x,))
    with pytest.raises(GraphCaptureError, match="does not hand out"):
        _ = graphed.graphs


def test_its_plan_of_buffers_is_ours(machine: Machine) -> None:
    """Which samples calls write to, for random orders: those of `plan_buffers`, first in, first out."""
    for pp_order in ([1, 1, -1, -1, 1, -1], [1, 1, 2, -2, 2, -2, 1, -1, 1, -1, 2, -2, 2, -2, -1, -1], [1, -1] * 3):
        chunks = max(pp_order)
        microbatches = len(pp_order) // chunks // 2
        modules = stack(machine, 2 * chunks)
        samples = tuple((machine.random(grad=True),) for _ in range(2 * chunks * microbatches))
        graphed = machine.make(
            tuple(modules), samples, order=pp_order, num_layers_per_chunk=[2] * chunks, reuse_buffers=True, num_warmup=1
        )
        plan, owner = plan_buffers(pp_order, 2), {}
        for use in sorted(plan.assignment, key=plan.acquired_at.__getitem__):
            index = sample_index([2] * chunks, microbatches, *use)
            owner.setdefault(plan.assignment[use], index)
            given = machine.random(grad=True)
            graphed[index](given)
            assert torch.equal(samples[owner[plan.assignment[use]]][0], given), (pp_order, use)


def test_an_output_that_several_layers_read_gathers_all_their_gradients(machine: Machine) -> None:
    """That of the last layer waits in autograd while the graphs between run, whose memory it may lie in."""
    bodies: list[Any] = [lambda self, x: self.linear(x).tanh()] * 3 + [
        lambda self, x, early: (self.linear(x) * early).tanh()
    ]
    layers = [Body(machine, body) for body in bodies]
    samples: list[tuple[Tensor, ...]] = [(machine.random(grad=True),) for _ in layers]
    samples[-1] = (machine.random(grad=True), machine.random(grad=True))
    graphed = machine.make(
        tuple(layers), tuple(samples), order=[1, -1], num_layers_per_chunk=[4], reuse_buffers=True, num_warmup=1
    )
    given, found = machine.random(), []
    for first, second, third, last in (layers, graphed):
        for layer in layers:
            layer.zero_grad()
        x = given.clone().requires_grad_()
        early = first(x)
        last(third(second(early)), early).pow(2).sum().backward()
        found.append([x.grad, *(p.grad for layer in layers for p in layer.parameters())])
    assert all(map(torch.equal, *found))


def test_a_gradient_that_passes_through_a_view_or_a_sum_is_no_memory_of_the_graph(machine: Machine) -> None:
    [layer] = stack(machine, 1)
    graphed = machine.make(layer, (machine.random(grad=True),))
    start, weights = machine.random(), [machine.random() for _ in range(3)]
    for reach in (lambda p: p.view_as(p), lambda p: p + start):
        found = []
        for run in (layer, graphed):
            p = start.clone().requires_grad_()
            for weight in weights:
                (run(reach(p)) * weight).sum().backward()
            found.append(p.grad)
        assert torch.equal(*found)
