"""A layer of experts cut short as for a graph, and resumed with what was stored, is the whole layer, bit for bit."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from labkit.comm.capturing import GraphCaptureError, graph_capturing, graph_warmup
from labkit.config import GraphConfig, ModelConfig, MoEConfig
from labkit.graphs import FullIterationGraph, make_graphed_callables
from labkit.graphs.cuda_graph_helper import CudaGraphHelper
from labkit.graphs.partial_moe import (
    CutMoELayer,
    MoECudaGraphPartialCaptureSignal,
    MoECudaGraphTensorStore,
    fill_store,
)
from labkit.graphs.scope import layer_scope
from labkit.models import GPTModel
from labkit.moe import MoELayer, RoutingReplay
from labkit.parallel import single_process_groups
from labkit.schedules import one_f_one_b, zero_bubble_h1

GROUPS = single_process_groups()
MODEL = ModelConfig(
    layers=2, hidden=16, heads=4, vocab_size=64, make_vocab_size_divisible_by=16, seq_length=16, activation="swiglu",
    ffn_hidden=24, bias=False, init_std=0.2,
)  # fmt: skip
MOE = MoEConfig(num_experts=8, ffn_hidden=12, top_k=2)
SHARED = replace(MOE, shared_expert_ffn_hidden=20, shared_expert_gate=True)
OVERLAPPED = replace(SHARED, shared_expert_overlap=True)
BALANCED = replace(MOE, aux_loss_coeff=0.1, z_loss_coeff=0.1)
BIASED = replace(BALANCED, score_function="sigmoid", expert_bias=True, num_groups=4, group_topk=2, top_k=4)
KINDS = {
    "plain": MOE,
    "shared": replace(SHARED, shared_expert_gate=False),
    "gate": SHARED,
    "overlap": replace(OVERLAPPED, shared_expert_gate=False),
    "overlap, gate": OVERLAPPED,
    "balanced": BALANCED,
    "by sequence": replace(BALANCED, load_balancing="seq_aux_loss"),
    "by global batch": replace(BALANCED, load_balancing="global_aux_loss"),
    "biased": BIASED,
    "jitter": replace(MOE, input_jitter=0.1),
    "drop and pad": replace(BALANCED, capacity_factor=1.0, pad_to_capacity=True),
    "drop": replace(BALANCED, capacity_factor=1.0),
    "loop over experts": replace(SHARED, grouped_gemm=False),
}
SCOPES = {"route": ("moe_router",), "preprocess": ("moe_router", "moe_preprocess")}


def layer(moe: MoEConfig, dtype: torch.dtype = torch.float32) -> MoELayer:
    return MoELayer("layers.0.mlp", MODEL, moe, GROUPS, seed=3, dtype=dtype)


def cut_layer(moe: MoEConfig, scope: tuple[str, ...]) -> CutMoELayer:
    graph = GraphConfig(cuda_graph_impl="emulated", cuda_graph_modules=scope)
    return CutMoELayer(layer(moe), layer_scope(graph, has_experts=True))


def hidden(sequence: int = 7, batch: int = 3, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sequence, batch, MODEL.hidden, dtype=dtype, generator=generator).requires_grad_()


def cut(made: CutMoELayer, x: Tensor) -> list[Tensor]:
    """What a capture of norm and layer returns; the residual comes last."""
    with graph_capturing():
        try:
            made.moe_layer(norm(x))
        except MoECudaGraphPartialCaptureSignal as signal:
            return [*signal.get_early_return_outputs(), x]
    raise AssertionError("the layer ran to its end")


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def in_two_pieces(made: CutMoELayer, x: Tensor) -> tuple[Tensor, ...]:
    """Output, gradient of x, and gradients of the parameters, with a break of the autograd graph between the pieces."""
    outputs = cut(made, x)
    wanted = [y.requires_grad for y in outputs]
    leaves = [y.detach().requires_grad_(wants) for y, wants in zip(outputs, wanted, strict=True)]
    y, residual = made.resume(leaves)
    (y.square() + residual).sum().backward()
    pairs = [(a, b.grad) for a, b in zip(outputs, leaves, strict=True) if b.grad is not None]
    torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
    return y, *gradients(made.moe_layer, x)


def in_one_piece(made: MoELayer, x: Tensor) -> tuple[Tensor, ...]:
    y = made(norm(x))
    (y.square() + x).sum().backward()
    return y, *gradients(made, x)


def gradients(made: MoELayer, x: Tensor) -> list[Tensor]:
    found = [x.grad, *(p.grad for p in made.parameters())]
    assert all(grad is not None for grad in found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "local"])
@pytest.mark.parametrize("end", list(SCOPES))
@pytest.mark.parametrize("kind", list(KINDS))
def test_two_pieces_are_the_whole(kind: str, end: str, dispatcher: str) -> None:
    moe = replace(KINDS[kind], dispatcher=dispatcher)
    if moe.shared_expert_overlap and dispatcher != "alltoall":
        pytest.skip("only the all-to-all has a transfer to hide shared experts behind")
    if moe.capacity_factor and (dispatcher == "allgather" or (end == "preprocess" and not moe.pad_to_capacity)):
        pytest.skip("refused by the configuration")
    for seed in (1, 2):  # the second forward finds nothing that the first has left
        whole, cut_up = layer(moe), cut_layer(moe, SCOPES[end])
        for step in range(2):
            torch.manual_seed(seed)
            a = in_one_piece(whole, hidden(seed=seed + step))
            torch.manual_seed(seed)
            b = in_two_pieces(cut_up, hidden(seed=seed + step))
            assert all(torch.equal(left, right) for left, right in zip(a, b, strict=True))
        router = cut_up.moe_layer.router
        for name, left in {"totals": whole.router.statistics.totals, **dict(whole.router.named_buffers())}.items():
            right = router.statistics.totals if name == "totals" else router.get_buffer(name)
            assert torch.equal(left, right), name


@given(sequence=st.integers(1, 6), batch=st.integers(1, 3), top_k=st.integers(1, 4), seed=st.integers(0, 99),
       end=st.sampled_from(sorted(SCOPES)), shared=st.booleans())  # fmt: skip
def test_any_size(sequence: int, batch: int, top_k: int, seed: int, end: str, shared: bool) -> None:
    moe = replace(SHARED if shared else MOE, top_k=top_k, pre_softmax=top_k == 1)
    a = in_one_piece(layer(moe), hidden(sequence, batch, seed))
    b = in_two_pieces(cut_layer(moe, SCOPES[end]), hidden(sequence, batch, seed))
    assert all(torch.equal(left, right) for left, right in zip(a, b, strict=True))


# ---- where it ends, and what comes out ----


def test_outputs_of_a_graph_that_ends_behind_the_router() -> None:
    made, x = cut_layer(SHARED, SCOPES["route"]), hidden()
    outputs = cut(made, x)
    assert [tuple(y.shape) for y in outputs] == [(7, 3, 16), (21, 8), (21, 8), (7, 3, 16), (7, 3, 16)]
    assert outputs[2].dtype == torch.bool and outputs[-1] is x


def test_outputs_of_a_graph_that_ends_behind_the_permutation() -> None:
    made, x = cut_layer(OVERLAPPED, SCOPES["preprocess"]), hidden()
    outputs = cut(made, x)
    assert made.valid_cudagraph_attrs == ["token_of_row_N", "num_global_tokens_per_expert",
                                          "shared_experts.cached_stage", "shared_experts.gate_score"]  # fmt: skip
    assert [tuple(y.shape) for y in outputs] == [(42, 16), (42,), (42,), (1, 1, 8), (7, 3, 16), (7, 3, 1), (7, 3, 16)]


def test_all_captures_of_a_layer_have_the_same_metadata_but_for_tensors() -> None:
    made = cut_layer(replace(MOE, capacity_factor=1.0, pad_to_capacity=True), SCOPES["preprocess"])
    assert made.valid_cudagraph_attrs == []
    cut(made, hidden())
    assert made.valid_cudagraph_attrs == ["token_of_row_N"]  # nothing is counted
    cut(made, hidden())
    with pytest.raises(AssertionError, match="at the first capture and is"):
        cut(made, hidden(sequence=8))


def test_a_captured_forward_leaves_no_tensor_behind() -> None:
    """What a part of the layer held on to would keep its block of the pool from later captures."""
    made, x = cut_layer(OVERLAPPED, SCOPES["preprocess"]), hidden()
    held = [weakref.ref(tensor) for tensor in cut(made, x) if tensor is not x]
    gc.collect()
    assert len(held) == 6 and not any(reference() is not None for reference in held)
    assert made.captured_shared_output is None


def test_only_training_forwards_that_are_captured_are_cut() -> None:
    made, x = cut_layer(MOE, SCOPES["route"]), hidden()
    assert isinstance(made.moe_layer(x), Tensor)
    for around in (graph_warmup, graph_capturing):
        with around(), pytest.raises(MoECudaGraphPartialCaptureSignal):
            made.moe_layer(x)
    with graph_capturing():
        assert isinstance(layer(KINDS["drop and pad"])(x), Tensor), "nothing is captured of a layer that is not cut"
    made.moe_layer.eval()
    with graph_warmup():
        assert isinstance(made.moe_layer(x), Tensor)


def test_a_layer_that_is_cut_no_more_is_as_it_was() -> None:
    plain = layer(SHARED)
    before = sorted(vars(plain))
    graph = GraphConfig(cuda_graph_impl="emulated", cuda_graph_modules=SCOPES["preprocess"])
    made = CutMoELayer(plain, layer_scope(graph, has_experts=True))
    assert sorted(plain.state_dict()) == sorted(layer(SHARED).state_dict())
    made.undo()
    assert sorted(vars(plain)) == before and plain.token_dispatcher.cuda_dtoh_point == "before_permutation_1"


@pytest.mark.parametrize(("end", "expected"), [("route", ["dispatch_preprocess"]), ("preprocess", [])])
def test_steps_in_a_graph_are_skipped_and_others_are_not(
    end: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    made = cut_layer(SHARED, SCOPES[end])
    moe_layer, outputs = made.moe_layer, cut(made, hidden())
    assert moe_layer.shared_experts is not None
    for module, name in ((moe_layer.shared_experts, "shared"), (moe_layer.router, "router")):
        module.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    step = moe_layer.token_dispatcher.dispatch_preprocess

    def counted(*args: Tensor) -> Any:
        calls.append("dispatch_preprocess")
        return step(*args)

    monkeypatch.setattr(moe_layer.token_dispatcher, "dispatch_preprocess", counted)
    made.resume(outputs)
    assert calls == expected
    calls.clear()
    moe_layer(hidden())
    assert calls == ["shared", "router", "dispatch_preprocess"], "with an empty store nothing is skipped"


@pytest.mark.parametrize("end", list(SCOPES))
@pytest.mark.parametrize("dispatcher", ["alltoall", "local"])
def test_counts_are_copied_to_the_host_behind_the_graph(dispatcher: str, end: str) -> None:
    made = cut_layer(replace(MOE, dispatcher=dispatcher), SCOPES[end]).moe_layer
    point = {"route": "before_permutation_1", "preprocess": "before_ep_alltoall"}[end]
    assert made.token_dispatcher.cuda_dtoh_point == point


def test_a_capture_with_the_copy_inside_is_refused() -> None:
    made = cut_layer(MOE, SCOPES["preprocess"]).moe_layer
    made.token_dispatcher.cuda_dtoh_point = "before_permutation_1"
    with graph_capturing(), pytest.raises(GraphCaptureError, match="host"):
        made(hidden())


# ---- what is refused ----


def test_a_record_of_choices_is_refused() -> None:
    padded = KINDS["drop and pad"]
    graph = GraphConfig(cuda_graph_impl="emulated", cuda_graph_modules=SCOPES["route"])
    model = GPTModel(MODEL, GROUPS, layers=range(1), moe=padded, seed=1)
    helper, [alone] = CudaGraphHelper([model], graph, 16, 1, schedule=one_f_one_b(1, 2)), model.moe_layers()
    alone.router.record = []
    with pytest.raises(GraphCaptureError, match=r"layers\.0\.mlp\.router: Python records and repeats"):
        helper.create_cudagraphs()
    alone.router.record, alone.router.replay = None, RoutingReplay([])
    with pytest.raises(GraphCaptureError, match="a CUDA graph does not run Python"):
        helper.create_cudagraphs()
    made = layer(padded)
    made.router.record = []
    with pytest.raises(GraphCaptureError, match=r"layers\.0\.mlp\.router: Python records and repeats"):
        make_graphed_callables(made, (hidden(),), impl="emulated")
    whole = FullIterationGraph(lambda _: made(hidden()), num_microbatches=0, warmup_steps=0, chunks=[made])
    with pytest.raises(GraphCaptureError, match=r"layers\.0\.mlp\.router: Python records and repeats"):
        whole(iter([]))


def test_store() -> None:
    store = MoECudaGraphTensorStore()
    assert store.is_empty()
    store.set(probs=torch.ones(2), routing_map=None)
    assert not store.is_empty() and store.routing_map is None
    store.clear()
    assert store.is_empty()
    with pytest.raises(TypeError, match="no field 'prob'; its fields are hidden_states, probs"):
        store.set(prob=torch.ones(2))
    with pytest.raises(TypeError, match="probs is a tensor that a graph has made, got list"):
        store.set(probs=[1.0])  # type: ignore[arg-type]


def test_a_capture_or_a_second_replay_finds_the_store_empty() -> None:
    made = cut_layer(MOE, SCOPES["route"])
    outputs = cut(made, hidden())
    fill_store(made, outputs)
    with pytest.raises(AssertionError, match="has not used up"):
        fill_store(made, outputs)
    with pytest.raises(AssertionError, match="finds results of an earlier replay"):
        cut(made, hidden())


def test_the_signal_says_what_it_is() -> None:
    made: Any = cut_layer(MOE, SCOPES["route"])
    with graph_capturing(), pytest.raises(MoECudaGraphPartialCaptureSignal, match="ends after route") as caught:
        made.moe_layer.route(hidden())
    assert caught.value.cut is made and sorted(caught.value.results) == ["hidden_states", "probs", "routing_map"]


@pytest.mark.parametrize("scope", [("attn",), ("moe_router",), ("attn", "moe_router", "moe_preprocess"), ("mlp",)])
def test_a_part_that_stays_eager_cannot_put_its_weight_gradients_off(scope: tuple[str, ...]) -> None:
    """Its W would read graph outputs that later replays overwrite: losses differed from the fourth step on."""
    graph = GraphConfig(cuda_graph_impl="emulated", cuda_graph_modules=scope)
    moe = replace(MOE, layer_freq=(1, 0))
    made = GPTModel(MODEL, GROUPS, layers=range(2), moe=moe, seed=1)
    with pytest.raises(ValueError, match=r"ZB-H1 splits backwards, and with graph.cuda_graph_modules = \["):
        CudaGraphHelper([made], graph, 16, 1, schedule=zero_bubble_h1(2, 4))
    CudaGraphHelper([made], graph, 16, 1, schedule=one_f_one_b(2, 4))


def test_a_rest_that_fails_leaves_no_results_of_the_graph_behind() -> None:
    """An error in the eager half, such as a lack of memory for an expert, may be caught and the step tried again."""
    graph = GraphConfig(cuda_graph_impl="emulated", cuda_graph_modules=("attn", "moe_router"))
    made = GPTModel(MODEL, GROUPS, layers=range(1), moe=MOE, seed=1)
    helper = CudaGraphHelper([made], graph, 16, 1, schedule=one_f_one_b(1, 2))
    [one] = helper.layers
    x = hidden(16, 1)
    expected = one.layer(x)
    helper.create_cudagraphs()
    with (
        patch.object(one.layer.mlp, "dispatch", side_effect=RuntimeError("no memory")),
        pytest.raises(RuntimeError, match="no memory"),
    ):
        one.layer(x)
    assert one.cut is not None and one.cut.cudagraph_tensor_store.is_empty()
    assert torch.equal(one.layer(x), expected)


@pytest.mark.parametrize("dispatcher", ["alltoall", "local"])
def test_a_padded_layer_is_captured_whole(dispatcher: str) -> None:
    """How many rows an expert has is a number of the host's then, which no operation computes or copies."""
    graph = GraphConfig(cuda_graph_impl="emulated", cuda_graph_modules=("attn", "moe"))
    moe = replace(KINDS["drop and pad"], dispatcher=dispatcher)
    made = GPTModel(MODEL, GROUPS, layers=range(1), moe=moe, seed=1)
    helper = CudaGraphHelper([made], graph, 16, 1, schedule=one_f_one_b(1, 2))
    [one] = helper.layers
    x = hidden(16, 1)
    expected = one.layer(x)
    helper.create_cudagraphs()
    assert torch.equal(one.layer(x), expected)
    assert helper.memory().break_points == 0  # type: ignore[union-attr]
