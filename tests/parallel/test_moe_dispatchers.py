"""Dispatchers on real ranks: one result, whatever way tokens take to their experts; and what they send, byte for byte.

The reference is the layer without dispatch: every expert computed for every token, weighted by the routing. A token's
result depends on no other token, so it needs no communication; it has nothing in common with the dispatchers.

Shapes: T tokens of a rank, E experts, F width of an expert, H hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from inputs import random as draw
from torch import Tensor

from labkit.config import ModelConfig, MoEConfig, ParallelConfig
from labkit.moe import MoETokenDispatcher, SharedExpertMLP, all_to_all_bytes, build_dispatcher, extra_bytes
from labkit.moe.routing import apply_capacity
from labkit.parallel import CommLedger, ParallelGroups, all_reduce, initialize_model_parallel

EXPERTS, WIDTH, HIDDEN, SEQUENCE, BATCH = 8, 4, 3, 5, 2
LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)]


class Case(NamedTuple):
    """A routing and the configuration that goes with it."""

    name: str
    top_k: int = 3
    capacity_factor: float | None = None
    pad: bool = False
    only: int | None = None
    """All tokens go to this expert (and, with top_k above 1, to the next)."""


CASES = [
    Case("random"),
    Case("drops", capacity_factor=0.6),
    Case("drops and padding", capacity_factor=1.0, pad=True),
    Case("more places than tokens", capacity_factor=9.0, pad=True),
    Case("one expert takes all", top_k=1, only=EXPERTS - 1),
    Case("every expert takes all", top_k=EXPERTS),
]


class Routed(NamedTuple):
    """One rank's input: hidden [S, B, H], weights [T, E], map [T, E], and the gradient of the output."""

    hidden: Tensor
    probs: Tensor
    map: Tensor
    grad: Tensor


def input_of(rank: int, case: Case, sequence: int = SEQUENCE) -> Routed:
    hidden = draw(sequence, BATCH, HIDDEN, seed=rank).requires_grad_()
    scores = draw(sequence * BATCH, EXPERTS, seed=100 + rank)
    if case.only is not None:
        scores[:, case.only] += 100
    map_TE = torch.zeros(scores.shape, dtype=torch.bool).scatter_(1, scores.topk(case.top_k).indices, True)
    probs = scores.masked_fill(~map_TE, -torch.inf).softmax(dim=1)
    if case.capacity_factor is not None:
        probs, map_TE = apply_capacity(
            probs, map_TE, top_k=case.top_k, capacity_factor=case.capacity_factor, pad_to_capacity=case.pad
        )
    return Routed(hidden, probs.detach().requires_grad_(), map_TE, draw(sequence, BATCH, HIDDEN, seed=200 + rank))


def experts_of(number: int) -> tuple[Tensor, Tensor]:
    """[E, F, H] and [E, H, F]"""
    return draw(number, WIDTH, HIDDEN, seed=300).requires_grad_(), draw(
        number, HIDDEN, WIDTH, seed=301
    ).requires_grad_()


def reference(inputs: list[Routed]) -> list[Tensor]:
    """Outputs of every rank, from all experts on all tokens."""
    fc1, fc2 = experts_of(EXPERTS)
    outputs = []
    for hidden, probs, map_TE, _ in inputs:
        inner_TEF = torch.tanh(torch.einsum("th,efh->tef", hidden.flatten(0, 1), fc1))
        weighted = inner_TEF * (probs * map_TE)[:, :, None]
        outputs.append(torch.einsum("tef,ehf->th", weighted, fc2).view(hidden.shape))
    sum((output * x.grad).sum() for output, x in zip(outputs, inputs)).backward()  # type: ignore[union-attr]
    return [*(output.detach() for output in outputs), fc1.grad, fc2.grad]  # type: ignore[list-item]


def dispatched(dispatcher: MoETokenDispatcher, x: Routed, fc1: Tensor, fc2: Tensor) -> tuple[Tensor, Tensor]:
    """The layer on this rank's slices of its experts; also the rows of each expert."""
    sent = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x.hidden, x.probs, x.map))
    rows, counts, probs, metadata = dispatcher.dispatch_postprocess(*sent)
    assert counts.dtype == torch.int64
    assert counts.device.type == "cpu"
    parts = [
        (torch.tanh(part @ fc1[e].t()) * weight[:, None]) @ fc2[e].t()
        for e, (part, weight) in enumerate(zip(rows.split(counts.tolist()), probs.split(counts.tolist())))
    ]
    combined = dispatcher.token_combine(*dispatcher.combine_preprocess(torch.cat(parts), metadata))
    return dispatcher.combine_postprocess(*combined), counts


def layout(ep: int, etp: int, order: str = "tp-cp-ep-dp-pp") -> ParallelGroups:
    return initialize_model_parallel(ParallelConfig(tp=etp, ep=ep, etp=etp, sequence_parallel=etp > 1, order=order))


def config_of(case: Case, dispatcher: str) -> MoEConfig:
    return MoEConfig(
        num_experts=EXPERTS,
        top_k=case.top_k,
        capacity_factor=case.capacity_factor,
        pad_to_capacity=case.pad,
        dispatcher=dispatcher,
    )


def own_slices(groups: ParallelGroups, fc1: Tensor, fc2: Tensor) -> tuple[Tensor, Tensor]:
    """Of the stacked weights: this rank's experts (ep), and of those its part of the width (etp)."""
    local, width = EXPERTS // groups.ep.size, WIDTH // groups.etp.size
    experts = slice(groups.ep.rank * local, (groups.ep.rank + 1) * local)
    part = slice(groups.etp.rank * width, (groups.etp.rank + 1) * width)
    return fc1[experts, part], fc2[experts, :, part]


def run_once(groups: ParallelGroups, case: Case, kind: str, point: str) -> tuple[list[Tensor], Tensor]:
    """Output, gradients (tokens, weights of the routing, experts) and rows of each expert."""
    dispatcher = build_dispatcher(config_of(case, kind), groups, cuda_dtoh_point=point)
    x = input_of(groups.rank, case)
    fc1, fc2 = (w.detach().clone().requires_grad_() for w in own_slices(groups, *experts_of(EXPERTS)))
    output, counts = dispatched(dispatcher, x, fc1, fc2)
    output.backward(x.grad)
    assert x.hidden.grad is not None
    return [output.detach(), x.hidden.grad, x.probs.grad, fc1.grad, fc2.grad], counts  # type: ignore[list-item]


def check_counts(groups: ParallelGroups, case: Case, counts: Tensor, given: Tensor) -> None:
    """Every entry of a map is a row of one expert; no expert of a rank takes more than its capacity."""
    assert groups.edp.size == 1
    total = torch.tensor([int(counts.sum()) / groups.etp.size, int(given.sum())], dtype=torch.float64)
    rows, entries = all_reduce(total, groups.world).tolist()
    assert rows == entries
    tokens = len(given)
    if case.capacity_factor is None:
        assert int(given.sum()) == tokens * case.top_k
        return
    capacity = min(tokens, -(-tokens * case.top_k * case.capacity_factor // EXPERTS))
    assert int(counts.max()) <= capacity * groups.world.size
    if case.pad:
        assert counts.tolist() == [capacity * groups.world.size] * len(counts)


def every_case(ep: int, etp: int, order: str) -> None:
    groups = layout(ep, etp, order)
    for case in CASES:
        inputs = [input_of(rank, case) for rank in range(groups.world.size)]
        *outputs, grad1, grad2 = reference(inputs)
        own = inputs[groups.rank]
        slices = own_slices(groups, grad1, grad2)
        wanted = [outputs[groups.rank], own.hidden.grad, own.probs.grad, *slices]
        kinds = ["alltoall", "allgather"] + (["local"] if ep == etp == 1 else [])
        points = ["before_permutation_1"] + (["before_ep_alltoall"] if case.capacity_factor is None or case.pad else [])
        for kind in kinds:
            for point in points:
                got, counts = run_once(groups, case, kind, point)
                for what, a, b in zip(("output", "hidden", "probs", "fc1", "fc2"), got, wanted):
                    assert b is not None
                    assert float((a - b).norm()) <= 1e-12 * max(1.0, float(b.norm())), (case.name, kind, point, what)
                check_counts(groups, case, counts, own.map)


@pytest.mark.parametrize(("ep", "etp"), LAYOUTS)
def test_every_dispatcher_computes_the_layer_without_dispatch(on_ranks, ep: int, etp: int) -> None:
    on_ranks(every_case, ep * etp, ep, etp, "tp-cp-ep-dp-pp")


def test_the_order_of_axes_does_not_matter(on_ranks) -> None:
    on_ranks(every_case, 4, 2, 2, "ep-tp-cp-dp-pp")


# ---- the ends of the range ----


def a_rank_without_tokens() -> int:
    """Rank 0 has none of its own, and no token goes to the experts of rank 1."""
    groups = layout(2, 1)
    case = Case("to rank 0", top_k=2, only=0)
    x = input_of(groups.rank, case, sequence=0 if groups.rank == 0 else SEQUENCE)
    x.map.zero_()[:, :2] = True
    dispatcher = build_dispatcher(config_of(case, "alltoall"), groups)
    fc1, fc2 = (w.detach().clone().requires_grad_() for w in own_slices(groups, *experts_of(EXPERTS)))
    with CommLedger() as ledger:
        output, counts = dispatched(dispatcher, x, fc1, fc2)
        output.backward(x.grad)
    assert x.hidden.grad is not None
    assert x.hidden.grad.shape == x.hidden.shape
    assert ledger.count(operation="all_to_all", phase="forward") == 3
    assert ledger.count(operation="all_to_all", phase="backward") == 3
    return int(counts.sum())


def test_ranks_without_tokens_take_part_in_every_transfer(on_ranks) -> None:
    assert on_ranks(a_rank_without_tokens, 2) == [2 * SEQUENCE * BATCH, 0]


def one_expert_cut_in_two() -> None:
    groups = layout(1, 2)
    x = input_of(groups.rank, Case("", top_k=1))
    results = []
    for kind in ("alltoall", "allgather"):
        dispatcher = build_dispatcher(MoEConfig(num_experts=1, top_k=1, dispatcher=kind), groups)
        everyone = Routed(x.hidden, torch.ones(len(x.map), 1, dtype=torch.float64), x.map.any(1, keepdim=True), x.grad)
        width = slice(groups.etp.rank * 2, groups.etp.rank * 2 + 2)
        fc1, fc2 = experts_of(1)
        results.append(dispatched(dispatcher, everyone, fc1[:, width], fc2[:, :, width])[0])
    fc1, fc2 = experts_of(1)
    dense = torch.tanh(x.hidden @ fc1[0].t()) @ fc2[0].t()
    for result in results:
        torch.testing.assert_close(result, dense, rtol=0, atol=1e-13)


def test_one_expert_is_a_dense_layer(on_ranks) -> None:
    on_ranks(one_expert_cut_in_two, 2)


def twice(ep: int, etp: int) -> None:
    groups = layout(ep, etp)
    for kind in ("alltoall", "allgather"):
        first, _ = run_once(groups, CASES[1], kind, "before_permutation_1")
        again, _ = run_once(groups, CASES[1], kind, "before_permutation_1")
        assert all(torch.equal(a, b) for a, b in zip(first, again))


def test_the_same_layout_gives_the_same_bits_twice(on_ranks) -> None:
    on_ranks(twice, 4, 2, 2)


# ---- what is sent ----


def booked(ep: int, etp: int, hidden: int) -> dict[str, Any]:
    """What the all-to-all dispatcher sends in one forward and backward, and what the routing needs."""
    groups = layout(ep, etp)
    maps = []
    for rank in range(groups.world.size):
        scores = draw(64, EXPERTS, seed=rank)
        maps.append(torch.zeros(scores.shape, dtype=torch.bool).scatter_(1, scores.topk(2).indices, True))
    dispatcher = build_dispatcher(MoEConfig(num_experts=EXPERTS, top_k=2), groups, name="layers.0.mlp")
    x = draw(32, 2, hidden, seed=groups.rank).float().requires_grad_()
    probs = torch.ones(64, EXPERTS, requires_grad=True)
    with CommLedger() as ledger:
        sent = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, probs, maps[groups.rank]))
        rows, _, weights, metadata = dispatcher.dispatch_postprocess(*sent)
        output = dispatcher.token_combine(*dispatcher.combine_preprocess(rows * weights[:, None], metadata))
        dispatcher.combine_postprocess(*output).sum().backward()
    counts = [maps[rank].sum(dim=0).tolist() for rank in groups.ep.ranks]
    needed = all_to_all_bytes(counts, ep, hidden, 4)
    sent = {
        phase: [(r.bytes - r.kept, r.bytes) for r in ledger.select(operation="all_to_all", phase=phase, group="ep")]
        for phase in ("forward", "backward")
    }
    own = groups.ep.rank
    return {
        "sent": sent,
        "counts": [(r.bytes, r.group_size) for r in ledger.select(operation="all_gather", group="tp_ep")],
        "dispatch": int(needed.dispatch[own]),
        "combine": int(needed.combine[own]),
        "extra": int(extra_bytes(counts, ep, etp=etp)[own]),
        "layers": {r.layer for r in ledger.records},
        "phases": {r.phase for r in ledger.records},
    }


@pytest.mark.parametrize(("ep", "etp"), [(4, 1), (2, 2)])
def test_bytes_are_those_that_the_routing_needs(on_ranks, ep: int, etp: int) -> None:
    for rank in on_ranks(booked, ep * etp, ep, etp, 512):
        (rows, _), (weights, _), (results, _) = rank["sent"]["forward"]
        assert rows == rank["dispatch"]
        assert results == rank["combine"]
        ((table, ranks),) = rank["counts"]
        beyond = weights + table * (ranks - 1)
        assert beyond == rank["extra"]
        assert beyond <= 0.01 * (rows + results)
        assert rank["layers"] == {"layers.0.mlp"}
        assert rank["phases"] == {"forward", "backward"}


def test_backward_of_an_all_to_all_is_the_all_to_all_with_splits_swapped(on_ranks) -> None:
    for rank in on_ranks(booked, 4, 4, 1, 512):
        rows, weights, results = rank["sent"]["forward"]
        gradient, *inner = rank["sent"]["backward"]
        assert weights == (rows[0] // 512, rows[1] // 512)
        # (bytes that leave, bytes in all): the gradient of what came back goes where the rows went ...
        assert gradient == rows
        # ... and those of rows and weights come from where the results came
        assert sorted(inner) == [(results[0] // 512, results[1] // 512), results]


# ---- with shared experts ----


def beside_shared_experts() -> None:
    groups = layout(2, 1)
    moe = MoEConfig(num_experts=EXPERTS, top_k=3, shared_expert_ffn_hidden=6, shared_expert_overlap=True)
    model = ModelConfig(layers=1, hidden=HIDDEN, heads=1, vocab_size=8, seq_length=SEQUENCE)
    shared = SharedExpertMLP("mlp.shared_experts", model, moe, groups, dtype=torch.float64)
    fc1, fc2 = own_slices(groups, *experts_of(EXPERTS))
    x, y = (input_of(groups.rank, CASES[0]) for _ in range(2))

    overlapped = build_dispatcher(moe, groups)
    overlapped.set_shared_experts(shared)
    output, _ = dispatched(overlapped, x, fc1, fc2)
    (into_x,) = torch.autograd.grad(output, x.hidden, x.grad, retain_graph=True)
    into_shared = torch.autograd.grad(output, list(shared.parameters()), x.grad)

    plain, _ = dispatched(build_dispatcher(moe, groups), y, fc1, fc2)
    apart = plain + shared(y.hidden)
    (into_y,) = torch.autograd.grad(apart, y.hidden, y.grad, retain_graph=True)
    torch.testing.assert_close(output, apart, rtol=0, atol=1e-14)
    torch.testing.assert_close(into_x, into_y, rtol=0, atol=1e-14)
    for a, b in zip(into_shared, torch.autograd.grad(apart, list(shared.parameters()), y.grad)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


def test_shared_experts_behind_the_transfers_change_nothing(on_ranks) -> None:
    on_ranks(beside_shared_experts, 2)
