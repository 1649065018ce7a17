"""More of what graphs must do (`graph_rules.py`): a replay gives right numbers, or is refused. None is silently wrong.

Each rule is a mistake that a bare CUDA graph does not notice. Imported together with `graph_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from graph_rules import ROWS, WIDTH, Body, Machine, all_equal, grads, run_pipeline, stack
from torch import Tensor, nn

from labkit.graphs import GraphCaptureError


def both(machine: Machine, forward: Callable[[Body, Tensor], Any] | None = None) -> tuple[Body, Body]:
    """A layer and a twin with the same weights."""
    layer, eager = Body(machine, forward), Body(machine, forward)
    eager.load_state_dict(layer.state_dict())
    return layer, eager


@contextmanager
def replayed(layer: Body) -> Iterator[None]:
    """Inside the block the layer's Python does not run."""
    calls = layer.calls
    yield
    assert layer.calls == calls, "it ran eagerly"


# ---- gradients that leave ----


@pytest.mark.parametrize(
    "derive",
    [lambda p: p + 1.0, lambda p: p.view(ROWS, WIDTH)],
    ids=["sum", "view"],
)
def test_gradients_that_autograd_passes_on_are_not_overwritten(
    machine: Machine, derive: Callable[[Tensor], Tensor]
) -> None:
    """The gradient of a sum or a view is handed on as the tensor it is, and would become the `.grad` of a leaf."""
    layer, eager = both(machine)
    graphed = machine.make(layer, (machine.random(grad=True),))
    start, weights = machine.random(), [machine.random() for _ in range(3)]
    found = []
    for function in (graphed, eager):
        leaf = start.clone().requires_grad_()
        for weight in weights:
            (function(derive(leaf)) * weight).sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("reuse", [False, True])
def test_an_input_of_several_layers_collects_all_of_its_gradients(machine: Machine, reuse: bool) -> None:
    """Context for layers 0 and 2: what layer 2 gives waits while the graphs of layers 1 and 0 replay."""

    def mixed(self: Body, h: Tensor, *context: Tensor) -> Tensor:
        return torch.tanh(self.linear(h)) + sum(torch.tanh(self.linear(c)) for c in context)

    pairs = [both(machine, mixed) for _ in range(3)]
    samples = [tuple(machine.random(grad=True) for _ in range(count)) for count in (2, 1, 2)]
    graphed = machine.make(
        tuple(layer for layer, _ in pairs), samples, order=[1, -1], num_layers_per_chunk=[3], reuse_buffers=reuse
    )
    x, c = machine.random(), machine.random()
    found = []
    for one, two, three in (graphed, [eager for _, eager in pairs]):
        a, b = x.clone().requires_grad_(), c.clone().requires_grad_()
        context = b * 1
        three(two(one(a, context)), context).square().sum().backward()
        found.append([a.grad, b.grad])
    assert all_equal(*found)


def test_an_output_of_several_layers_collects_all_of_its_gradients(machine: Machine) -> None:
    """Layer 3 reads what layer 0 made: its gradient waits while the graphs of layers 2 and 1 replay."""
    last = lambda self, h, early: (self.linear(h) * early).tanh()  # noqa: E731
    pairs = [both(machine, body) for body in (None, None, None, last)]
    samples = [tuple(machine.random(grad=True) for _ in range(count)) for count in (1, 1, 1, 2)]
    graphed = machine.make(
        tuple(layer for layer, _ in pairs), samples, order=[1, -1], num_layers_per_chunk=[4], reuse_buffers=True
    )
    x = machine.random()
    found = []
    for layers in (graphed, [eager for _, eager in pairs]):
        h = early = layers[0](given := x.clone().requires_grad_())
        for layer in layers[1:3]:
            h = layer(h)
        layers[3](h, early).square().sum().backward()
        found.append(given.grad)
    assert torch.equal(*found)
    assert all_equal(*(grads(side) for side in zip(*pairs, strict=True)))


def test_a_gradient_between_graphs_that_a_hook_keeps_is_a_copy(machine: Machine) -> None:
    machine.needs("local", "emulated")
    layers, _ = zip(*(both(machine) for _ in range(2)), strict=True)
    one, two = machine.make(layers, ((machine.random(grad=True),), (machine.random(grad=True),)))
    middle, kept = one(machine.random(grad=True)), []
    middle.register_hook(kept.append)
    two(middle).sum().backward()
    before = kept[0].clone()
    two(one(machine.random(grad=True))).square().sum().backward()
    assert torch.equal(kept[0], before)


# ---- what wants a gradient ----


def test_an_input_that_wants_a_gradient_its_sample_did_not_want_is_refused(machine: Machine) -> None:
    layers, _ = zip(*(both(machine) for _ in range(2)), strict=True)
    one, two = machine.make(layers, ((machine.random(grad=True),), (machine.random(),)))
    with pytest.raises(GraphCaptureError, match="argument 0 requires grad, and its sample did not"):
        two(one(machine.random()))
    two(one(machine.random()).detach()).sum().backward()
    assert grads([layers[1]])[0] is not None


def test_parameters_that_were_unfrozen_since_are_refused(machine: Machine) -> None:
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).to(machine.device)
    layer[0].requires_grad_(False)
    graphed = machine.make(layer, (machine.random(grad=True),))
    layer[0].requires_grad_(True)
    with pytest.raises(GraphCaptureError, match=r"parameter 0\.weight .*not what it was at capture"):
        graphed(machine.random(grad=True))
    layer[0].requires_grad_(False)
    layer[1].requires_grad_(False)  # then nothing asks for the gradient that the graph computes
    graphed(machine.random(grad=True)).sum().backward()
    assert grads([layer]) == [None] * 4


def test_a_layer_without_differentiable_outputs_replays(machine: Machine) -> None:
    def routed(self: Body, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.linear(x)

    machine.needs("local", "emulated")
    layer, eager = both(machine, routed)
    graphed = machine.make(layer, (machine.random(),))
    x = machine.random()
    with replayed(layer):
        assert torch.equal(graphed(x), eager(x))


def test_functions_that_hide_parameters_are_refused(machine: Machine) -> None:
    """Their gradients would be lost, and the hooks of their parameters called by the capture."""
    machine.needs("local", "emulated")
    layer, heard = Body(machine), []
    layer.linear.weight.register_post_accumulate_grad_hook(heard.append)
    for hidden in (lambda x: layer(x), layer.forward, lambda x: x * layer.linear.weight):
        with pytest.raises(GraphCaptureError, match=r"neither an argument nor a parameter .* Pass the module itself"):
            machine.make(hidden, (machine.random(WIDTH, WIDTH, grad=True),))
    assert heard == []
    assert grads([layer]) == [None, None]


# ---- what was replaced ----


def replace_parameter(layer: nn.Module) -> None:
    layer.linear.weight = nn.Parameter(torch.randn_like(layer.linear.weight))  # type: ignore[union-attr, arg-type]


def assign_state(layer: nn.Module) -> None:
    layer.load_state_dict({name: value.clone() * 3 for name, value in layer.state_dict().items()}, assign=True)


def replace_module(layer: nn.Module) -> None:
    layer.linear = nn.Linear(WIDTH, WIDTH, device=layer.linear.weight.device)  # type: ignore[union-attr, arg-type]


def replace_buffer(layer: nn.Module) -> None:
    layer.scale = torch.full_like(layer.scale, 5.0)  # type: ignore[arg-type]


def move_buffer(layer: nn.Module) -> None:
    layer.scale.data = torch.full_like(layer.scale, 5.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [replace_parameter, assign_state, replace_module, replace_buffer, move_buffer])
def test_what_was_replaced_since_is_refused(machine: Machine, change: Callable[[nn.Module], None]) -> None:
    layer = Body(machine, lambda self, x: self.linear(x) * self.scale)
    layer.register_buffer("scale", torch.ones(WIDTH, device=machine.device))
    graphed = machine.make(layer, (machine.random(grad=True),))
    layer.scale.mul_(3.0)  # type: ignore[operator]
    x = machine.random(grad=True)
    assert torch.equal(graphed(x), layer.linear(x) * 3.0), "in place it is seen"
    change(layer)
    with pytest.raises(GraphCaptureError, match=r"(parameter|buffer|module) .*was (replaced|moved)"):
        graphed(x)


def test_a_buffer_that_the_layer_itself_replaces_is_refused(machine: Machine) -> None:
    machine.needs("local", "emulated")

    def counting(self: Body, x: Tensor) -> Tensor:
        self.count = self.count + 1  # type: ignore[has-type]
        return self.linear(x) * self.count

    layer = Body(machine, counting)
    layer.register_buffer("count", torch.zeros((), device=machine.device))
    with pytest.raises(GraphCaptureError, match="buffer count was replaced while it was captured"):
        machine.make(layer, (machine.random(grad=True),))


# ---- one place for one value ----


def test_arguments_that_lie_on_each_other_are_refused(machine: Machine) -> None:
    layer = Body(machine, lambda self, x, y: self.linear(x) * 2 + y)
    x, wide = machine.random(grad=True), machine.random(ROWS, 2 * WIDTH)
    for samples in ((x, x), (wide[:, :WIDTH], wide[:, 1 : WIDTH + 1])):
        with pytest.raises(GraphCaptureError, match="argument 0 and argument 1 of the sample share memory"):
            machine.make(layer, samples)
    with pytest.raises(GraphCaptureError, match=r"argument 0 is expanded: .*\.contiguous\(\)"):
        machine.make(layer, (machine.random(1, WIDTH).expand(ROWS, WIDTH), machine.random()))
    graphed = machine.make(layer, (wide[:, :WIDTH], wide[:, WIDTH:]))
    a, b = machine.random(), machine.random()
    assert torch.equal(graphed(a, b), layer.linear(a) * 2 + b)


def test_samples_without_gradients_are_of_one_microbatch_too(machine: Machine) -> None:
    """Tokens: between the forward and the backward of one microbatch they may not become those of another."""
    embedding, tokens = nn.Embedding(16, WIDTH).to(machine.device), torch.arange(ROWS, device=machine.device)
    with pytest.raises(GraphCaptureError, match=r"microbatch 0 and .* microbatch 1 .* one tensor"):
        machine.make((embedding,), ((tokens,),) * 2, order=[1, 1, -1, -1])
    samples = tuple((tokens.clone(),) for _ in range(2))
    graphed = machine.make((embedding,), samples, order=[1, 1, -1, -1])
    found = []
    for functions in (graphed, (embedding,) * 2):
        embedding.zero_grad()
        outputs = [function(tokens + 4 * m) for m, function in enumerate(functions)]
        for m, y in enumerate(outputs):
            (y * (m + 1)).sum().backward()
        found.append(embedding.weight.grad.clone())
    assert torch.equal(*found)


def test_static_inputs_may_be_given_in_each_others_place(machine: Machine) -> None:
    layer = Body(machine, lambda self, x, y: self.linear(x) * 2 + y)
    a, b = machine.random(), machine.random()
    # detached: nodes of autograd that live on would be those of this stream, to which no backward of a capture may come
    expected = (layer.linear(b.clone()) * 2 + a).detach()
    assert torch.equal(machine.make(layer, (a, b))(b, a), expected)


def test_another_view_of_a_static_input_is_copied(machine: Machine) -> None:
    machine.needs("local", "emulated")
    layer = Body(machine, lambda self, x: torch.tanh(x) + x)
    sample = machine.random(WIDTH, WIDTH)
    graphed, values = machine.make(layer, (sample,)), sample.clone()
    assert torch.equal(graphed(sample.t()), torch.tanh(values.t()) + values.t())
    sample = torch.randn(4, dtype=torch.complex64, device=machine.device)
    graphed, values = machine.make(Body(machine, lambda self, x: x * 2), (sample,)), sample.clone()
    assert torch.equal(graphed(sample.conj()), values.conj() * 2)


def test_changes_of_an_input_in_place_reach_the_caller(machine: Machine) -> None:
    machine.needs("local", "emulated")
    layer, eager = both(machine, lambda self, x, seen: self.linear(x) + seen.add_(1))
    graphed = machine.make(layer, (machine.random(grad=True), machine.random()))
    x, seen = machine.random(grad=True), machine.random()
    other = seen.clone()
    with replayed(layer):
        assert torch.equal(graphed(x, seen), eager(x, other))
    assert torch.equal(seen, other)
    with pytest.raises(GraphCaptureError, match=r"graph_rules_numbers\.py:\d+ .*x = x\.clone\(\)"):
        machine.make(Body(machine, lambda self, x: x.mul_(2)), (machine.random(grad=True),))


# ---- backwards ----


def test_gradients_of_gradients_are_refused(machine: Machine) -> None:
    machine.needs("local", "emulated")
    layer = Body(machine)
    graphed = machine.make(layer, (machine.random(grad=True),))
    x = machine.random(grad=True)
    with pytest.raises(GraphCaptureError, match="create_graph=True"):
        torch.autograd.grad(graphed(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("retain", [False, True])
def test_a_forward_has_one_backward(machine: Machine, retain: bool) -> None:
    machine.needs("local", "emulated")
    graphed = machine.make(Body(machine), (machine.random(grad=True),))
    loss = graphed(machine.random(grad=True)).square().sum()
    loss.backward(retain_graph=retain)
    with pytest.raises(RuntimeError, match=r"has run already|second time"):
        loss.backward()


def test_a_backward_whose_forward_was_overwritten_is_refused(machine: Machine) -> None:
    machine.needs("local", "emulated")
    layer, eager = both(machine)
    graphed, bare = (machine.make(layer, (machine.random(grad=True),), watch_replays=watch) for watch in (True, False))
    first, second = (graphed(machine.random(grad=True)).sum() for _ in range(2))
    with pytest.raises(GraphCaptureError, match="its graph was replayed again"):
        first.backward()
    second.backward()
    layer.zero_grad()
    inputs = [machine.random() for _ in range(2)]
    for one, module in ((bare, layer), (eager, eager)):
        losses = [one(x.clone().requires_grad_()).square().sum() for x in inputs]
        for loss in losses:
            loss.backward()
        assert all(g is not None for g in grads([module]))
    assert not all_equal(grads([layer]), grads([eager])), "what is refused would be wrong"


def test_a_forward_that_is_dropped_is_in_nobodys_way(machine: Machine) -> None:
    layer, eager = both(machine)
    graphed = machine.make(layer, (machine.random(grad=True),))
    kept = [graphed(machine.random(grad=True)) for _ in range(3)]
    x = machine.random()
    for one in (graphed, eager):
        one(x.clone().requires_grad_()).square().sum().backward()
    assert all_equal(grads([layer]), grads([eager]))
    assert len(kept) == 3


@pytest.mark.parametrize("ran", [[1, 1, 1, -1, -1, -1], [1, 1, -1, -1, 1, -1]], ids=["all forwards first", "by twos"])
def test_another_order_than_that_of_the_capture_is_refused(machine: Machine, ran: list[int]) -> None:
    machine.needs("local", "emulated")
    layers = stack(machine, 2)
    samples = tuple((machine.random(grad=True),) for _ in range(6))
    graphed = machine.make(
        tuple(layers), samples, order=[1, -1] * 3, num_layers_per_chunk=[2], reuse_buffers=True, num_warmup=1
    )
    inputs = [machine.random() for _ in range(3)]
    with pytest.raises(GraphCaptureError, match="in the order of the capture"):
        run_pipeline(ran, [2], graphed, inputs, True)
    run_pipeline([1, -1] * 3, [2], graphed, inputs, True)


def test_an_output_that_the_backward_reads_is_not_changed_in_place(machine: Machine) -> None:
    machine.needs("local", "emulated")
    layer, eager = both(machine)  # ends in tanh, whose backward reads y
    graphed = machine.make(layer, (machine.random(grad=True),))
    with pytest.raises(RuntimeError, match="in place since its forward"):
        graphed(machine.random(grad=True)).add_(1).sum().backward()
    layer, eager = both(machine, lambda self, x: self.linear(x))  # whose backward reads x
    graphed = machine.make(layer, (machine.random(grad=True),))
    for _ in range(2):
        x = machine.random()
        for one in (graphed, eager):
            one(x.clone().requires_grad_()).add_(1).square().sum().backward()
    assert all_equal(grads([layer]), grads([eager]))


def test_an_output_that_nobody_used_gives_no_gradient_of_before(machine: Machine) -> None:
    layer, eager = both(machine, lambda self, x: (self.linear(x), torch.tanh(self.linear(x))))
    graphed = machine.make(layer, (machine.random(grad=True),))
    sum(y.sum() for y in graphed(machine.random(grad=True))).backward()  # type: ignore[union-attr]
    layer.zero_grad()
    x = machine.random()
    for one in (graphed, eager):
        one(x.clone().requires_grad_())[1].square().sum().backward()
    assert all_equal(grads([layer]), grads([eager]))


# ---- another mode than that of the capture ----


def test_the_mode_of_every_module_inside_counts(machine: Machine) -> None:
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)).to(machine.device)
    graphed = machine.make(layer, (machine.random(grad=True),))
    layer[1].eval()
    x = machine.random(grad=True)
    assert torch.equal(graphed(x), layer(x))


def test_a_call_under_autocast_is_computed_under_autocast(machine: Machine) -> None:
    layer, eager = both(machine)
    graphed = machine.make(layer, (machine.random(grad=True),))
    x = machine.random(grad=True)
    with torch.autocast(machine.device, torch.bfloat16):
        assert torch.equal(graphed(x), eager(x))
    with torch.autocast(machine.device, torch.bfloat16, cache_enabled=False):
        graphed = machine.make(layer, (machine.random(grad=True),))
        with replayed(layer):
            assert torch.equal(graphed(x), eager(x))
    assert torch.equal(graphed(x), eager(x))


def test_hooks_that_came_later_are_refused(machine: Machine) -> None:
    layer = Body(machine)
    graphed = machine.make(layer, (machine.random(grad=True),))
    handle = layer.linear.register_forward_hook(lambda *_: None)
    with pytest.raises(GraphCaptureError, match="a hook was registered"):
        graphed(machine.random(grad=True))
    handle.remove()
    graphed(machine.random(grad=True))
    handle = nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
    try:
        with pytest.raises(GraphCaptureError, match="a hook was registered"):
            graphed(machine.random(grad=True))
        with pytest.raises(GraphCaptureError, match="a hook is registered for all modules"):
            machine.make(layer, (machine.random(grad=True),))
    finally:
        handle.remove()
