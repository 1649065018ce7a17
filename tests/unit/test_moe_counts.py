"""What models with experts cost, in closed form, against models that are built and torch's operation counter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from labkit import plan
from labkit.config import ModelConfig, MoEConfig, ParallelConfig, RunConfig, TrainConfig, presets
from labkit.models import GPTModel, build_model_chunks
from labkit.moe.experts import expert_width
from labkit.parallel import initialize_model_parallel, single_process_groups

GROUPS = single_process_groups()
GPT2 = ModelConfig(layers=4, hidden=32, heads=4, vocab_size=301, make_vocab_size_divisible_by=32, seq_length=16)
GATED = replace(GPT2, activation="swiglu", ffn_hidden=48, bias=False, untie_embeddings_and_output_weights=True)
PLAIN = MoEConfig(num_experts=8, layer_freq=(1, 0))
SHARED = MoEConfig(
    num_experts=8,
    ffn_hidden=16,
    layer_freq=(0, 1, 1, 1),
    top_k=3,
    shared_expert_ffn_hidden=24,
    shared_expert_gate=True,
)
MODELS = pytest.mark.parametrize(
    ("model", "moe"), [(GPT2, PLAIN), (GATED, PLAIN), (GATED, SHARED)], ids=["gpt2", "gated", "shared"]
)

LAYOUTS = {
    "one rank": ParallelConfig(),
    "ep8": ParallelConfig(ep=8),
    "tp2 etp2": ParallelConfig(tp=2, sequence_parallel=True),
    "tp2 etp1 ep4": ParallelConfig(tp=2, etp=1, ep=4, sequence_parallel=True),
    "etp2 ep2 cp4": ParallelConfig(cp=4, etp=2, ep=2),
    "pp2 ep2": ParallelConfig(pp=2, ep=2),
    "pp4 ep2": ParallelConfig(pp=4, ep=2),
    "pp2 vpp2 tp2 etp1 ep2": ParallelConfig(pp=2, vpp=2, tp=2, etp=1, ep=2, sequence_parallel=True),
}


@MODELS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_of_every_rank(model: ModelConfig, moe: MoEConfig, layout: str) -> None:
    run = RunConfig(model=model, moe=moe, parallel=LAYOUTS[layout])
    world = run.parallel.smallest_world_size
    assert run.problems(world) == []
    for rank in range(world):
        groups = initialize_model_parallel(run.parallel, rank=rank, world_size=world)
        held = sum(p.numel() for chunk in build_model_chunks(run, groups) for p in chunk.parameters())
        assert held == plan.rank_parameters(run, pp_rank=groups.pp.rank), rank


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("mixtral_8x7b", "46.7", "12.9"),
        ("deepseek_moe_16b", "16.4", "2.8"),
        ("llama3_8b", "8.0", "8.0"),
        ("llama3_70b", "70.6", "70.6"),
        ("llama3_405b", "405.9", "405.9"),
    ],  # billions
)
def test_released_models_have_their_size(name: str, total: str, active: str) -> None:
    config = presets.get(name)
    assert f"{plan.model_parameters(config.model, config.moe) / 1e9:.1f}" == total
    assert f"{plan.active_parameters(config.model, config.moe) / 1e9:.1f}" == active


@pytest.mark.parametrize("name", ["tiny_moe", "mixtral_tiny", "deepseek_tiny"])
def test_parameters_of_the_small_presets(name: str) -> None:
    config = presets.get(name)
    (whole,) = build_model_chunks(config, GROUPS)
    assert sum(p.numel() for p in whole.parameters()) == plan.model_parameters(config.model, config.moe)


def test_active_parameters_are_those_with_a_gradient_for_one_token() -> None:
    """Rows of the embedding and positions apart, of which a token has one each."""
    model = GPTModel(GATED, GROUPS, layers=range(4), moe=SHARED, seed=1)
    one = torch.zeros(1, 1, dtype=torch.long)
    model(one, labels_BS=one).sum().backward()
    used = 0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        if "experts." in name and "shared" not in name:
            used += sum(p.numel() for p, g in zip(parameter, parameter.grad, strict=True) if g.any())
        else:
            used += parameter.numel()
    padding = 2 * (plan.padded_vocab(GATED) - GATED.vocab_size) * GATED.hidden
    assert used == plan.active_parameters(GATED, SHARED) + padding


@given(
    experts=st.sampled_from([4, 8]),
    width=st.sampled_from([None, 8, 40]),
    freq=st.sampled_from([(1,), (1, 0), (0, 0, 1, 1)]),
    shared=st.sampled_from([None, 16]),
)
def test_all_experts_for_every_token_leave_nothing_idle(experts, width, freq, shared) -> None:
    moe = MoEConfig(
        num_experts=experts, ffn_hidden=width, layer_freq=freq, top_k=experts, shared_expert_ffn_hidden=shared
    )
    assert plan.active_parameters(GPT2, moe) == plan.model_parameters(GPT2, moe)
    assert plan.expert_width(GPT2, moe) == expert_width(GPT2, moe)
    idle = plan.model_parameters(GPT2, moe) - plan.active_parameters(GPT2, replace(moe, top_k=1))
    assert idle == (experts - 1) * plan.expert_parameters(GPT2, moe) * plan.moe_layers(GPT2, moe)


def counted(model: ModelConfig, moe: MoEConfig, *, backward: bool) -> int:
    """Operations by torch's counter; experts one after the other, in operators that it knows."""
    model = replace(model, make_vocab_size_divisible_by=1)  # the closed forms leave padding out
    gpt = GPTModel(model, GROUPS, layers=range(model.layers), moe=replace(moe, grouped_gemm=False), seed=1)
    ids = torch.arange(3 * model.seq_length).view(3, -1) % model.vocab_size
    also = {torch.ops.aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1]}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=also) as counter:
        loss = gpt(ids, labels_BS=ids).mean()
        if backward:
            loss.backward()
    return counter.get_total_flops()


@MODELS
def test_operations_equal_torchs_counter(model: ModelConfig, moe: MoEConfig) -> None:
    assert counted(model, moe, backward=False) == plan.forward_flops(model, samples=3, moe=moe).total
    assert counted(model, moe, backward=True) == plan.step_flops(model, samples=3, moe=moe).total
    again = [replace(model, recompute_granularity="full")]
    if moe is not SHARED:  # torch's counter cannot follow a module whose input is a view made without gradients
        modules = ("core_attn", "mlp", "moe")
        again.append(replace(model, recompute_granularity="selective", recompute_modules=modules))
    for one in again:
        assert counted(one, moe, backward=True) == hardware(one, moe)


def hardware(model: ModelConfig, moe: MoEConfig) -> int:
    """Of three samples."""
    train = TrainConfig(micro_batch_size=3, global_batch_size=3)
    return plan.hardware_flops(RunConfig(model=model, moe=moe, train=train))


def test_recomputed_experts_repeat_their_matrices_by_hand() -> None:
    """Shared experts have a gate and three matrices, each of three experts of a token three, the router one."""
    tokens, layers, hidden = 3 * 16, 3, 32
    shared = hidden * (1 + 3 * 24)
    for name, weights in (("shared_experts", shared), ("moe", shared + hidden * 8 + 3 * 3 * hidden * 16)):
        again = replace(GATED, recompute_granularity="selective", recompute_modules=(name,))
        assert hardware(again, SHARED) - hardware(GATED, SHARED) == 2 * tokens * layers * weights


def test_operations_of_a_part_of_the_layers_add_up() -> None:
    whole = plan.forward_flops(GATED, moe=SHARED, logits=False)
    parts = [plan.forward_flops(GATED, moe=SHARED, logits=False, layers=range(i, i + 2)) for i in (0, 2)]
    assert whole.total == sum(part.total for part in parts)
    assert parts[0].experts * 2 == parts[1].experts  # one of layers 0 and 1 has experts, both of 2 and 3


def test_without_ep_nothing_is_sent() -> None:
    assert plan.layer_all_to_all_bytes(GPT2, PLAIN, tokens=10, ep=1) == 0
