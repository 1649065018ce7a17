"""The MoE layer over ep, etp, tp and cp against one process; recomputation and split backward; what it sends.

Shapes: S positions and B samples of all ranks, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import random
from torch import Tensor

from labkit import plan
from labkit.config import ModelConfig, MoEConfig, ParallelConfig
from labkit.launch import RankError
from labkit.models import GPTModel, SavedTensors, Share, gather_full_state, load_full_state
from labkit.moe import MoELayer
from labkit.parallel import (
    CommLedger,
    ParallelGroups,
    WeightGradStore,
    all_gather,
    all_reduce,
    initialize_model_parallel,
    single_process_groups,
)
from labkit.parallel.parameters.parameter_record import record_of
from labkit.parallel.parameters.weights import gather_expert_parameter, gather_parameter
from labkit.plan.activations import moe_saved

S, B = 8, 4
MODEL = ModelConfig(
    layers=2, hidden=16, heads=4, vocab_size=61, make_vocab_size_divisible_by=16, seq_length=16, activation="swiglu",
    ffn_hidden=24, bias=False, init_std=0.2, position="rope", untie_embeddings_and_output_weights=True,
)  # fmt: skip
MOE = MoEConfig(num_experts=8, ffn_hidden=12, top_k=2)
SHARED = replace(MOE, shared_expert_ffn_hidden=20, shared_expert_gate=True)
OVERLAPPED = replace(SHARED, shared_expert_overlap=True)
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep4": {"ep": 4},
    "tp2 etp1 ep4": {"tp": 2, "etp": 1, "ep": 4},
    "tp2 etp2 ep2": {"tp": 2, "etp": 2, "ep": 2},
    "tp2 etp2 edp2": {"tp": 2, "etp": 2},
    "tp2 cp2 etp1 ep2": {"tp": 2, "cp": 2, "etp": 1, "ep": 2},
    "cp4 etp2 ep2": {"cp": 4, "etp": 2, "ep": 2},
    "ep before tp": {"tp": 2, "etp": 2, "ep": 2, "order": "ep-tp-cp-dp-pp"},
}


def layout_of(words: str) -> ParallelConfig:
    given = LAYOUTS[words]
    return ParallelConfig(sequence_parallel=given.get("tp", 1) > 1, **given)


# ---- the layer alone ----


def own_part(whole_SBH: Tensor, groups: ParallelGroups) -> Tensor:
    """This rank's samples, and of them its positions: parts of a context-parallel part."""
    for group, dim in ((groups.dp, 1), (groups.cp, 0), (groups.tp, 0)):
        whole_SBH = whole_SBH.chunk(group.size, dim)[group.rank]
    return whole_SBH.contiguous()


def joined(part_SBH: Tensor, groups: ParallelGroups) -> Tensor:
    """The inverse of `own_part`."""
    for group, dim in ((groups.tp, 0), (groups.cp, 0), (groups.dp, 1)):
        part_SBH = all_gather(part_SBH.contiguous(), group, dim=dim)
    return part_SBH


def whole_gradients(layer: torch.nn.Module, groups: ParallelGroups) -> dict[str, Tensor]:
    """Sums over all that saw other tokens, then put together; as data parallelism and finalisation do."""
    found = {}
    for name, parameter in layer.named_parameters():
        grad: Any = parameter.grad
        assert grad is not None, name
        if record_of(parameter).expert_parallel:
            grad = all_reduce(grad.clone(), groups.edp)
            found[name] = gather_expert_parameter(grad, parameter, etp=groups.etp, ep=groups.ep)
            continue
        grad = all_reduce(grad.clone(), groups.dp_cp)
        if record_of(parameter).sequence_parallel:
            grad = all_reduce(grad, groups.tp)
        found[name] = gather_parameter(grad, parameter, groups.tp)
    return found


def layer_results(layout: ParallelConfig | None, moe: MoEConfig, seed: int = 1) -> dict[str, Tensor]:
    """Output, gradient of the input and of all weights, whole."""
    groups = single_process_groups() if layout is None else initialize_model_parallel(layout)
    sequence_parallel = groups.config.sequence_parallel
    layer = MoELayer(
        "layers.0.mlp", MODEL, moe, groups, sequence_parallel=sequence_parallel, seed=7, dtype=torch.float64
    )
    x_SBH = own_part(random(S, B, MODEL.hidden, seed=seed), groups).requires_grad_()
    output = layer(x_SBH)
    output.backward(own_part(random(S, B, MODEL.hidden, seed=seed + 1), groups))
    assert x_SBH.grad is not None
    found = {"output": joined(output.detach(), groups), "input": joined(x_SBH.grad, groups)}
    return found | whole_gradients(layer, groups)


def in_turn(cases: Sequence[tuple[Any, ...]], function: Callable[..., Any]) -> list[Any]:
    return [function(*case) for case in cases]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], what: object = "") -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-11, atol=1e-13, msg=lambda m, n=name: f"{what} {n}: {m}"
        )


KINDS: dict[str, MoEConfig] = {
    "shared": SHARED,
    "shared, overlapped": OVERLAPPED,
    "overlapped without gate": replace(OVERLAPPED, shared_expert_gate=False),
    "gathered by all": replace(SHARED, dispatcher="allgather"),
    "one by one": replace(SHARED, grouped_gemm=False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_one_process(layout: str, on_ranks: Any) -> None:
    """Router and gate, cut over positions; shared experts, cut over tp, in line and overlapped; experts."""
    cases = [(layout_of(layout), moe) for moe in KINDS.values()]
    expected = {name: layer_results(None, moe) for name, moe in KINDS.items()}
    assert all(tensor.abs().max() > 1e-3 for tensor in expected["shared"].values())
    for on_rank in on_ranks(in_turn, 4, cases, layer_results):
        for name, found in zip(KINDS, on_rank, strict=True):
            assert_same(found, expected[name], name)


@settings(max_examples=8)
@given(
    layout=st.sampled_from(list(LAYOUTS)),
    k=st.sampled_from([1, 3, 8]),
    seed=st.integers(0, 999),
    skewed=st.booleans(),
)
def test_any_routing_equals_one_process(layout: str, k: int, seed: int, skewed: bool, on_ranks: Any) -> None:
    """With `skewed` most tokens want the same experts, so that ranks are left without a row."""
    moe = replace(OVERLAPPED, top_k=k, pre_softmax=True)
    model = replace(MODEL, init_std=2.0) if skewed else MODEL
    expected = results_of_model(None, moe, model, seed)
    for found in on_ranks(results_of_model, 4, layout_of(layout), moe, model, seed):
        assert_same(found, expected)


def results_of_model(layout: ParallelConfig | None, moe: MoEConfig, model: ModelConfig, seed: int) -> dict[str, Tensor]:
    """`layer_results` of another shape; where the spread is large, inputs share a direction."""
    groups = single_process_groups() if layout is None else initialize_model_parallel(layout)
    sequence_parallel = groups.config.sequence_parallel
    layer = MoELayer(
        "layers.0.mlp", model, moe, groups, sequence_parallel=sequence_parallel, seed=seed, dtype=torch.float64
    )
    x_SBH = random(S, B, model.hidden, seed=seed)
    if model.init_std > 1:
        x_SBH = 0.05 * x_SBH + 0.1
    x_SBH = own_part(x_SBH, groups).requires_grad_()
    output = layer(x_SBH)
    output.backward(torch.ones_like(output))
    return {"output": joined(output.detach(), groups)} | whole_gradients(layer, groups)


def twice(layout: ParallelConfig, moe: MoEConfig) -> bool:
    one, two = layer_results(layout, moe), layer_results(layout, moe)
    return all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("moe", [SHARED, OVERLAPPED], ids=["in line", "overlapped"])
def test_the_same_twice_to_the_bit(moe: MoEConfig, on_ranks: Any) -> None:
    assert all(on_ranks(twice, 4, layout_of("tp2 etp2 ep2"), moe))


def test_tensor_parallelism_without_sequence_parallelism_is_refused(on_ranks: Any) -> None:
    with pytest.raises(RankError, match="MoE layers need sequence parallelism"):
        on_ranks(layer_results, 4, ParallelConfig(tp=2, etp=1, ep=4), MOE)


# ---- in a model ----


def gpt(layout: ParallelConfig, moe: MoEConfig, config: ModelConfig = MODEL) -> tuple[GPTModel, ParallelGroups]:
    groups = initialize_model_parallel(layout)
    model = GPTModel(config, groups, moe=moe, layers=range(config.layers), seed=7, dtype=torch.float64)
    return model, groups


def loss_of(model: GPTModel, groups: ParallelGroups, samples: int = 2, seed: int = 3) -> Tensor:
    length = MODEL.seq_length // groups.cp.size
    generator = torch.Generator().manual_seed(seed + groups.dp.rank + 10 * groups.cp.rank)
    ids = torch.randint(0, MODEL.vocab_size, (samples, length + 1), generator=generator)
    return model(ids[:, :-1].contiguous(), labels_BS=ids[:, 1:].contiguous()).mean()


def outcome(
    layout: ParallelConfig, moe: MoEConfig, config: ModelConfig, split: bool
) -> tuple[list[Tensor], CommLedger]:
    """Losses and gradients of two microbatches on this rank, and what was sent."""
    torch.manual_seed(5)
    model, groups = gpt(layout, moe, config)
    store = WeightGradStore()
    with CommLedger() as ledger:
        losses = [loss_of(model, groups, seed=seed) for seed in (3, 40)]
        for number, loss in enumerate(losses):
            if split:
                with store.collecting(number):
                    loss.backward()
            else:
                loss.backward()
        for number in store.pending:
            store.run(number)
    gradients = [p.grad for p in model.parameters()]
    assert all(g is not None for g in gradients)
    return [*(loss.detach() for loss in losses), *gradients], ledger  # type: ignore[list-item]


CHOICES: dict[str, dict[str, Any]] = {
    "kept": {},
    "full": {"recompute_granularity": "full"},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ("moe",)},
    "shared_experts": {"recompute_granularity": "selective", "recompute_modules": ("shared_experts",)},
    "layernorm": {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
}


def recomputed(layout: ParallelConfig, moe: MoEConfig) -> dict[str, tuple[bool, dict[str, int], bool]]:
    """By choice: whether all is as without, to the bit; bytes of all-to-alls by phase; and the same for I and W."""
    found = {}
    expected, _ = outcome(layout, moe, MODEL, False)
    for name, choice in CHOICES.items():
        config = replace(MODEL, **choice)
        whole, ledger = outcome(layout, moe, config, False)
        split, _ = outcome(layout, moe, config, True)
        sent = {
            phase: sum(record.bytes for record in ledger.select(operation="all_to_all", phase=phase))
            for phase in ("forward", "backward", "recompute")
        }
        same = [all(torch.equal(a, b) for a, b in zip(made, expected, strict=True)) for made in (whole, split)]
        found[name] = (same[0], sent, same[1])
    return found


@pytest.mark.parametrize(
    "layout",
    ["tp2 etp2 ep2", *(pytest.param(name, marks=pytest.mark.sweep) for name in ("tp2 etp1 ep4", "cp4 etp2 ep2"))],
)
def test_recomputation_and_split_backwards_change_no_bit(layout: str, on_ranks: Any) -> None:
    """The all-to-alls of a recomputed MoE layer are made again, once; those of the others are not."""
    moe = replace(SHARED, layer_freq=(0, 1), aux_loss_coeff=0.1, z_loss_coeff=0.1)
    for on_rank in on_ranks(recomputed, 4, layout_of(layout), moe):
        for name, (same, sent, same_split) in on_rank.items():
            assert same and same_split, name
            assert min(sent["forward"], sent["backward"]) > 0
            assert sent["recompute"] == (sent["forward"] if name in ("full", "moe") else 0), name


def overlapped_split(layout: ParallelConfig) -> bool:
    """Overlapped shared experts under a split and a recomputed backward."""
    found = [
        outcome(layout, OVERLAPPED, replace(MODEL, **CHOICES[choice]), split)[0]
        for choice in ("kept", "moe", "full")
        for split in (False, True)
    ]
    return all(torch.equal(a, b) for made in found[1:] for a, b in zip(made, found[0], strict=True))


def test_overlapped_shared_experts_may_be_recomputed_with_their_layer(on_ranks: Any) -> None:
    assert all(on_ranks(overlapped_split, 4, layout_of("tp2 etp2 ep2")))


def all_to_all_bytes(layout: ParallelConfig) -> tuple[int, int]:
    """(Sent by this rank in one forward and backward of a layer, closed form)."""
    model, groups = gpt(layout, replace(MOE, layer_freq=(0, 1)))
    with CommLedger() as ledger:
        loss_of(model, groups, samples=3).backward()
    tokens = 3 * MODEL.seq_length // groups.cp.size // groups.tp.size
    formula = plan.layer_all_to_all_bytes(MODEL, MOE, tokens=tokens, ep=groups.ep.size, element_bytes=8, weight_bytes=8)
    assert not ledger.select(operation="all_to_all", layer="layers.0")
    return sum(record.bytes for record in ledger.select(operation="all_to_all", layer="layers.1.mlp")), formula


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_to_alls_send_the_bytes_of_the_closed_form(layout: str, on_ranks: Any) -> None:
    """In the mean over ranks: who receives more sends more back."""
    found = on_ranks(all_to_all_bytes, 4, layout_of(layout))
    assert sum(sent for sent, _ in found) == sum(formula for _, formula in found)
    assert (found[0][1] > 0) == ("ep" in LAYOUTS[layout])


def moved(layout: ParallelConfig, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors into this rank's parts, and from there back."""
    model, groups = gpt(layout, SHARED)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    load_full_state([model], whole, groups)
    return gather_full_state([model], groups)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_tensors_go_into_any_layout_and_come_back(layout: str, on_ranks: Any) -> None:
    one = GPTModel(MODEL, single_process_groups(), moe=SHARED, layers=range(2), seed=8, dtype=torch.float64)
    whole = gather_full_state([one], single_process_groups())
    for found in on_ranks(moved, 4, layout_of(layout), whole):
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], whole[name]) for name in whole)


def kept_on_a_rank(layout: ParallelConfig, moe: MoEConfig) -> tuple[int, int]:
    """Bytes that the layer keeps on this rank: measured, and by the closed form for the rows that its experts got."""
    groups, rows = initialize_model_parallel(layout), []
    sequence_parallel = groups.config.sequence_parallel
    layer = MoELayer("m", MODEL, moe, groups, sequence_parallel=sequence_parallel, seed=7, dtype=torch.float64)
    layer.experts.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[0]))
    x_SBH = own_part(random(MODEL.seq_length, B, MODEL.hidden, seed=1), groups).requires_grad_() * 1
    with SavedTensors(layer) as saved:
        _alive = layer(x_SBH)
        kept = saved.bytes
    share = Share(
        samples=B // groups.dp.size,
        tp=groups.tp.size,
        cp=groups.cp.size,
        etp=groups.etp.size,
        sequence_parallel=sequence_parallel,
        element_bytes=8,
        expert_rows=rows[0],
    )
    return kept, sum(moe_saved(MODEL, moe, share).values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_keeps_the_bytes_of_the_closed_form(layout: str, on_ranks: Any) -> None:
    for name in ("shared", "shared, overlapped", "gathered by all"):
        for measured, expected in on_ranks(kept_on_a_rank, 4, layout_of(layout), KINDS[name]):
            assert measured == expected, name
