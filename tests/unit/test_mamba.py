"""Mamba models on one process: the scan against its definition, first values, graphs, training, refusals."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from graph_training import FULL, GRAPHS
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.config import ModelConfig, RunConfig, presets
from labkit.evaluate import CheckpointModel, generate
from labkit.models.gpt import GPTModel
from labkit.models.mamba.mamba_model import MambaModel
from labkit.models.mamba.selective_scan import recurrence, selective_scan
from labkit.parallel import single_process_groups
from labkit.train import pretrain
from labkit.train.checkpoint.manifest import Manifest
from labkit.train.checkpoint.resume import model_differences

GROUPS = single_process_groups()
SHAPE = {"model.hidden": 32, "model.heads": 4, "model.seq_length": 16, "train.global_batch_size": 4}
HYBRID = {"model.layers": 4, "model.hybrid_override_pattern": "MM*-"}
SMALL = {**SHAPE, **HYBRID, "train.steps": 4}


def small(**changes: Any) -> RunConfig:
    return presets.mamba_tiny().override(SMALL).override(changes)


# ---- the scan ----


def test_the_page_of_the_scan_counts_right() -> None:
    ones = torch.ones(1, 1, 4, 1, dtype=torch.float64)
    x = torch.tensor([8.0, 0.0, 4.0, 0.0], dtype=torch.float64).view(1, 1, 1, 4, 1)
    halves, nothing = torch.full((1, 1), 0.5, dtype=torch.float64).log(), torch.zeros(1, 1, dtype=torch.float64)
    for made in (
        recurrence(x, ones.view(1, 1, 1, 4), halves, ones, ones, nothing),
        selective_scan(x, ones.view(1, 1, 1, 4), halves, ones, ones, nothing, chunk=2),
    ):
        assert made.flatten().tolist() == pytest.approx([8, 4, 6, 3])


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(1, 13),
    chunk=st.integers(1, 15),
    sizes=st.tuples(*[st.integers(1, 3)] * 5),
    seed=st.integers(0, 1000),
)
def test_chunks_of_any_size_give_the_recurrence(length: int, chunk: int, sizes: tuple[int, ...], seed: int) -> None:
    batch, groups, heads, width, state = sizes
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    inputs = [
        draw(batch, groups, heads, length, width),
        F.softplus(draw(batch, groups, heads, length)),
        -draw(groups, heads).exp(),
        draw(batch, groups, length, state),
        draw(batch, groups, length, state),
        draw(groups, heads),
    ]
    for x in inputs:
        x.requires_grad_()
    expected, found = recurrence(*inputs), selective_scan(*inputs, chunk=chunk)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = draw(*expected.shape)
    theirs, ours = (torch.autograd.grad((y * weights).sum(), inputs) for y in (expected, found))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def test_long_decays_leave_no_nan() -> None:
    """Steps of 1,000 forget all: exp(-1000) is 0, and so is its gradient."""
    x = torch.randn(1, 1, 1, 300, 2, requires_grad=True)
    dt = torch.full((1, 1, 1, 300), 1000.0, requires_grad=True)
    ones = torch.ones(1, 1, 300, 1)
    y = selective_scan(x, dt, -torch.ones(1, 1), ones, ones, torch.zeros(1, 1))
    torch.testing.assert_close(y, 1000 * x)
    y.sum().backward()
    assert x.grad is not None and dt.grad is not None
    assert torch.isfinite(x.grad).all() and torch.isfinite(dt.grad).all()


# ---- the model ----


def test_first_values_are_spread_as_megatrons() -> None:
    config = replace(small().model, mamba_num_heads=512, mamba_head_dim=1, layers=1, hybrid_override_pattern=None)
    mixer = MambaModel(config, GROUPS, layers=range(1), seed=1).layers["0"].mamba
    rates, steps = mixer.A_log.exp(), F.softplus(mixer.dt_bias)
    assert 1 <= rates.min() < 1.2 and 15.8 < rates.max() <= 16 and abs(rates.mean() - 8.5) < 0.6
    assert 0.99e-3 <= steps.min() < 1.05e-3 and 0.095 < steps.max() <= 0.101 and abs(steps.log10().mean() + 2) < 0.08
    assert (mixer.D == 1).all()
    channels = len(mixer.conv.weight)
    theirs = torch.nn.Conv1d(channels, channels, config.mamba_conv_width, groups=channels)
    assert mixer.conv.weight.std().item() == pytest.approx(theirs.weight.std().item(), rel=0.1)
    assert mixer.in_proj.weight.std().item() == pytest.approx(config.init_std, rel=0.1)
    assert mixer.out_proj.weight.std().item() == pytest.approx(config.init_std / 2**0.5, rel=0.1)


def test_a_position_sees_no_later_one() -> None:
    model = MambaModel(small().model, GROUPS, layers=range(4), seed=1, dtype=torch.float64)
    tokens = torch.randint(0, 99, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = 100
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:9], after[:9]) and not torch.allclose(before[9:], after[9:])


def losses(config: RunConfig) -> list[float]:
    return pretrain(config).losses


def test_it_learns_in_every_precision() -> None:
    for changes in ({}, {"optim.precision": "bf16"}, {"optim.precision": "fp16"}, {"model.hidden_dropout": 0.1}):
        found = losses(small(**{"train.steps": 8, "optim.lr": 1e-2, **changes}))
        assert np.isfinite(found).all() and found[-1] < found[0] - 0.2


SCOPES = {
    "whole layers": {},
    "mamba": {"graph.cuda_graph_modules": ("mamba",)},
    "attention and mlp": {"graph.cuda_graph_modules": ("attn", "mlp")},
    "full iteration": FULL,
    "full iteration, recomputed": {**FULL, "recompute_granularity": "full"},
    "rotary positions, dropout": {"model.position": "rope", "model.hidden_dropout": 0.1},
}


@pytest.mark.parametrize("name", SCOPES)
def test_graphs_give_the_bits_of_eager_layers(name: str) -> None:
    changes = SCOPES[name]
    eager = {key: value for key, value in changes.items() if not key.startswith("graph.")}
    assert losses(small(**GRAPHS | changes)) == losses(small(**eager))


def test_the_scope_mamba_captures_the_mamba_layers_alone() -> None:
    events = pretrain(small(**GRAPHS, **{"graph.cuda_graph_modules": ("mamba",)})).events
    replays = Counter(event.name for event in events if event.kind == "graph_replay")
    assert len(replays) == 2 * 2  # forward and backward of two of the four layers
    assert set(replays.values()) == {4 * 3}  # microbatches, steps behind the warm-up


# ---- refusals ----


def test_a_checkpoint_is_scored_and_does_not_generate(tmp_path: Path) -> None:
    pretrain(small(**{"train.steps": 1, "checkpoint.dir": str(tmp_path)}))
    model = CheckpointModel(tmp_path)
    tokens = torch.arange(16)[None]
    assert model.losses(tokens, tokens).mean() == pytest.approx(model.chunk(tokens, None, tokens).mean().item())
    with pytest.raises(ValueError, match=r"generates with a cache of keys and values, .* this is a mamba"):
        generate(model, [[1, 2]], max_new_tokens=1)


REFUSED: dict[str, dict[str, Any]] = {
    "parallel.cp = 2": {"cp": 2},
    "moe.num_experts = 4": {"num_experts": 4},
    "optim.fp8 = 'hybrid'": {"optim.fp8": "hybrid"},
    "model.transformer_impl = 'transformer_engine'": {"transformer_impl": "transformer_engine"},
    "graph.cuda_graph_impl = 'transformer_engine'": {"cuda_graph_impl": "transformer_engine"},
    "model.recompute_granularity = 'selective'": {"recompute_granularity": "selective"},
    "model.hybrid_override_pattern = 'MMEE'": {"hybrid_override_pattern": "MMEE"},
    "model.hybrid_override_pattern = 'MM*'": {"hybrid_override_pattern": "MM*"},
    "model.hybrid_override_pattern = '*-*-'": {"hybrid_override_pattern": "*-*-"},
    "model.mamba_head_dim = 24": {"mamba_head_dim": 24},
    "model.mamba_num_groups = 3": {"mamba_num_groups": 3},
    "model.mamba_num_groups = 1": {"mamba_num_groups": 1, "tp": 2},
    "parallel.split_rank = 1": {"split_rank": 1, "pp": 2},
    "model.position = 'relative': only a T5 has it; choose learned, or none for a Mamba": {"position": "relative"},
}


@pytest.mark.parametrize("start", REFUSED)
def test_what_a_mamba_model_does_not_have_is_refused_by_name(start: str) -> None:
    found = small(**REFUSED[start]).problems()
    assert len(found) == 1 and found[0].startswith(start), found


def test_a_resume_knows_two_spellings_of_one_model() -> None:
    """The defaults of layers and heads, spelled out, are the same model."""
    short = small(**{"model.hybrid_override_pattern": None})
    long = short.override({"hybrid_override_pattern": "MMMM", "mamba_num_heads": short.model.mamba_heads})
    for saved, now in ((short, long), (long, short)):
        assert model_differences(Manifest(1, {}, {}, {}, saved.to_dict(), 1, {}), now) == []
    (said,) = model_differences(Manifest(1, {}, {}, {}, short.to_dict(), 1, {}), small())
    assert said.startswith("model.hybrid_override_pattern = 'MM*-': the checkpoint of step 1 has 'MMMM'")


def test_options_of_a_mamba_model_are_refused_for_a_gpt() -> None:
    for field, value in (("model.hybrid_override_pattern", "M" * 8), ("model.mamba_state_dim", 16)):
        (found,) = presets.tiny().override({field: value}).problems()
        assert found.startswith(field) and "has no effect with model.family = gpt" in found
    (found,) = presets.tiny().override({"model.position": "none"}).problems()
    assert found.startswith("model.position = 'none'")
    with pytest.raises(ValueError, match="GPTModel has no family 'mamba'"):
        GPTModel(small().model, GROUPS, layers=range(2), seed=1)
    uneven = ModelConfig(family="mamba", position="none", mamba_num_heads=6, mamba_num_groups=4)
    with pytest.raises(ValueError, match="tp 1 must divide groups 4, which must divide heads 6"):
        MambaModel(uneven, GROUPS, layers=range(1), seed=1)
