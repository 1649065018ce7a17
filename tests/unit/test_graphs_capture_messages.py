"""What is said where a graph cannot do what was asked: by whom, why, and what to do."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from graph_rules import Body, Machine, stack
from torch import Tensor, nn

from labkit.graphs import GraphCaptureError, make_graphed_callables, plan_buffers
from labkit.graphs.checks.before_capture import share_memory

HOST = Machine("emulated", "cpu")


def x(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(*(shape or (4, 8))).requires_grad_(grad)


def test_a_graph_inside_a_graph() -> None:
    inner = make_graphed_callables(stack(HOST, 1)[0], (x(),))
    with pytest.raises(GraphCaptureError, match=r"test_graphs_capture_messages\.py:\d+ .*capture the callable itself"):
        make_graphed_callables(lambda a: inner(a) * 2, (x(),), num_warmup=0)

    def nested(a: Tensor) -> Tensor:
        return make_graphed_callables(torch.tanh, (x(),))(a)

    with pytest.raises(GraphCaptureError, match=r"test_graphs_capture_messages\.py:\d+ .*being captured"):
        make_graphed_callables(nested, (x(),), num_warmup=0)


def test_a_plan_of_something_else() -> None:
    layer = nn.Linear(8, 8)
    with pytest.raises(ValueError, match=r"plan is of another order: chunk 0 layer 0 microbatch 1"):
        make_graphed_callables((layer,), ((x(),), (x(),)), order=[1, 1, -1, -1], reuse_buffers=True,
                               plan=plan_buffers([1, -1], 1))  # fmt: skip
    order = [1, -1, 1, -1]
    with pytest.raises(ValueError, match=r"microbatch 1 the static input of .* tell plan_buffers their signatures"):
        make_graphed_callables((layer,), ((x(),), (x(2, 8),)), order=order, reuse_buffers=True,
                               plan=plan_buffers(order, 1))  # fmt: skip


def test_graphs_are_not_copied() -> None:
    graphed = make_graphed_callables(nn.Linear(8, 8), (x(),))
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"neither copied nor pickled: copy \.function"):
            attempt(graphed)


def test_tensors_of_inference_mode() -> None:
    layer = nn.Linear(8, 8).eval()
    with torch.inference_mode():
        graphed = make_graphed_callables(layer, (x(grad=False),))
        given = x(grad=False)
        assert torch.equal(graphed(given), layer(given))
    with torch.no_grad(), pytest.raises(GraphCaptureError, match="captured in inference mode"):
        graphed(x(grad=False))
    with torch.no_grad():
        graphed = make_graphed_callables(layer, (x(grad=False),))
    with torch.inference_mode():
        assert torch.equal(graphed(given), layer(given))


def test_samples_that_are_no_tensors() -> None:
    with pytest.raises(TypeError, match=r"keyword argument mask is None; .* leave it out"):
        make_graphed_callables(lambda a, mask=None: a * 2, (x(),), sample_kwargs={"mask": None})


def test_another_device_than_any_implementation_has() -> None:
    sample = torch.empty(4, 8, device="meta")
    with pytest.raises(ValueError, match=r"on meta.* move modules and sample arguments to cpu or cuda"):
        make_graphed_callables(nn.Linear(8, 8, device="meta"), (sample,))


def test_a_part_of_a_layer_does_not_run_in_the_place_of_its_graph() -> None:
    """Its graph takes and gives other tensors than its forward."""
    layer = Body(HOST)
    layer.cuda_graph_manual_hooks = []  # as of a layer that is wrapped
    graphed = make_graphed_callables(layer, (x(),))
    layer.linear.eval()
    with pytest.raises(GraphCaptureError, match=r"in another mode than at capture"):
        graphed(x())


def test_whether_tensors_share_memory_is_told_by_their_elements() -> None:
    wide = torch.zeros(4, 8)
    assert share_memory(wide, wide[1:2])
    assert share_memory(wide[:, :4], wide[:, 3:])
    assert not share_memory(wide[:, :4], wide[:, 4:])
    assert not share_memory(wide[::2], wide[1::2])
    assert share_memory(wide[:, 1:3], wide[2].view(torch.int32))
    assert not share_memory(wide, torch.zeros(4, 8))
    assert not share_memory(wide[:0], wide)


def test_a_backward_behind_a_reset() -> None:
    graphed = make_graphed_callables(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), (x(),))
    loss = graphed(x()).sum()
    graphed.reset()
    with pytest.raises(GraphCaptureError, match="was reset"):
        loss.backward()
