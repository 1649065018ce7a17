"""What graphs must do, whatever makes them: one statement of the rules for `emulated`, `local` and Transformer Engine.

A test module imports everything from here and from `graph_rules_numbers.py`, and has a fixture `machine`:

    tests/unit/test_graph_rules.py               emulated, on the host
    tests/oracles/test_graph_rules_engine.py     Transformer Engine's own Python, its captures emulated
    tests/gpu/test_graph_rules_gpu.py            local and transformer_engine, on a GPU
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.graphs import (
    GraphCaptureError,
    PlanError,
    check_plan,
    is_graph_capturing,
    make_graphed_callables,
    make_weak_ref,
    plan_buffers,
)
from labkit.parallel import ColumnParallelLinear, checkpoint, single_process_groups
from labkit.parallel.parameters.parameter_record import record_of

WIDTH, ROWS = 8, 4
ONE_CHUNK = [1, 1, -1, 1, -1, -1]
INTERLEAVED = [1, 1, 2, 2, 1, -2, 1, -2, 2, -1, 2, -1, -2, -2, -1, -1]
"""Rank 0 of PP2 V2 N2 M4."""
GPIPE = [1, 1, 1, -1, -1, -1]


FAILS_CAPTURE = pytest.mark.own_process(only_with="gpu")
"""For tests in which something fails while CUDA captures: torch 2.11 leaves a process then that captures no more
(`tests/own_process.py`)."""


@dataclass(frozen=True)
class Machine:
    """Who captures here."""

    impl: str
    device: str
    backend: Any = None
    """Captures in the place of the backend of `impl`."""

    def make(self, callables: Any, sample_args: Any, **options: Any) -> Any:
        options = {"impl": self.impl} | options
        return make_graphed_callables(callables, sample_args, backend=self.backend, **options)

    def random(self, *shape: int, grad: bool = False) -> Tensor:
        return torch.randn(*(shape or (ROWS, WIDTH)), device=self.device).requires_grad_(grad)

    def states(self) -> Tensor:
        return torch.cuda.get_rng_state() if self.device == "cuda" else torch.get_rng_state()

    def set_states(self, states: Tensor) -> None:
        torch.cuda.set_rng_state(states) if self.device == "cuda" else torch.set_rng_state(states)

    def needs(self, *impls: str) -> None:
        """Skip where the rule is about something that others do not have."""
        if self.impl not in impls:
            pytest.skip(f"for {', '.join(impls)}: {self.impl} has no such thing")


class Body(nn.Module):
    """A layer whose forward is given."""

    def __init__(self, machine: Machine, forward: Callable[[Body, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, device=machine.device)
        self.calls = 0
        self._forward = forward

    def forward(self, x: Tensor, *more: Tensor, **named: Tensor) -> Any:
        self.calls += 1
        if self._forward is not None:
            return self._forward(self, x, *more, **named)
        return torch.tanh(self.linear(x))


def stack(machine: Machine, count: int, seed: int = 0, dropout: float = 0.0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout)).to(machine.device)
        for _ in range(count)
    ]


def grads(modules: Sequence[nn.Module]) -> list[Tensor | None]:
    return [p.grad for module in modules for p in module.parameters()]


def all_equal(left: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> bool:
    pairs = list(zip(left, right, strict=True))
    return all(torch.equal(a, b) if a is not None and b is not None else a is b for a, b in pairs)


# ---- replay is the eager run ----


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_replay_equals_the_eager_run_to_the_bit(machine: Machine, dropout: float) -> None:
    [layer], [eager] = stack(machine, 1, dropout=dropout), stack(machine, 1, dropout=dropout)
    graphed = machine.make(layer, (machine.random(grad=True),))
    for _ in range(3):
        x = machine.random()
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        states = machine.states()
        y = graphed(a)
        machine.set_states(states)
        z = eager(b)
        assert torch.equal(y, z)
        (y**2).sum().backward()
        (z**2).sum().backward()
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
        assert all_equal(grads([layer]), grads([eager]))


def test_capture_leaves_no_trace(machine: Machine) -> None:
    [layer] = stack(machine, 1, dropout=0.5)
    heard: list[str] = []
    parameter = next(layer.parameters())
    parameter.grad = torch.full_like(parameter, 3.0)
    parameter.register_post_accumulate_grad_hook(lambda _: heard.append("complete"))
    parameter.register_hook(lambda _: heard.append("on its way"))
    x, states = machine.random(grad=True), machine.states()
    graphed = machine.make(layer, (x,))
    assert torch.equal(machine.states(), states), "random states"
    assert torch.equal(parameter.grad, torch.full_like(parameter, 3.0)), "gradients of before"
    assert heard == [], "hooks of parameters"
    assert x.grad is None, "gradients of the sample"
    assert not is_graph_capturing()
    graphed(machine.random(grad=True)).sum().backward()
    assert heard == ["on its way", "complete"], "at a replay autograd calls the hooks"


def test_random_numbers_are_drawn_anew(machine: Machine) -> None:
    layer = nn.Dropout(0.5).train()
    graphed = machine.make(layer, (torch.ones(64, WIDTH, device=machine.device, requires_grad=True),))
    ones = torch.ones(64, WIDTH, device=machine.device, requires_grad=True)
    first, second = graphed(ones).clone(), graphed(ones).clone()
    assert not torch.equal(first, second)


# ---- fixed addresses ----


def test_outputs_lie_at_one_address_and_the_next_replay_overwrites_them(machine: Machine) -> None:
    [layer] = stack(machine, 1)
    graphed = machine.make(layer, (machine.random(grad=True),))
    x, other = machine.random(grad=True), machine.random(grad=True)
    first = graphed(x)
    before = first.detach().clone()
    second = graphed(other)
    assert first is not second
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(first, second), "what was kept of the first replay is the second's"
    assert not torch.equal(first, before), "whoever wants to keep an output clones it"


def test_emptying_an_output_leaves_the_static_one_alone(machine: Machine) -> None:
    [layer], [eager] = stack(machine, 1), stack(machine, 1)
    graphed = machine.make(layer, (machine.random(grad=True),))
    x = machine.random(grad=True)
    graphed(x).data = torch.empty(1, device=machine.device)  # as the pipeline does once an output was sent
    assert torch.equal(graphed(x), eager(x))


def test_an_input_that_lies_there_already_is_not_copied(machine: Machine) -> None:
    [layer], [eager] = stack(machine, 1), stack(machine, 1)
    sample = machine.random(grad=True)
    graphed = machine.make(layer, (sample,))
    given = machine.random(grad=True)
    graphed(given)
    assert torch.equal(sample, given), "the sample is the static input"
    with torch.no_grad():
        sample.copy_(machine.random())
    assert torch.equal(graphed(sample), eager(sample))


def test_parameters_changed_in_place_are_seen_and_moved_ones_refused(machine: Machine) -> None:
    [layer], [eager] = stack(machine, 1), stack(machine, 1)
    graphed = machine.make(layer, (machine.random(grad=True),))
    x = machine.random(grad=True)
    for module in (layer, eager):
        with torch.no_grad():
            for p in module.parameters():
                p.mul_(1.5)
    assert torch.equal(graphed(x), eager(x))
    with pytest.raises(GraphCaptureError, match="moved"):
        weight = next(layer.parameters())
        weight.data = weight.data.clone()
        graphed(x)


@pytest.mark.parametrize(
    "wrong",
    [lambda x: x[:2], lambda x: x.double(), lambda x: x.unsqueeze(0)],
    ids=["fewer rows", "another type", "another dimension"],
)
def test_shapes_and_types_are_fixed(machine: Machine, wrong: Callable[[Tensor], Tensor]) -> None:
    [layer] = stack(machine, 1)
    graphed = machine.make(layer, (machine.random(grad=True),))
    with pytest.raises(GraphCaptureError, match=r"argument 0 is .*captured with"):
        graphed(wrong(machine.random()).requires_grad_())


# ---- Python runs once ----


def test_side_effects_happen_at_capture_and_at_no_replay(machine: Machine) -> None:
    layer = Body(machine)
    graphed = machine.make(layer, (machine.random(grad=True),), num_warmup=3)
    assert layer.calls == 4, "three runs of warm-up and the capture"
    for _ in range(20):
        graphed(machine.random(grad=True)).sum().backward()
    assert layer.calls == 4


def test_branches_are_frozen_and_where_is_not(machine: Machine) -> None:
    def branching(self: Body, x: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return (y if self.sign > 0 else -y), torch.where(positive > 0, y, -y)  # type: ignore[operator]

    layer = Body(machine, branching)
    layer.sign = 1  # type: ignore[assignment]
    one = torch.ones((), device=machine.device)
    graphed = machine.make(layer, (machine.random(grad=True), one.clone()))
    layer.sign = -1  # type: ignore[assignment]
    x = machine.random(grad=True)
    frozen, chosen = graphed(x, -one)
    assert torch.equal(frozen, layer.linear(x)), "the branch of the capture, not of now"
    assert torch.equal(chosen, -layer.linear(x)), "torch.where decides on the device, at each replay"


SYNCS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda y: y * y.sum().item(),
    "float": lambda y: y * float(y.detach().sum()),
    "if": lambda y: y if y.sum() > 0 else -y,
    "cpu": lambda y: y * y.detach().cpu().sum().to(y.device),
    "to cpu": lambda y: y * y.detach().to("cpu").sum().to(y.device),
    "tolist": lambda y: y * y.detach()[0].tolist()[0],
    "nonzero": lambda y: y + y.detach().nonzero().sum(),
    "mask": lambda y: y + y[y > 0].sum(),
    "unique": lambda y: y + y.detach().unique().sum(),
    "repeat_interleave": lambda y: y + y.repeat_interleave((y.detach()[:, 0] > 0).long(), dim=0).sum(),
}


@FAILS_CAPTURE
@pytest.mark.parametrize("sync", SYNCS)
def test_waiting_for_the_device_is_refused_at_capture(machine: Machine, sync: str) -> None:
    layer = Body(machine, lambda self, x: SYNCS[sync](self.linear(x)))
    with pytest.raises(RuntimeError) as refused:
        machine.make(layer, (machine.random(grad=True),))
    if machine.device == "cpu":
        assert isinstance(refused.value, GraphCaptureError)
        assert "graph_rules.py:" in str(refused.value), "the line that did it"
    assert not is_graph_capturing()
    assert gc.isenabled()
    [other], [eager] = stack(machine, 1), stack(machine, 1)
    x = machine.random(grad=True)
    assert torch.equal(machine.make(other, (machine.random(grad=True),))(x), eager(x)), "the next capture works"


# ---- what cannot be captured ----


@pytest.mark.parametrize("drops", [0.0, pytest.param(0.3, marks=FAILS_CAPTURE)])
def test_a_recomputed_part_must_not_draw(machine: Machine, drops: float) -> None:
    """A state of a generator cannot be set back inside a graph: other masks in backward would be wrong gradients."""
    machine.needs("emulated", "local")
    layer = Body(machine, lambda self, x: checkpoint(lambda y: F.dropout(self.linear(y), drops), x))
    if drops:
        with pytest.raises(GraphCaptureError, match=r"graph_rules\.py:.* draws random numbers in a recomputed part"):
            machine.make(layer, (machine.random(grad=True),))
        return
    graphed, x = machine.make(layer, (machine.random(grad=True),)), machine.random(grad=True)
    graphed(x).sum().backward()
    found = [x.grad, *grads([layer])]
    x.grad = None
    layer.zero_grad()
    layer(x).sum().backward()
    assert all_equal(found, [x.grad, *grads([layer])])


def add_hook(layer: nn.Module) -> None:
    layer.register_forward_pre_hook(lambda *_: None)


def add_inner_hook(layer: nn.Module) -> None:
    next(layer.children()).register_forward_hook(lambda *_: None)


def add_backward_hook(layer: nn.Module) -> None:
    layer.register_full_backward_hook(lambda *_: None)


def add_buffer(layer: nn.Module) -> None:
    device = next(layer.parameters()).device
    layer.register_buffer("scale", torch.ones(1, device=device, requires_grad=True))


@pytest.mark.parametrize("change", [add_hook, add_inner_hook, add_backward_hook, add_buffer])
def test_modules_that_no_replay_could_follow_are_refused(machine: Machine, change: Callable[[nn.Module], None]) -> None:
    [layer] = stack(machine, 1)
    change(layer)
    with pytest.raises(GraphCaptureError, match=r"hook|scale requires grad"):
        machine.make(layer, (machine.random(grad=True),))


def test_all_modules_are_in_one_mode(machine: Machine) -> None:
    first, second = stack(machine, 2)
    second.eval()
    with pytest.raises(GraphCaptureError, match="one mode"):
        machine.make((first, second), ((machine.random(grad=True),),) * 2)


def test_arguments_are_tensors_and_as_many_as_callables(machine: Machine) -> None:
    first, second = stack(machine, 2)
    x = machine.random(grad=True)
    with pytest.raises(TypeError, match="argument 0 is a float"):
        machine.make(first, (1.0,))
    with pytest.raises(TypeError, match=r"write \(x,\)"):
        machine.make(first, x)
    with pytest.raises(ValueError, match="1 sample_args for 2 callables"):
        machine.make((first, second), ((x,),))
    with pytest.raises(ValueError, match="give 6"):
        machine.make((first, second), ((x,),) * 2, order=ONE_CHUNK)
    with pytest.raises(ValueError, match="needs an order"):
        machine.make(first, (x,), reuse_buffers=True)


def test_one_tensor_is_no_static_input_of_two_at_once(machine: Machine) -> None:
    layers, x = tuple(stack(machine, 2)), machine.random(grad=True)
    with pytest.raises(GraphCaptureError, match=r"callable 0 and callable 1 .* one tensor"):
        machine.make(layers, ((x,), (x,)))
    with pytest.raises(GraphCaptureError, match=r"microbatch 0 and .* microbatch 1 .* one tensor"):
        machine.make(layers[:1], ((x,),) * 3, order=ONE_CHUNK)
    machine.make(layers[:1], ((x,),) * 3, order=[1, -1, 1, -1, 1, -1])


def test_outputs_are_tensors_or_none(machine: Machine) -> None:
    layer = Body(machine, lambda self, x: (self.linear(x), None))
    y, nothing = machine.make(layer, (machine.random(grad=True),))(machine.random(grad=True))
    assert y.requires_grad
    assert nothing is None
    with pytest.raises((TypeError, AttributeError)):
        machine.make(Body(machine, lambda self, x: (self.linear(x), 3)), (machine.random(grad=True),))


def test_an_input_without_a_gradient_is_refused_or_allowed(machine: Machine) -> None:
    layer = Body(machine, lambda self, x, unused: self.linear(x))
    samples = machine.random(grad=True), machine.random(grad=True)
    with pytest.raises(RuntimeError, match=r"requires.*grad"):
        machine.make(layer, samples)
    graphed = machine.make(layer, samples, allow_unused_input=True)
    x, unused = machine.random(grad=True), machine.random(grad=True)
    graphed(x, unused).sum().backward()
    assert x.grad is not None
    assert unused.grad is None


# ---- another mode than that of the capture ----


def test_evaluation_after_a_capture_in_training_runs_eagerly(machine: Machine) -> None:
    [layer], [eager] = stack(machine, 1, dropout=0.5), stack(machine, 1, dropout=0.5)
    graphed = machine.make(layer, (machine.random(grad=True),))
    layer.eval()
    eager.eval()
    few = machine.random(2, WIDTH)  # of any shape, since nothing is replayed
    assert torch.equal(graphed(few), eager(few))
    layer.train()
    with pytest.raises(GraphCaptureError, match="shapes"):
        graphed(few)


def test_without_gradients_after_a_capture_with_them_runs_eagerly(machine: Machine) -> None:
    layer = Body(machine)
    graphed = machine.make(layer, (machine.random(grad=True),))
    calls = layer.calls
    with torch.no_grad():
        graphed(machine.random())
    assert layer.calls == calls + 1


def test_a_capture_for_evaluation_has_a_forward_graph_alone(machine: Machine) -> None:
    layer, eager = Body(machine).eval(), Body(machine).eval()
    eager.load_state_dict(layer.state_dict())
    with torch.no_grad():
        graphed = machine.make(layer, (machine.random(),))
        calls, x = layer.calls, machine.random()
        assert torch.equal(graphed(x), eager(x))
        assert layer.calls == calls


# ---- arguments by keyword, several outputs ----


def test_keyword_arguments_are_part_of_the_graph(machine: Machine) -> None:
    layer = Body(machine, lambda self, x, *, scale: self.linear(x) * scale)
    sample = (machine.random(grad=True),), {"scale": machine.random()}
    graphed = machine.make(layer, sample[0], sample_kwargs=sample[1])
    x, scale = machine.random(grad=True), machine.random()
    assert torch.equal(graphed(x, scale=scale), layer.linear(x) * scale)
    for wrong in ({}, {"scale": scale, "more": scale}):
        with pytest.raises(TypeError, match="pass all of the sample call"):
            graphed(x, **wrong)


def test_outputs_that_take_no_gradient(machine: Machine) -> None:
    def routed(self: Body, x: Tensor) -> dict[str, Tensor]:
        y = self.linear(x)
        return {"top": y.detach().argmax(-1), "kept": y.detach() * 2, "y": y}

    layer = Body(machine, routed)
    found = machine.make(layer, (machine.random(grad=True),))(x := machine.random(grad=True))
    expected = routed(layer, x)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert found["y"].requires_grad
    assert not found["top"].requires_grad
    found["y"].sum().backward()
    assert x.grad is not None


# ---- gradients ----


def test_gradients_that_were_kept_are_not_overwritten(machine: Machine) -> None:
    [layer] = stack(machine, 1)
    graphed = machine.make(layer, (machine.random(grad=True),))
    x = machine.random(grad=True)
    graphed(x).sum().backward()
    kept = [x.grad, *grads([layer])]
    before = [g.clone() for g in kept if g is not None]
    layer.zero_grad(set_to_none=True)
    graphed(machine.random(grad=True)).square().sum().backward()
    assert all_equal(kept, before), "they are copies, of a leaf's gradient too"


def test_gradients_add_up_over_calls(machine: Machine) -> None:
    [layer], [eager] = stack(machine, 1), stack(machine, 1)
    graphed = machine.make(layer, (machine.random(grad=True),))
    x, y = machine.random(grad=True), machine.random(grad=True)
    for function, module in ((graphed, layer), (eager, eager)):
        for given in (x, x, y):
            function(given.detach().requires_grad_()).square().sum().backward()
        assert all(g is not None for g in grads([module]))
    assert all_equal(grads([layer]), grads([eager]))


def test_nothing_is_left_when_a_number_is_not_finite(machine: Machine) -> None:
    [layer], [eager] = stack(machine, 1), stack(machine, 1)
    graphed = machine.make(layer, (machine.random(grad=True),))
    assert graphed(torch.full((ROWS, WIDTH), float("nan"), device=machine.device, requires_grad=True)).isnan().all()
    x = machine.random(grad=True)
    assert torch.equal(graphed(x), eager(x))


# ---- graphs in a pipeline ----


def run_pipeline(
    order: Sequence[int],
    layers_per_chunk: Sequence[int],
    layers: Sequence[Any],
    inputs: Sequence[Tensor],
    graphed: bool,
) -> list[Tensor]:
    """Run an order; the inputs' gradients. `layers`: of all chunks, or graphed callables in the samples' layout."""
    count = len(inputs)
    forwards, backwards = [0] * len(layers_per_chunk), [0] * len(layers_per_chunk)
    under_way: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    found: dict[tuple[int, int], Tensor] = {}
    for entry in order:
        chunk = abs(entry) - 1
        if entry > 0:
            m = forwards[chunk]
            y = x = (inputs[m] * (chunk + 1)).detach().requires_grad_()
            for layer in range(layers_per_chunk[chunk]):
                first = sum(layers_per_chunk[:chunk])
                y = layers[first * count + m * layers_per_chunk[chunk] + layer if graphed else first + layer](y)
            under_way[chunk, m] = x, y
            forwards[chunk] += 1
        else:
            x, y = under_way.pop((chunk, backwards[chunk]))
            y.square().sum().backward()
            assert x.grad is not None
            found[chunk, backwards[chunk]] = x.grad
            backwards[chunk] += 1
    return [found[key] for key in sorted(found)]


PIPELINES = {
    "1F1B": (ONE_CHUNK, [2], 3),
    "all forwards first": (GPIPE, [2], 3),
    "interleaved": (INTERLEAVED, [1, 1], 4),
    "uneven chunks": (INTERLEAVED, [1, 3], 4),
}


@pytest.mark.parametrize("reuse", [False, True], ids=["a buffer each", "shared buffers"])
@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_of_graphs_equals_the_eager_one(machine: Machine, name: str, reuse: bool) -> None:
    order, per_chunk, microbatches = PIPELINES[name]
    layers, eager = stack(machine, sum(per_chunk)), stack(machine, sum(per_chunk))
    samples = tuple((machine.random(grad=True),) for _ in range(len(layers) * microbatches))
    graphed = machine.make(
        tuple(layers), samples, order=order, num_layers_per_chunk=per_chunk, reuse_buffers=reuse, num_warmup=1
    )
    assert len(graphed) == len(samples)
    for _ in range(3):
        inputs = [machine.random() for _ in range(microbatches)]
        found = run_pipeline(order, per_chunk, graphed, inputs, True)
        expected = run_pipeline(order, per_chunk, eager, inputs, False)
        assert all_equal(found, expected)
        assert all_equal(grads(layers), grads(eager))


def test_shared_buffers_are_as_many_as_planned(machine: Machine) -> None:
    order, per_chunk, microbatches = PIPELINES["interleaved"]
    layers = stack(machine, 2)
    samples = tuple((machine.random(grad=True),) for _ in range(2 * microbatches))
    graphed = machine.make(tuple(layers), samples, order=order, num_layers_per_chunk=per_chunk, reuse_buffers=True)
    inputs = [machine.random() for _ in range(microbatches)]
    run_pipeline(order, per_chunk, graphed, inputs, True)
    written = sum(any(torch.equal(s, i * k) for i in inputs for k in (1, 2)) for (s,) in samples)
    assert written == plan_buffers(order, per_chunk).num_buffers < 2 * microbatches


def test_samples_that_serve_nobody_are_let_go(machine: Machine) -> None:
    layers = tuple(stack(machine, 1))
    samples = [(machine.random(grad=True),) for _ in range(6)]
    alive = [weakref.ref(sample) for (sample,) in samples]
    graphed = machine.make(layers, samples, order=[1, -1, 1, -1, 1, 1, -1, -1, 1, -1, 1, -1], reuse_buffers=True)
    used = {one.static_inputs[0].data_ptr() for one in graphed}
    assert len(used) == 2
    del samples
    gc.collect()
    left = [reference() for reference in alive]
    assert {x.data_ptr() for x in left if x is not None} <= used


def test_a_plan_one_step_early_corrupts_and_was_refused(machine: Machine) -> None:
    machine.needs("local", "emulated")
    order, early = ONE_CHUNK, plan_buffers(ONE_CHUNK, [1], early_release=2)
    with pytest.raises(PlanError):
        check_plan(early, order)
    layers, eager = stack(machine, 1), stack(machine, 1)
    samples = tuple((machine.random(grad=True),) for _ in range(3))
    graphed = machine.make(tuple(layers), samples, order=order, reuse_buffers=True, plan=early)
    inputs = [machine.random() for _ in range(3)]
    run_pipeline(order, [1], graphed, inputs, True)
    run_pipeline(order, [1], eager, inputs, False)
    assert not all_equal(grads(layers), grads(eager))


def test_sharing_buffers_makes_the_pool_smaller(machine: Machine) -> None:
    machine.needs("emulated")
    peaks = []
    for reuse in (False, True):
        layers = stack(machine, 2)
        samples = tuple((machine.random(64, WIDTH, grad=True),) for _ in range(16))
        graphed = machine.make(tuple(layers), samples, order=[1, -1] * 8, reuse_buffers=reuse)
        peaks.append(graphed[0].pool.peak_bytes)
    assert peaks[1] < peaks[0] / 2


def test_a_graph_for_one_microbatch_serves_all_where_each_goes_back_at_once(machine: Machine) -> None:
    layers, eager = stack(machine, 2), stack(machine, 2)
    samples = tuple((machine.random(grad=True),) for _ in range(2))
    graphed = machine.make(tuple(layers), samples, order=[1, -1], num_layers_per_chunk=[2])
    for _ in range(4):
        [x] = inputs = [machine.random()]
        found = run_pipeline([1, -1], [2], graphed, inputs, True)
        assert all_equal(found, run_pipeline([1, -1], [2], eager, [x], False))
    assert all_equal(grads(layers), grads(eager))


# ---- gradients inside graphs ----


def engine_linear(machine: Machine, seed: int = 3) -> ColumnParallelLinear:
    """A layer that adds to `main_grad` itself, and can put its weight gradient off."""
    layer = ColumnParallelLinear(
        "fc", WIDTH, WIDTH, group=single_process_groups(device=machine.device).tp, gradient_accumulation_fusion=True,
        seed=seed, device=machine.device,
    )  # fmt: skip
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
        record_of(parameter).has_gradient = False
    return layer


class OnlyOutput(nn.Module):
    """A layer without the second thing it returns."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(x))[0]  # nothing behind it: its dy is the static one


def test_a_gradient_added_inside_the_graph(machine: Machine) -> None:
    layer, eager = OnlyOutput(engine_linear(machine)), OnlyOutput(engine_linear(machine))
    heard: list[Tensor] = []
    layer.layer.weight.register_post_accumulate_grad_hook(heard.append)  # type: ignore[union-attr]
    graphed = machine.make(layer, (machine.random(grad=True),))
    for parameter in layer.parameters():
        parameter.main_grad.zero_()  # type: ignore[attr-defined]
        assert record_of(parameter).added_elsewhere, "a wrapper zeroes it: the graph always adds"
    for _ in range(3):
        x = machine.random()
        graphed(x.clone().requires_grad_()).square().sum().backward()
        eager(x.clone().requires_grad_()).square().sum().backward()
    weights = [module.layer.weight for module in (layer, eager)]
    assert torch.equal(weights[0].main_grad, weights[1].main_grad)  # type: ignore[union-attr, arg-type]
    assert weights[0].grad is None
    assert len(heard) == 3, (
        "the hook of the parameter is called at each replay, although autograd has no gradient for it"
    )


def test_weight_gradients_have_a_graph_of_their_own(machine: Machine) -> None:
    machine.needs("local", "emulated")
    layers = [OnlyOutput(engine_linear(machine, seed)) for seed in (1, 2)]
    eager = [OnlyOutput(engine_linear(machine, seed)) for seed in (1, 2)]
    order = [1, 2, -2, -2.5, 1, -1, 2, -1.5, -2, -2.5, -1, -1.5]
    samples = tuple((machine.random(grad=True),) for _ in range(4))
    graphed = machine.make(tuple(layers), samples, order=order, reuse_buffers=True, num_layers_per_chunk=[1, 1])
    for module in layers:
        for parameter in module.parameters():
            parameter.main_grad.zero_()  # type: ignore[attr-defined]
    inputs = [machine.random() for _ in range(2)]
    whole = [entry for entry in order if entry == int(entry)]
    run_pipeline([int(entry) for entry in whole], [1, 1], eager, inputs, False)
    seen, under_way = [0] * 6, {}
    for entry in order:
        chunk = abs(int(entry)) - 1
        kind = 0 if entry > 0 else 1 if entry == int(entry) else 2
        m = seen[2 * kind + chunk]
        seen[2 * kind + chunk] += 1
        one = graphed[chunk * 2 + m]
        if kind == 0:
            under_way[chunk, m] = one((inputs[m] * (chunk + 1)).detach().requires_grad_())
        elif kind == 1:
            before = layers[chunk].layer.weight.main_grad.clone()  # type: ignore[union-attr, operator]
            under_way.pop((chunk, m)).square().sum().backward()
            assert torch.equal(before, layers[chunk].layer.weight.main_grad), "left to the other graph"  # type: ignore[union-attr, arg-type]
        else:
            one.backward_dw()
    for module, other in zip(layers, eager, strict=True):
        assert torch.equal(module.layer.weight.main_grad, other.layer.weight.main_grad)  # type: ignore[union-attr, arg-type]
        assert torch.equal(module.layer.bias.grad, other.layer.bias.grad)  # type: ignore[union-attr, arg-type]


def test_weight_gradients_that_nobody_puts_off_are_refused(machine: Machine) -> None:
    layers = tuple(stack(machine, 1))
    with pytest.raises(RuntimeError, match=r"weight gradients|wgrad"):
        machine.make(layers, ((machine.random(grad=True),),), order=[1, -1, -1.5], num_layers_per_chunk=[1])


# ---- life ----


def test_after_reset_a_call_is_refused_and_the_memory_is_gone(machine: Machine) -> None:
    [layer] = stack(machine, 1)
    graphed = machine.make(layer, (machine.random(grad=True),))
    graphed(machine.random(grad=True))
    pool = graphed.pool
    graphed.reset()
    graphed.reset()
    with pytest.raises(GraphCaptureError, match="was reset"):
        graphed(machine.random(grad=True))
    if machine.impl == "emulated":
        assert pool.live_bytes == 0


def test_a_hundred_captures_leave_no_memory(machine: Machine) -> None:
    [layer] = stack(machine, 1)
    x = machine.random(grad=True)
    alive: list[weakref.ref[Any]] = []

    def held() -> int:
        gc.collect()
        if machine.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            return torch.cuda.memory_reserved()
        return sum(reference() is not None for reference in alive)

    before = 0
    for i in range(30 if machine.impl == "transformer_engine" and machine.device == "cpu" else 100):
        graphed = machine.make(layer, (x,), num_warmup=1)
        if machine.impl == "emulated":
            alive.append(weakref.ref(graphed.pool))
        graphed(x).sum().backward()
        graphed.reset()
        if i == 10:
            before = held()
    del graphed
    assert held() <= max(before, 1)


def test_a_weak_reference_keeps_the_address_and_not_the_memory(machine: Machine) -> None:
    machine.needs("emulated", "local")
    from labkit.graphs.backend import get_backend

    backend = machine.backend or get_backend(machine.impl)
    pool = backend.new_pool()
    with backend.capturing(pool, "first") as first:
        made = {"x": [torch.ones(1024, device=machine.device)], "none": None}
    address = made["x"][0].data_ptr()
    weak = make_weak_ref(made, backend)
    del made
    with backend.capturing(pool, "second") as second:
        other = torch.zeros(1024, device=machine.device)
    assert weak["none"] is None
    assert weak["x"][0].data_ptr() == address == other.data_ptr(), "the next capture took the block"
    first.replay()
    assert (weak["x"][0] == 1).all()
    second.replay()
    assert (weak["x"][0] == 0).all(), "what is read is what lies there now"
