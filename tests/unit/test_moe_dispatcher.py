"""Dispatchers in one process: the identity, the one copy to the host, what a captured step leaves, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves

from labkit.config import ModelConfig, MoEConfig, ParallelConfig
from labkit.moe import MoETokenDispatcher, SharedExpertMLP, build_dispatcher
from labkit.moe.dispatch import dispatcher as dispatcher_module
from labkit.moe.dispatch.alltoall import Splits
from labkit.moe.dispatch.dispatcher import Metadata
from labkit.moe.dispatch.host_copy import HostCopy
from labkit.moe.routing import apply_capacity
from labkit.parallel import ParallelGroups, initialize_model_parallel, single_process_groups

KINDS = ["local", "alltoall", "allgather"]
BEFORE_ALL_TO_ALL = "before_ep_alltoall"


def groups_of(ep: int = 1, etp: int = 1, rank: int = 0) -> ParallelGroups:
    """The groups of one rank of a layout, without processes."""
    config = ParallelConfig(tp=etp, etp=etp, ep=ep, sequence_parallel=etp > 1)
    return initialize_model_parallel(config, rank=rank, world_size=ep * etp)


def routing(tokens: int, experts: int, k: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [S, B, H], weights that add up to 1, and map"""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(2 * tokens, experts, generator=generator, dtype=torch.float64)
    map_TE = torch.zeros(scores.shape, dtype=torch.bool).scatter_(1, scores.topk(k).indices, True)
    hidden = torch.randn(tokens, 2, 3, generator=generator, dtype=torch.float64)
    return hidden, scores.masked_fill(~map_TE, -torch.inf).softmax(1), map_TE


def to_experts(dispatcher: MoETokenDispatcher, *routed: Tensor) -> tuple[Tensor, Tensor, Tensor, Metadata]:
    return dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(*routed)))


def back(dispatcher: MoETokenDispatcher, rows: Tensor, metadata: Metadata) -> Tensor:
    return dispatcher.combine_postprocess(*dispatcher.token_combine(*dispatcher.combine_preprocess(rows, metadata)))


@given(st.sampled_from(KINDS), st.integers(0, 6), st.integers(1, 6), st.data())
def test_combine_after_dispatch_is_the_identity_for_weights_that_add_up_to_1(
    kind: str, tokens: int, experts: int, data: Any
) -> None:
    k = data.draw(st.integers(1, experts))
    point = data.draw(st.sampled_from(["before_permutation_1", BEFORE_ALL_TO_ALL]))
    hidden, probs, map_TE = routing(tokens, experts, k, data.draw(st.integers(0, 2**31)))
    moe = MoEConfig(num_experts=experts, top_k=k, dispatcher=kind)
    dispatcher = build_dispatcher(moe, single_process_groups(), cuda_dtoh_point=point)
    rows, counts, weights, metadata = to_experts(dispatcher, hidden, probs, map_TE)
    assert counts.tolist() == map_TE.sum(dim=0).tolist()
    assert int(counts.sum()) == 2 * tokens * k == len(rows)
    torch.testing.assert_close(back(dispatcher, rows * weights[:, None], metadata), hidden, rtol=0, atol=1e-14)


def test_split_sizes_follow_from_the_table_of_counts() -> None:
    # etp 2 x ep 2, four experts: rank (t, r) has 10 (2 t + r) + e tokens for expert e
    table = torch.tensor([[[10 * (2 * t + r) + e for e in range(4)] for r in range(2)] for t in range(2)])
    splits = Splits.of(table, ep_rank=1, etp_rank=0)
    assert splits.num_out_tokens == 10 + 11 + 12 + 13
    assert splits.input_splits == [10 + 11, 12 + 13]  # own tokens for experts 0, 1 and 2, 3
    assert splits.output_splits == [2 + 3, 12 + 13]  # from ep ranks 0 and 1 for experts 2, 3
    assert splits.output_splits_tp == [2 + 3 + 12 + 13, 22 + 23 + 32 + 33]
    assert splits.chunks == [2, 3, 12, 13, 22, 23, 32, 33]
    assert splits.tokens_per_expert.tolist() == [2 + 12 + 22 + 32, 3 + 13 + 23 + 33]


CAPTURED = [MoEConfig(num_experts=4, top_k=2, dispatcher=kind) for kind in KINDS]
CAPTURED += [replace(moe, capacity_factor=1.0, pad_to_capacity=True) for moe in CAPTURED]
CAPTURED += [replace(CAPTURED[1], shared_expert_ffn_hidden=6, shared_expert_gate=True, shared_expert_overlap=True)]


def dispatcher_of(moe: MoEConfig) -> MoETokenDispatcher:
    dispatcher = build_dispatcher(moe, single_process_groups(), cuda_dtoh_point=BEFORE_ALL_TO_ALL)
    if moe.shared_expert_overlap:
        model = ModelConfig(layers=1, hidden=3, heads=1, vocab_size=8, seq_length=5)
        shared = SharedExpertMLP("mlp.shared_experts", model, moe, single_process_groups(), dtype=torch.float64)
        dispatcher.set_shared_experts(shared)
    return dispatcher


@pytest.mark.parametrize("moe", CAPTURED)
def test_later_steps_read_only_metadata_of_tensors_and_shapes(moe: MoEConfig) -> None:
    """A graph that ends after `dispatch_preprocess` gives out the tensors; the rest stays as it was at capture."""
    captured, replayed = dispatcher_of(moe), dispatcher_of(moe)
    rest: set[Any] = set()
    for seed in (0, 1):
        hidden, probs, map_TE = routing(5, 4, 2, seed)
        if moe.pad_to_capacity:
            probs, map_TE = apply_capacity(probs, map_TE, top_k=2, capacity_factor=1.0, pad_to_capacity=True)
        graph_outputs = captured.dispatch_preprocess(hidden, probs, map_TE)
        rest.add(tuple(leaf for leaf in tree_leaves(graph_outputs) if not isinstance(leaf, Tensor)))
        results = []
        for dispatcher in (captured, replayed):
            sent = dispatcher.token_dispatch(*graph_outputs)
            rows, counts, weights, metadata = dispatcher.dispatch_postprocess(*sent)
            assert counts.tolist() == map_TE.sum(dim=0).tolist()
            results.append(back(dispatcher, rows * weights[:, None], metadata))
        assert torch.equal(*results)
    assert len(rest) == 1


@pytest.mark.parametrize("point", ["before_permutation_1", BEFORE_ALL_TO_ALL])
@pytest.mark.parametrize(("padded", "copies"), [(False, 1), (True, 0)])
def test_counts_are_copied_to_the_host_once_and_where_they_should(
    monkeypatch: pytest.MonkeyPatch, point: str, padded: bool, copies: int
) -> None:
    made: list[str] = []
    step = ""

    class Counted(HostCopy):
        def __init__(self, x: Tensor) -> None:
            super().__init__(x)
            made.append(step)

    monkeypatch.setattr(dispatcher_module, "HostCopy", Counted)
    moe = MoEConfig(num_experts=4, top_k=2, capacity_factor=1.0 if padded else None, pad_to_capacity=padded)
    dispatcher = build_dispatcher(moe, single_process_groups(), cuda_dtoh_point=point)
    hidden, probs, map_TE = routing(5, 4, 2, 0)
    if padded:
        probs, map_TE = apply_capacity(probs, map_TE, top_k=2, capacity_factor=1.0, pad_to_capacity=True)
    step = "preprocess"
    sent = dispatcher.dispatch_preprocess(hidden, probs, map_TE)
    step = "dispatch"
    rows, _, _, metadata = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(*sent))
    back(dispatcher, rows, metadata)
    assert made == ["preprocess" if point == "before_permutation_1" else "dispatch"] * copies


def test_every_kind_takes_the_experts_of_its_rank() -> None:
    dispatcher = build_dispatcher(MoEConfig(num_experts=8), groups_of(ep=4, rank=2))
    assert (dispatcher.num_local_experts, dispatcher.first_local_expert) == (2, 4)
    assert dispatcher.cuda_dtoh_point == "before_permutation_1"


# ---- refusals ----


def test_layouts_and_points_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_experts = 6 cannot be shared by the 4 ranks of ep: .* multiple of 4"):
        build_dispatcher(MoEConfig(num_experts=6), groups_of(ep=4))
    with pytest.raises(ValueError, match=r"all experts on one rank, but ep = 1, etp = 2; set moe\.dispatcher"):
        build_dispatcher(MoEConfig(num_experts=4, dispatcher="local"), groups_of(etp=2))
    with pytest.raises(ValueError, match="'flex'; choose one of alltoall, allgather, local"):
        build_dispatcher(MoEConfig(num_experts=4, dispatcher="flex"), groups_of())
    with pytest.raises(ValueError, match="'later'; choose one of before_permutation_1, before_ep_alltoall"):
        build_dispatcher(MoEConfig(num_experts=4), groups_of(), cuda_dtoh_point="later")
    dropping = MoEConfig(num_experts=4, capacity_factor=1.0)
    with pytest.raises(
        ValueError, match=r"only counting tells the number of dropped tokens\. Set moe\.pad_to_capacity"
    ):
        build_dispatcher(dropping, groups_of(), cuda_dtoh_point=BEFORE_ALL_TO_ALL)


def test_shared_experts_need_a_transfer_to_hide_behind() -> None:
    for kind in ("local", "allgather"):
        dispatcher = build_dispatcher(MoEConfig(num_experts=4, dispatcher=kind), groups_of())
        with pytest.raises(
            ValueError, match=r"no transfer that the shared experts could overlap with; set moe\.dispatcher"
        ):
            dispatcher.set_shared_experts(object())


@pytest.mark.parametrize("kind", KINDS)
def test_maps_of_another_shape_or_type_are_refused(kind: str) -> None:
    dispatcher = build_dispatcher(MoEConfig(num_experts=4, dispatcher=kind), groups_of())
    hidden, probs, map_TE = routing(5, 4, 2, 0)
    with pytest.raises(ValueError, match=r"probs has shape \(10, 3\); tokens x experts is \(10, 4\)"):
        dispatcher.dispatch_preprocess(hidden, probs[:, :3], map_TE)
    with pytest.raises(ValueError, match=r"map has shape \(9, 4\)"):
        dispatcher.dispatch_preprocess(hidden, probs, map_TE[1:])
    with pytest.raises(ValueError, match=r"routing map is bool, got torch\.int64"):
        dispatcher.dispatch_preprocess(hidden, probs, map_TE.long())
