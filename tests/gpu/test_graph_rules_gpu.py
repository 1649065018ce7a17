"""The rules of graphs on a GPU: our own captures, and Transformer Engine's where it is installed."""

from __future__ import annotations

import pytest
import torch
from graph_rules import *  # noqa: F403
from graph_rules import FAILS_CAPTURE, Body, Machine, stack
from graph_rules_numbers import *  # noqa: F403

from labkit.graphs import GraphCaptureError, make_graphed_callables
from labkit.launch.transformer_engine import why_no_transformer_engine
from labkit.parallel.random import RngTracker

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["local", "transformer_engine"])
def machine(request: pytest.FixtureRequest) -> Machine:
    impl: str = request.param
    if impl == "transformer_engine" and (missing := why_no_transformer_engine()) is not None:
        pytest.skip(f"needs transformer_engine: {missing}")
    return Machine(impl, "cuda")


# ---- what only a GPU has ----


def test_auto_is_local_for_tensors_on_the_gpu() -> None:
    layer = torch.nn.Linear(8, 8, device="cuda")
    graphed = make_graphed_callables(layer, (torch.randn(4, 8, device="cuda", requires_grad=True),))
    assert graphed.impl == "local"
    with pytest.raises(ValueError, match="captures tensors on cpu"):
        make_graphed_callables(layer, (torch.randn(4, 8, device="cuda"),), impl="emulated")


def test_a_sample_on_the_host_is_refused() -> None:
    layer = torch.nn.Bilinear(8, 8, 8, device="cuda")
    with pytest.raises(ValueError, match="move them to one device"):
        make_graphed_callables(layer, (torch.randn(4, 8, device="cuda"), torch.randn(4, 8)))


@FAILS_CAPTURE
def test_a_refusal_names_the_line() -> None:
    layer = Body(Machine("local", "cuda"), lambda self, x: self.linear(x) * x.detach().sum().item())
    with pytest.raises(GraphCaptureError, match=r"test_graph_rules_gpu\.py:\d+"):
        make_graphed_callables(layer, (torch.randn(4, 8, device="cuda", requires_grad=True),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_a_weak_reference_of_every_type(dtype: torch.dtype) -> None:
    from labkit.graphs.cuda.local_backend import weak_cuda_tensor

    tensor = (torch.randn(6, 4, device="cuda") * 10).to(dtype).t()
    before = torch.cuda.memory_allocated()
    weak = weak_cuda_tensor(tensor)
    assert weak.data_ptr() == tensor.data_ptr()
    assert (weak.dtype, weak.shape, weak.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert torch.equal(weak, tensor)
    assert torch.cuda.memory_allocated() == before
    del tensor
    assert torch.cuda.memory_allocated() < before, "it keeps no memory"


def test_named_random_states_go_on_inside_graphs(machine: Machine) -> None:
    machine.needs("local")

    def dropped(tracker: RngTracker, x: torch.Tensor) -> torch.Tensor:
        with tracker.fork("mine"):
            return torch.nn.functional.dropout(x, 0.5)

    trackers = [RngTracker("cuda") for _ in range(2)]
    for tracker in trackers:
        tracker.add("mine", 7)
    layers = [Body(machine, lambda self, x, tracker=tracker: dropped(tracker, x)) for tracker in trackers]
    for layer, tracker in zip(layers, trackers, strict=True):
        layer.tracker = tracker  # type: ignore[assignment]
    graphed = machine.make(layers[0], (torch.ones(64, 8, device="cuda", requires_grad=True),))
    x = torch.ones(64, 8, device="cuda", requires_grad=True)
    for _ in range(3):
        assert torch.equal(graphed(x), layers[1](x))


@FAILS_CAPTURE
def test_out_of_memory_at_capture_is_torchs_error_and_the_next_capture_works() -> None:
    machine = Machine("local", "cuda")
    torch.nn.Linear(8, 8, device="cuda")(machine.random())  # loads cuBLAS, which no capture can do
    free, _ = torch.cuda.mem_get_info()
    layer = Body(machine, lambda self, x: self.linear(x) + torch.empty(free, 2, device="cuda").sum())
    with pytest.raises(torch.OutOfMemoryError):
        machine.make(layer, (machine.random(grad=True),), num_warmup=0)
    torch.cuda.empty_cache()
    [other], [eager] = stack(machine, 1), stack(machine, 1)
    x = machine.random(grad=True)
    assert torch.equal(machine.make(other, (machine.random(grad=True),))(x), eager(x))


def test_the_pool_is_flat_over_a_thousand_replays(machine: Machine) -> None:
    [layer] = stack(machine, 1)
    graphed = machine.make(layer, (machine.random(grad=True),))
    x = machine.random(grad=True)
    graphed(x).sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    for _ in range(1000):
        graphed(x).sum().backward()
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() == before


def test_one_pool_is_smaller_than_one_for_each_graph(machine: Machine) -> None:
    machine.needs("local")

    def reserved(*, shared: bool) -> int:
        layers = stack(machine, 8)
        samples = [(torch.randn(4096, 8, device="cuda", requires_grad=True),) for _ in layers]
        if shared:
            return machine.make(tuple(layers), tuple(samples))[0].pool.reserved_bytes
        return sum(machine.make(one, sample).pool.reserved_bytes for one, sample in zip(layers, samples, strict=True))

    assert reserved(shared=True) <= reserved(shared=False) / 2
