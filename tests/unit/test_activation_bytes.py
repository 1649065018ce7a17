"""Closed forms of what a layer keeps for backward, against what autograd keeps: every tensor of it, to 1%."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.config import ModelConfig
from labkit.models import BertModel, GPTModel
from labkit.models.chunks import model_type
from labkit.models.saved_tensors import SavedTensors
from labkit.parallel import single_process_groups
from labkit.plan.activations import (
    Share,
    end_activation_bytes,
    layer_activation_bytes,
    layer_saved,
    layers_activation_bytes,
    paper_layer_bytes,
    recomputed_at_once_bytes,
)
from labkit.plan.mamba import CHUNK

GROUPS = single_process_groups()
BATCH = 3
GPT2 = ModelConfig(layers=4, hidden=64, heads=4, vocab_size=301, make_vocab_size_divisible_by=32, seq_length=32)
MODELS = {
    "gpt2": GPT2,
    "rope": replace(GPT2, position="rope"),
    "grouped": replace(GPT2, kv_heads=2),
    "grouped rope": replace(GPT2, kv_heads=2, position="rope", untie_embeddings_and_output_weights=True),
    "gated": replace(GPT2, activation="swiglu", ffn_hidden=96, bias=False),
    "rms": replace(GPT2, norm="rmsnorm", activation="swiglu", bias=False),
}
BERT = replace(GPT2, family="bert", activation="gelu")
BERTS = {
    "pre": BERT,
    "post": replace(BERT, norm_placement="post"),
    "words alone": replace(BERT, bert_binary_head=False),
}
MAMBA = replace(
    GPT2, family="mamba", position="none", norm="rmsnorm", bias=False, seq_length=160,
    mamba_state_dim=8, mamba_head_dim=16, mamba_num_groups=2, hybrid_override_pattern="M-*M",
)  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
SELECTIVE: tuple[tuple[str, ...], ...] = (("core_attn",), ("layernorm",), ("core_attn", "mlp", "layernorm"))


def built(config: ModelConfig, dtype: torch.dtype = torch.float32, layers: int = 1) -> GPTModel:
    """Layers alone, or, without any, the embedding and the loss."""
    ends = not layers
    kind = model_type(config.family)
    return kind(config, GROUPS, layers=range(layers), pre_process=ends, post_process=ends, seed=1, dtype=dtype)


def hidden(config: ModelConfig, dtype: torch.dtype) -> torch.Tensor:
    """An input that is no leaf, as a layer sees it."""
    return torch.randn(config.seq_length, BATCH, config.hidden, dtype=dtype, requires_grad=True) * 1


def measured(config: ModelConfig, dtype: torch.dtype, layers: int = 1) -> SavedTensors:
    """What `layers` layers keep, and their output, which keeps it alive."""
    model, x_SBH = built(config, dtype, layers), hidden(config, dtype)
    with SavedTensors(model) as saved:
        rotary: Any = model.rotary and model.rotary(x_SBH, None)
        saved.output = model.recompute.run_layers(model.layers.values(), x_SBH, rotary)  # type: ignore
    return saved


def share(dtype: torch.dtype) -> Share:
    return Share(samples=BATCH, element_bytes=dtype.itemsize)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_one_layer_by_attention_dropout_and_choice(name: str, dtype: str) -> None:
    """Both kernels, with and without dropout, nothing recomputed and every choice of parts."""
    kind, some = DTYPES[dtype], {"attention_dropout": 0.1, "hidden_dropout": 0.1}
    selective = [{"recompute_granularity": "selective", "recompute_modules": modules} | some for modules in SELECTIVE]
    choices: list[dict[str, Any]] = [{}, some, *selective]
    for backend, choice in product(("fused", "math", "unfused"), choices):
        config = replace(MODELS[name], attention_backend=backend, **choice)
        expected = layer_activation_bytes(config, share(kind))
        assert measured(config, kind).bytes == pytest.approx(expected, rel=0.01), (backend, choice)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [32, 160, 300])
def test_layers_of_a_mamba_model(length: int, dtype: str) -> None:
    """Scans of one, two and three chunks, an MLP and attention."""
    config, kind = replace(MAMBA, seq_length=length, hidden_dropout=0.1), DTYPES[dtype]
    expected = layers_activation_bytes(config, share(kind), layers=4)
    assert measured(config, kind, 4).bytes == pytest.approx(expected, rel=0.01)
    alone = layer_activation_bytes(config, share(kind), parts="M")
    assert measured(config, kind).bytes == pytest.approx(alone, rel=0.01)


@pytest.mark.parametrize("length", [32, 160, 300])
def test_a_mamba_layer_part_by_part(length: int) -> None:
    """Each tensor to the byte but the smallest, a number for each head: the rates, exp(A_log) and its negative, and
    the decay over a chunk that both reads a state and writes one."""
    config = replace(MAMBA, seq_length=length, hidden_dropout=0.1)
    saved = layer_saved(config, Share(samples=BATCH), parts="M")
    left_out = 4 * config.mamba_heads * (2 + BATCH * (length > 2 * CHUNK))
    by_module = measured(config, torch.float32).by_module
    assert {name.removeprefix("layers.0."): size for name, size in by_module.items()} == {
        "mamba.norm": saved.pop("mamba norm"),
        "mamba.in_proj": saved.pop("mamba in_proj input"),
        "mamba.conv": saved.pop("mamba padded x, b, c"),
        "mamba.gated_norm": saved.pop("mamba gate") + saved.pop("mamba gated norm"),
        "mamba.out_proj": saved.pop("mamba out_proj input"),
        "dropout": saved.pop("mamba dropout mask"),
        "mamba": sum(saved.values()) + left_out,
    }


def test_part_by_part() -> None:
    """Not only in sum: norms, linear inputs, attention, MLP and masks, each where the modules say it is."""
    config = replace(GPT2, attention_backend="unfused", attention_dropout=0.1, hidden_dropout=0.1)
    saved = layer_saved(config, Share(samples=BATCH))
    by_module = {
        name.removeprefix("layers.0."): size for name, size in measured(config, torch.float32).by_module.items()
    }
    assert by_module == {
        "attention.norm": saved["attention norm"],
        "attention.qkv": saved["attention qkv input"],
        "attention.core": saved["attention q, k, v"] + saved["attention probabilities"],
        "attention.proj": saved["attention proj input"],
        "dropout": saved["attention dropout mask"] + saved["mlp dropout mask"],
        "mlp.norm": saved["mlp norm"],
        "mlp.fc1": saved["mlp fc1 input"],
        "mlp": saved["mlp activation input"],
        "mlp.fc2": saved["mlp fc2 input"],
    }


@pytest.mark.parametrize("backend", ["fused", "unfused"])
@pytest.mark.parametrize(
    ("method", "count", "kept"),
    [
        ("uniform", 1, (4, 0)),
        ("uniform", 2, (2, 0)),
        ("uniform", 3, (2, 0)),
        ("block", 1, (1, 3)),
        ("block", 4, (4, 0)),
    ],
)
def test_full_recomputation_keeps_inputs(method: str, count: int, kept: tuple[int, int], backend: str) -> None:
    """Of 4 layers: so many inputs, and so many layers whole."""
    how = {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": count}
    config = replace(GPT2, attention_backend=backend, hidden_dropout=0.1, attention_dropout=0.1, **how)
    inputs, whole = kept
    by_hand = inputs * GPT2.seq_length * BATCH * GPT2.hidden * 4 + whole * layer_activation_bytes(
        config, share(torch.float32)
    )
    assert layers_activation_bytes(config, share(torch.float32)) == by_hand
    assert measured(config, torch.float32, 4).bytes == pytest.approx(by_hand, rel=0.01)


@pytest.mark.parametrize("count", [1, 2])
def test_what_stands_beside_it_in_backward(count: int) -> None:
    """The most that is alive while the pieces are computed again: what is kept, and one piece whole."""
    config = replace(GPT2, attention_backend="unfused", recompute_granularity="full", recompute_num_layers=count)
    model, x_SBH = built(config, layers=4), hidden(config, torch.float32)
    peaks: list[int] = []
    with SavedTensors(model) as saved:
        y = model.recompute.run_layers(model.layers.values(), x_SBH)
        for layer in model.layers.values():
            layer.register_full_backward_pre_hook(lambda *_: peaks.append(saved.bytes))
        y.sum().backward()
    one = share(torch.float32)
    expected = layers_activation_bytes(config, one) + recomputed_at_once_bytes(config, one)
    assert max(peaks) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_embedding_and_loss(name: str, dtype: str) -> None:
    config, kind = replace(MODELS[name], embedding_dropout=0.1), DTYPES[dtype]
    model, ids = built(config, kind, layers=0), torch.randint(0, 301, (BATCH, 32))
    with SavedTensors(model) as saved:
        loss = model(ids, labels_BS=ids)
    assert saved.bytes == pytest.approx(end_activation_bytes(config, share(kind)), rel=0.01)
    loss.mean().backward()
    assert saved.bytes == ids.nbytes, "a backward lets everything go but what the caller holds"


@pytest.mark.parametrize("backend", ["fused", "math", "unfused"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BERTS)
def test_a_whole_bert(name: str, dtype: str, backend: str) -> None:
    """Both ends, two layers, and the mask that the layers share."""
    config, kind = replace(BERTS[name], layers=2, attention_backend=backend), DTYPES[dtype]
    model = BertModel(config, GROUPS, layers=range(2), seed=1, dtype=kind)
    ids, types = torch.randint(0, 301, (BATCH, 32)), torch.ones(BATCH, 32, dtype=torch.int64)
    with SavedTensors(model) as saved:
        made = model(ids, types, torch.ones(BATCH, 32), ids)
    expected = layers_activation_bytes(config, share(kind)) + end_activation_bytes(config, share(kind))
    assert made[0].shape == ids.shape and saved.bytes == pytest.approx(expected, rel=0.01)


# ---- the paper's table, arXiv 2205.05198 ----


@given(
    s=st.sampled_from([128, 1024, 4096]),
    h=st.sampled_from([1024, 4096, 12288]),
    b=st.integers(1, 4),
    t=st.sampled_from([1, 2, 8]),
    sp=st.booleans(),
    selective=st.booleans(),
)
def test_the_papers_table_is_the_same_account(s: int, h: int, b: int, t: int, sp: bool, selective: bool) -> None:
    """With dropout, 16-bit activations and probabilities kept. It leaves the norms' statistics out, well below 1%."""
    model = ModelConfig(
        hidden=h, heads=h // 64, seq_length=s, attention_backend="unfused", attention_dropout=0.1, hidden_dropout=0.1,
        recompute_granularity="selective" if selective else "none",
    )  # fmt: skip
    on = Share(samples=b, tp=t, sequence_parallel=sp, element_bytes=2)
    expected = paper_layer_bytes(model, on, "selective" if selective else "none")
    assert layer_activation_bytes(model, on) == pytest.approx(expected, rel=0.01)


def test_the_papers_numbers() -> None:
    """GPT-3 175B and MT-NLG 530B, whose attention takes 70% and 65% of the memory (section 5)."""
    for h, heads, factor in ((12288, 96, 80), (20480, 128, 64)):
        model = ModelConfig(hidden=h, heads=heads, seq_length=2048)
        assert 5 * heads * 2048 / h == factor
        whole, kept = (paper_layer_bytes(model, Share(element_bytes=2), how) for how in ("none", "selective"))
        assert round(1 - kept / whole, 2) == round(factor / (34 + factor), 2)
        assert paper_layer_bytes(model, Share(element_bytes=2), "full") == 2 * 2048 * h


# ---- the measuring itself ----


def test_a_storage_counts_once_and_parameters_do_not() -> None:
    weight = torch.nn.Linear(8, 8, bias=False)
    x = torch.randn(4, 8, requires_grad=True) * 1
    with SavedTensors(weight) as saved:
        y = (weight(x) * weight(x)).sum() + x[:2].exp().sum()
    # x for the weight gradients, both products for each other's gradient, exp's own result
    assert saved.bytes == 4 * (4 * 8 + 2 * 4 * 8 + 2 * 8)
    del x, y
    assert saved.bytes == 0


def test_counting_needs_no_torch() -> None:
    code = "import sys, labkit.plan.activations; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
