"""Closed-form counts against what is there: parameters, torch's operation counter."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from labkit import plan
from labkit.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig, presets
from labkit.models import build_model_chunks
from labkit.models.chunks import model_type
from labkit.parallel import initialize_model_parallel, single_process_groups
from labkit.plan.mamba import CHUNK
from labkit.schedules import Schedule
from labkit.train import pretrain

GROUPS = single_process_groups()
GPT2 = ModelConfig(layers=2, hidden=64, heads=4, vocab_size=301, make_vocab_size_divisible_by=32, seq_length=32)
GATED = replace(GPT2, activation="swiglu", ffn_hidden=96, bias=False)
GROUPED = replace(GPT2, kv_heads=2, position="rope", untie_embeddings_and_output_weights=True)
RMS = replace(GROUPED, norm="rmsnorm")
BERT = replace(GPT2, family="bert", activation="gelu")
SCANS = {"mamba_state_dim": 8, "mamba_head_dim": 8, "mamba_num_groups": 4, "position": "none", "norm": "rmsnorm"}
MAMBA = replace(GPT2, family="mamba", bias=False, mamba_num_heads=8, **SCANS)
HYBRID = replace(GPT2, family="mamba", layers=4, hybrid_override_pattern="M*-M", **SCANS | {"seq_length": 288})
POST = replace(BERT, norm_placement="post", bert_binary_head=False)


# ---- parameters ----


@pytest.mark.parametrize(
    "config",
    [GPT2, GATED, GROUPED, RMS, replace(GROUPED, kv_heads=1), BERT, POST, MAMBA, HYBRID],
    ids=["gpt2", "gated", "grouped", "rms", "one kv head", "bert", "post-LN bert", "mamba", "hybrid"],
)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)])
def test_parameters_of_every_rank(config: ModelConfig, tp: int, pp: int) -> None:
    run = RunConfig(model=config, parallel=ParallelConfig(tp=tp, pp=pp))
    for rank in range(tp * pp):
        groups = initialize_model_parallel(run.parallel, rank=rank, world_size=tp * pp)
        held = sum(p.numel() for chunk in build_model_chunks(run, groups) for p in chunk.parameters())
        assert held == plan.rank_parameters(run, pp_rank=groups.pp.rank)


@pytest.mark.parametrize("config", [GPT2, RMS], ids=["tied", "untied"])
def test_parameters_where_first_and_last_stage_are_on_one_rank(config: ModelConfig) -> None:
    run = RunConfig(model=replace(config, layers=4), parallel=ParallelConfig(tp=2, pp=2))
    v = Schedule("V", 4, 1, [["0F0", "3F0", "3B0", "0B0"], ["1F0", "2F0", "2B0", "1B0"]])
    for rank in range(4):
        groups = initialize_model_parallel(run.parallel, rank=rank, world_size=4)
        held = sum(p.numel() for chunk in build_model_chunks(run, groups, v) for p in chunk.parameters())
        assert held == plan.rank_parameters(run, pp_rank=groups.pp.rank, schedule=v)


@given(
    layers=st.sampled_from([4, 8]),
    heads=st.sampled_from([4, 8]),
    vocab=st.integers(30, 400),
    vpp=st.sampled_from([1, 2]),
    gate=st.booleans(),
    untied=st.booleans(),
)
def test_parameters_of_all_ranks_are_the_model_and_its_copies(layers, heads, vocab, vpp, gate, untied) -> None:
    """Summed over stages: the whole model plus padding, plus the second copy of a tied table."""
    model = ModelConfig(
        layers=layers,
        heads=heads,
        hidden=64,
        vocab_size=vocab,
        activation="swiglu" if gate else "gelu",
        untie_embeddings_and_output_weights=untied,
    )
    run = RunConfig(model=model, parallel=ParallelConfig(pp=2, vpp=vpp))
    tables = 2 if untied else 1
    padding = (plan.padded_vocab(model) - vocab) * 64 * tables
    copy = 0 if untied else plan.padded_vocab(model) * 64
    total = sum(plan.rank_parameters(run, pp_rank=rank) for rank in range(2))
    assert total == plan.model_parameters(model) + padding + copy


@pytest.mark.parametrize(
    ("name", "billions", "places"),
    [
        ("gpt2_124m", 0.124439808, 9),  # GPT2LMHeadModel("gpt2").num_parameters()
        ("table1_1_2b", 1.2, 1),
        ("table1_2_5b", 2.5, 1),
        ("table1_4_2b", 4.2, 1),
        ("table1_8_3b", 8.3, 1),
        ("table2_355m", 0.355, 3),
        ("table2_2_5b", 2.5, 1),
        ("table2_8_3b", 8.3, 1),
        ("table4_336m", 0.336, 3),
        ("table4_1_3b", 1.3, 1),
        ("table4_3_9b", 3.9, 1),
    ],
)
def test_the_papers_models_have_their_size(name: str, billions: float, places: int) -> None:
    assert round(plan.model_parameters(presets.get(name).model) / 1e9, places) == billions


def test_one_shape_makes_the_752_million_of_figure_7() -> None:
    """Dozens of layers, heads of 64 features, vocabulary padded as the preset does."""
    bert = replace(presets.get("figure7_752m").model, vocab_size=30592)
    shapes = [(layers, 64 * heads) for layers in (12, 24, 36, 48) for heads in range(8, 41)]
    millions = {
        (layers, hidden): plan.model_parameters(replace(bert, layers=layers, hidden=hidden, heads=hidden // 64)) / 1e6
        for layers, hidden in shapes
    }
    assert [shape for shape, count in millions.items() if round(count) == 752] == [(bert.layers, bert.hidden)]


@pytest.mark.parametrize("name", presets.names())
def test_parameters_of_every_preset(name: str) -> None:
    """One layer and both ends are built for real; the rest are more layers of the same kind."""
    config = presets.get(name)
    model = config.model
    if model.hidden > 1600:  # too large to draw in a test: the same shape at an eighth of the width
        model = replace(model, hidden=model.hidden // 8, vocab_size=1000)
    small = replace(model, layers=1)
    indices = range(plan.all_layers(small))  # of a T5 one of each half
    one = model_type(model.family)(small, GROUPS, layers=indices, seed=1)
    by_part = {part: sum(p.numel() for n, p in one.named_parameters() if part in n) for part in ("layers.", "")}
    assert by_part["layers."] == sum(plan.layer_parameters(small, index=index) for index in indices)
    assert by_part[""] == plan.stage_parameters(small, layers=indices)


# ---- operations ----


def counted(config: ModelConfig, *, backward: bool) -> int:
    config = replace(config, make_vocab_size_divisible_by=1)  # the closed forms leave padding out
    model = model_type(config.family)(config, GROUPS, layers=range(config.layers), seed=1)
    ids = torch.zeros(3, config.seq_length, dtype=torch.long)
    # torch counts no CPU flash attention (its plain form does the same GEMMs) and no addmm_ in place.
    also = {torch.ops.aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1]}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=also) as counter:
        made = model(ids, labels_BS=ids)
        if backward:  # of a BERT from both of its outputs
            sum(x.mean() for x in (made if isinstance(made, tuple) else (made,)) if x is not None).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "config",
    [GPT2, GATED, GROUPED, BERT, POST, MAMBA, HYBRID],
    ids=["gpt2", "gated", "grouped", "bert", "post", "mamba", "hybrid of three chunks"],
)
def test_operations_equal_torchs_counter(config: ModelConfig) -> None:
    assert counted(config, backward=False) == plan.forward_flops(config, samples=3).total
    assert counted(config, backward=True) == plan.step_flops(config, samples=3).total


RECOMPUTED = [
    {"recompute_granularity": "full"},
    {"recompute_granularity": "full", "recompute_num_layers": 2},
    {"recompute_granularity": "full", "recompute_method": "block"},
    {"recompute_granularity": "selective"},
    {"recompute_granularity": "selective", "recompute_modules": ("mlp", "layernorm")},
]


def batch_of(model: ModelConfig, samples: int, **parallel) -> RunConfig:
    """A run whose microbatches have one sample each; with one stage all are one microbatch."""
    micro = 1 if parallel else samples
    train = TrainConfig(micro_batch_size=micro, global_batch_size=samples)
    return RunConfig(model=model, parallel=ParallelConfig(**parallel), train=train)


@pytest.mark.parametrize("changes", RECOMPUTED, ids=lambda changes: " ".join(map(str, changes.values())))
@pytest.mark.parametrize("config", [GPT2, GATED, GROUPED, BERT, POST], ids=["gpt2", "gated", "grouped", "bert", "post"])
def test_hardware_operations_equal_torchs_counter(config: ModelConfig, changes: dict[str, Any]) -> None:
    again = replace(config, **changes)
    assert counted(again, backward=True) == plan.hardware_flops(batch_of(again, 3))
    assert plan.hardware_flops(batch_of(config, 3)) == plan.step_flops(config, samples=3).total


@pytest.mark.parametrize("changes", RECOMPUTED[:3], ids=["full", "groups", "block"])
def test_hardware_operations_of_mamba_layers_equal_torchs_counter(changes: dict[str, Any]) -> None:
    again = replace(HYBRID, **changes)
    assert counted(again, backward=True) == plan.hardware_flops(batch_of(again, 3))


def test_operations_of_a_run_with_recomputation_equal_torchs_counter() -> None:
    """Two microbatches of two samples, of which `pretrain` recomputes half of the layers."""
    size = {"layers": 4, "make_vocab_size_divisible_by": 1, "attention_backend": "math"}
    batch = {"micro_batch_size": 2, "global_batch_size": 4, "steps": 1, "eval_steps": 0}
    config = presets.tiny().override(size | batch | RECOMPUTED[2] | {"recompute_num_layers": 2})
    also = {torch.ops.aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=also) as counter:
        [line] = pretrain(config).metrics
    assert counter.get_total_flops() == plan.hardware_flops(config)
    hardware = line["hardware_tflops_per_rank"] * line["step_time"] * 1e12
    assert hardware == pytest.approx(counter.get_total_flops())
    model = line["tflops_per_rank"] * line["step_time"] * 1e12
    assert model == pytest.approx(plan.step_flops(config.model, samples=4).total)


def test_what_the_stages_of_a_pipeline_recompute() -> None:
    """Each chunk recomputes its first layer. Of four microbatches the first rank, with two in flight, keeps the first
    of every two; the second rank, with one, keeps all (Megatron's rule)."""
    model = replace(GPT2, layers=8, recompute_granularity="full")
    plain, layer = plan.step_flops(model, samples=4).total, plan.forward_flops(model, layers=1, logits=False).total
    block = replace(model, recompute_method="block")
    assert plan.hardware_flops(batch_of(block, 4, pp=2)) == plain + 4 * 2 * layer
    assert plan.hardware_flops(batch_of(block, 4, pp=2, vpp=2)) == plain + 4 * 4 * layer
    uneven = batch_of(replace(block, recompute_num_layers=3), 4, pp=2, pipeline_layout="Et|t*7 L")
    assert plan.hardware_flops(uneven) == plain + 4 * (1 + 3) * layer
    partial = replace(model, num_microbatches_with_partial_activation_checkpoints=1)
    assert plan.hardware_flops(batch_of(partial, 4, pp=2)) == plain + 2 * 4 * layer


@given(
    s=st.sampled_from([128, 1024, 2048]),
    h=st.sampled_from([512, 768, 3072]),
    v=st.integers(100, 60000),
    layers=st.integers(1, 96),
    recompute=st.booleans(),
)
def test_the_papers_formula_is_the_same_count(s: int, h: int, v: int, layers: int, recompute: bool) -> None:
    model = ModelConfig(layers=layers, hidden=h, heads=8, vocab_size=v, seq_length=s)
    exact = plan.hardware_flops(batch_of(replace(model, recompute_granularity="full" if recompute else "none"), 4))
    assert plan.paper_step_flops(model, samples=4, recompute=recompute) == pytest.approx(exact, rel=1e-12)


def test_causal_pairs_by_counting_them() -> None:
    pairs = sum(1 for q in range(32) for k in range(32) if k <= q)
    causal = plan.forward_flops(GPT2, causal=True)
    assert causal.attention == 2 * 2 * pairs * 64 * GPT2.layers  # two GEMMs, 2 operations, H over all heads
    assert causal.linear == plan.forward_flops(GPT2).linear


def test_causal_pairs_of_a_scan_look_back_inside_their_chunk() -> None:
    pairs = sum(1 for q in range(288) for k in range(288) if k <= q and k // CHUNK == q // CHUNK)
    alone = replace(HYBRID, layers=2, hybrid_override_pattern=None)
    every, causal = (plan.forward_flops(alone, causal=c).attention for c in (False, True))
    per_pair = 4 * 8 + 16 * 8  # c b of 4 groups with 8 states, and the product with x of 16 heads with 8 features
    assert every - causal == 2 * 2 * per_pair * (2 * 128**2 + 32**2 - pairs)


# ---- bytes ----


def test_counting_needs_no_torch() -> None:
    code = "import sys, labkit.plan as p; [getattr(p, name) for name in p.__all__]; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
