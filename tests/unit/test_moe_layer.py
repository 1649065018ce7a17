"""The MoE layer and models that have it, in one process: its definition, its steps, recomputation, split backward."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import te_stub
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from labkit.config import ConfigError, ModelConfig, MoEConfig, ParallelConfig, presets
from labkit.models import GPTModel, SavedTensors, build_model_chunks
from labkit.models.norm_and_dropout import Norm
from labkit.moe import MoELayer
from labkit.parallel import ParallelMLP, WeightGradStore, initialize_model_parallel, single_process_groups
from labkit.te import EngineSpec
from labkit.te.linear import FusedNorm

GROUPS = single_process_groups()
MODEL = ModelConfig(
    layers=2, hidden=16, heads=4, vocab_size=64, make_vocab_size_divisible_by=16, seq_length=16, activation="swiglu",
    ffn_hidden=24, bias=False, init_std=0.2,
)  # fmt: skip
MOE = MoEConfig(num_experts=8, ffn_hidden=12, top_k=2)
SHARED = replace(MOE, shared_expert_ffn_hidden=20, shared_expert_gate=True)
EVERYTHING = replace(
    SHARED, layer_freq=(1, 0), score_function="sigmoid", expert_bias=True, topk_scaling_factor=2.0, num_groups=4,
    group_topk=2, top_k=4, input_jitter=0.1, aux_loss_coeff=0.1, z_loss_coeff=0.1, capacity_factor=1.0,
)  # fmt: skip


def layer(moe: MoEConfig, **more: Any) -> MoELayer:
    return MoELayer("layers.0.mlp", MODEL, moe, GROUPS, seed=3, dtype=torch.float64, **more)


def hidden(sequence: int = 7, batch: int = 3, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sequence, batch, MODEL.hidden, dtype=torch.float64, generator=generator).requires_grad_()


# ---- what it computes ----


def by_definition(made: MoELayer, x_SBH: Tensor, top_k: int) -> Tensor:
    """Token by token: the weighted sum of its experts, and the gated shared expert."""

    def mlp(x: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
        gate, up = (fc1 @ x).chunk(2)
        return fc2 @ (F.silu(gate) * up)

    rows = []
    for x in x_SBH.flatten(0, 1):
        logits, chosen = (made.router.weight @ x).topk(top_k)
        experts: Any = made.experts
        y = sum(
            p * mlp(x, experts.fc1.weight[e], experts.fc2.weight[e])
            for p, e in zip(logits.softmax(0), chosen.tolist(), strict=True)
        )
        if made.shared_experts is not None:
            shared: Any = made.shared_experts
            weight = 1.0 if shared.gate is None else torch.sigmoid(shared.gate.weight[0] @ x)
            y = y + weight * mlp(x, shared.fc1.weight, shared.fc2.weight)
        rows.append(y)
    return torch.stack(rows).view_as(x_SBH)  # type: ignore[arg-type]


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "local"])
@pytest.mark.parametrize(
    "moe", [MOE, SHARED, replace(SHARED, shared_expert_gate=False)], ids=["plain", "gate", "shared"]
)
def test_it_is_the_weighted_sum_of_the_chosen_experts(moe: MoEConfig, dispatcher: str) -> None:
    made, x = layer(replace(moe, dispatcher=dispatcher)), hidden()
    output, expected = made(x), by_definition(made, x, 2)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(output)
    parameters = [x, *made.parameters()]
    found = torch.autograd.grad(output, parameters, upstream)
    wanted = torch.autograd.grad(expected, parameters, upstream)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


@given(
    experts=st.sampled_from([1, 2, 6]),
    k=st.integers(1, 6),
    tokens=st.integers(1, 9),
    dispatcher=st.sampled_from(["alltoall", "allgather", "local"]),
    grouped=st.booleans(),
)
def test_dispatchers_and_experts_of_any_kind_agree(experts, k, tokens, dispatcher, grouped) -> None:
    moe = MoEConfig(num_experts=experts, top_k=min(k, experts), ffn_hidden=12)
    x = hidden(tokens, 1)
    plain = layer(replace(moe, dispatcher="local", grouped_gemm=False))
    other = layer(replace(moe, dispatcher=dispatcher, grouped_gemm=grouped))
    other.load_state_dict(plain.state_dict())
    torch.testing.assert_close(other(x), plain(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("moe", [SHARED, replace(SHARED, shared_expert_overlap=True)], ids=["apart", "overlapped"])
def test_the_steps_are_methods_in_the_sources_order(moe: MoEConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Called one by one they are the forward, and the forward calls them so."""
    names = ["shared_experts_compute", "route", "preprocess", "dispatch", "routed_experts_compute", "combine"]
    made, x, called = layer(moe), hidden(), []
    shared = made.shared_experts_compute(x)
    assert (shared is None) == moe.shared_expert_overlap
    probs, chosen = made.route(x)
    rows, probs, metadata = made.preprocess(x, probs, chosen)
    assert rows.shape == (7 * 3 * 2, MODEL.hidden)
    rows, probs, metadata = made.dispatch(rows, probs, metadata)
    rows, metadata = made.routed_experts_compute(rows, probs, metadata)
    by_hand = made.combine(rows, metadata, shared)
    for name in names:
        method = getattr(made, name)
        monkeypatch.setattr(made, name, lambda *a, n=name, m=method: called.append(n) or m(*a))
    assert torch.equal(made(x), by_hand)
    assert called == names


def test_overlapped_shared_experts_give_the_same_to_the_bit() -> None:
    """Output and gradients of weights; those of the input are added up in another order."""
    results = []
    for overlap in (False, True):
        made, x = layer(replace(SHARED, shared_expert_overlap=overlap)), hidden()
        output = made(x)
        output.backward(torch.ones_like(output))
        results.append([output, *(p.grad for p in made.parameters())])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


# ---- in a model ----


def gpt(moe: MoEConfig, config: ModelConfig = MODEL, **more: Any) -> GPTModel:
    given: dict[str, Any] = {"layers": range(config.layers), "seed": 3, "dtype": torch.float64} | more
    return GPTModel(config, GROUPS, moe=moe, **given)


def ids(batch: int = 3) -> Tensor:
    return torch.randint(0, 64, (batch, 17), generator=torch.Generator().manual_seed(5))


def loss_of(model: GPTModel, tokens: Tensor) -> Tensor:
    return model(tokens[:, :-1], labels_BS=tokens[:, 1:]).mean()


def test_layers_with_experts_are_those_of_the_pattern() -> None:
    config = presets.deepseek_tiny()
    (model,) = build_model_chunks(config, GROUPS)
    kinds = [type(block.mlp) for block in model.layers.values()]
    assert kinds == [ParallelMLP] + [MoELayer] * 7
    assert [made.name for made in model.moe_layers()] == [f"layers.{i}.mlp" for i in range(1, 8)]
    made: Any = model.layers["2"].mlp
    assert [*dict(made.named_parameters())] == [
        "router.weight", "experts.fc1.weight", "experts.fc2.weight", "shared_experts.fc1.weight",
        "shared_experts.fc2.weight", "norm.weight",
    ]  # fmt: skip
    assert [name for name, _ in made.named_buffers()] == [
        "router.expert_bias", "router.local_tokens_per_expert",
    ]  # fmt: skip
    names = {p.full_name: name for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    assert all(full == name for full, name in names.items())


def test_last_projections_of_experts_are_scaled_down_as_those_of_an_mlp() -> None:
    moe = replace(SHARED, num_experts=64, shared_expert_ffn_hidden=1024)
    (made, *_) = gpt(moe, replace(MODEL, init_std=0.2)).moe_layers()
    experts: Any
    for experts in (made.experts, made.shared_experts):
        assert experts.fc1.weight.std().item() == pytest.approx(0.2, rel=0.05)
        assert experts.fc2.weight.std().item() == pytest.approx(0.2 / 2, rel=0.05)  # sqrt(2 x 2 layers)


def test_routers_of_a_chunk_share_the_scale_of_their_losses() -> None:
    """Without the model's own loss, gradients are the routers' losses alone: proportional to the scale."""
    moe = replace(MOE, aux_loss_coeff=0.5, z_loss_coeff=0.5)
    found = []
    for scale in (1.0, 4.0):
        model = gpt(moe)
        model.aux_loss_scale.set(scale)
        (loss_of(model, ids()) * 0).backward()
        found.append([made.router.weight.grad for made in model.moe_layers()])
    for one, four in zip(*found, strict=True):
        assert one is not None and one.abs().max() > 1e-4
        torch.testing.assert_close(four, 4 * one, rtol=1e-12, atol=1e-14)


# ---- recomputation ----


def outcome(moe: MoEConfig, split: bool = False, **recompute: Any) -> tuple[list[Tensor], int]:
    """Loss, all gradients, counts of the routers and the random state after two microbatches; and the bytes kept."""
    torch.manual_seed(11)
    config = replace(MODEL, hidden_dropout=0.1, **recompute)
    model, store = gpt(moe, config), WeightGradStore()
    losses, kept = [], 0
    for number in range(2):
        with SavedTensors(model) as saved:
            losses.append(loss_of(model, ids(2 + number)))
        kept += saved.bytes
    for number, loss in enumerate(losses):
        if split:
            with store.collecting(number):
                loss.backward()
            store.run(number)
        else:
            loss.backward()
    gradients = [p.grad for p in model.parameters()]
    assert all(g is not None for g in gradients)
    counts = [made.router.statistics.totals for made in model.moe_layers()]
    biases = [made.router.local_tokens_per_expert for made in model.moe_layers()]
    seen = [loss.detach() for loss in losses] + gradients + counts + [b for b in biases if b is not None]
    return [*seen, torch.get_rng_state()], kept  # type: ignore[list-item]


CHOICES: dict[str, dict[str, Any]] = {
    "full": {"recompute_granularity": "full"},
    "full by two": {"recompute_granularity": "full", "recompute_num_layers": 2},
    "first layer": {"recompute_granularity": "full", "recompute_method": "block"},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ("moe",)},
    "shared experts": {"recompute_granularity": "selective", "recompute_modules": ("shared_experts",)},
    "norms": {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
    "moe and the rest": {
        "recompute_granularity": "selective",
        "recompute_modules": ("moe", "mlp", "core_attn", "layernorm"),
    },
}


@pytest.mark.parametrize("split", [False, True], ids=["whole", "I and W"])
@pytest.mark.parametrize("moe", [replace(SHARED, aux_loss_coeff=0.1), EVERYTHING], ids=["softmax", "everything"])
def test_recomputation_changes_no_bit(moe: MoEConfig, split: bool) -> None:
    """Neither gradients nor what routers count, with dropout and jitter drawn again; and less is kept."""
    expected, everything = outcome(moe, split)
    for name, choice in CHOICES.items():
        found, kept = outcome(moe, split, **choice)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), name
        assert kept < 0.95 * everything, name


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "one by one"])
def test_a_split_backward_is_the_whole_one_to_the_bit(grouped: bool) -> None:
    moe = replace(EVERYTHING, grouped_gemm=grouped)
    whole, _ = outcome(moe)
    split, _ = outcome(moe, split=True)
    assert all(torch.equal(a, b) for a, b in zip(whole, split, strict=True))


def test_weights_of_grouped_and_shared_experts_wait_for_w() -> None:
    model, store = gpt(SHARED), WeightGradStore()
    loss = loss_of(model, ids())
    with store.collecting(0):
        loss.backward()
    late = {name for name, p in model.named_parameters() if p.grad is None}
    wait = {
        f"layers.{i}.mlp.{part}.{fc}.weight"
        for i in (0, 1)
        for part in ("experts", "shared_experts")
        for fc in ("fc1", "fc2")
    }
    assert wait <= late
    store.run(0)
    assert all(p.grad is not None for p in model.parameters())


# ---- Transformer Engine, refusals ----


def test_the_norm_before_experts_is_a_plain_one_with_transformer_engine() -> None:
    moe = replace(SHARED, layer_freq=(1, 0))
    with te_stub.installed():
        model = gpt(moe, replace(MODEL, transformer_impl="transformer_engine"), spec=EngineSpec())
        sparse, dense = (model.layers[index].mlp for index in "01")
        assert isinstance(sparse.norm, Norm) and isinstance(dense.norm, FusedNorm)
        local = gpt(moe)
        assert list(model.state_dict()) == list(local.state_dict())
        found, expected = loss_of(model, ids()), loss_of(local, ids())
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        found.backward()
        expected.backward()
    for (name, one), (_, two) in zip(model.named_parameters(), local.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("moe", "parallel", "words"),
    [
        (MOE, {"tp": 2}, "MoE layers need sequence parallelism"),
        (replace(MOE, num_experts=6), {"ep": 4}, "6 experts cannot be divided over ep=4"),
        (replace(MOE, ffn_hidden=9), {"tp": 2, "sequence_parallel": True}, "etp=2"),
        (replace(SHARED, shared_expert_ffn_hidden=9), {"tp": 2, "etp": 1, "sequence_parallel": True}, "tp=2"),
        (replace(SHARED, shared_expert_overlap=True, dispatcher="local"), {}, "no transfer that the shared experts"),
    ],
    ids=["tp without sp", "ep", "etp", "tp", "overlap"],
)
def test_what_cannot_be_is_refused(moe: MoEConfig, parallel: dict[str, Any], words: str) -> None:
    config = ParallelConfig(**parallel)
    world = config.smallest_world_size
    groups = initialize_model_parallel(config, rank=0, world_size=world)
    with pytest.raises(ValueError, match=words):
        GPTModel(MODEL, groups, moe=moe, layers=range(1), seed=1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"load_balancing": "aux"}, "moe.load_balancing = 'aux': must be one of aux_loss, seq_aux_loss"),
        ({"capacity_factor": -1.0}, "moe.capacity_factor = -1.0: must be greater than 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_layer_by_hand_refuses_what_a_run_would(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^layers\.0\.mlp: .*{re.escape(words)}"):
        layer(replace(MOE, **changes))


@pytest.mark.parametrize(
    ("x", "got"),
    [
        (torch.zeros(7, 3, MODEL.hidden + 1, dtype=torch.float64), r"torch\.float64 \[7, 3, 17\]"),
        (torch.zeros(7, MODEL.hidden, dtype=torch.float64), r"torch\.float64 \[7, 16\]"),
        (torch.zeros(7, 3, MODEL.hidden), r"torch\.float32 \[7, 3, 16\]"),
        (torch.zeros(0, 3, MODEL.hidden, dtype=torch.float64), r"torch\.float64 \[0, 3, 16\]"),
    ],
    ids=["hidden", "2d", "type", "no sequence"],
)
def test_inputs_of_another_shape_or_type_are_refused(x: Tensor, got: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^layers\.0\.mlp: the input must be torch\.float64 \[S, B, 16\] .*, got {got}$"
    ):
        layer(MOE)(x)


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
@pytest.mark.parametrize("capacity", [None, 1.0])
def test_a_layer_without_a_token_stays_connected(kind: str, capacity: float | None) -> None:
    moe = replace(MOE, load_balancing=kind, aux_loss_coeff=0.1, z_loss_coeff=0.1, capacity_factor=capacity)
    made, x = layer(moe), hidden(batch=0)
    made(x).sum().backward()
    assert x.grad is not None
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name
