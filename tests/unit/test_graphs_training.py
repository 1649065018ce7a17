"""Training by emulated CUDA graphs gives the bits of training without: one rank here, several in tests/parallel."""

from collections import Counter

import pytest
import torch
from graph_training import DROPOUT, FULL, GRAPHS, LAYERS, MICROBATCHES, STEPS, Training, small

from labkit.comm.capturing import is_graph_warmup
from labkit.config import ConfigError, RunConfig, presets
from labkit.graphs import PlanError, check_plan, is_graph_capturing
from labkit.models.blocks import TransformerLayer
from labkit.schedules import Schedule
from labkit.train import pretrain

pytestmark = pytest.mark.usefixtures("one_thread")


def numbers(config: RunConfig) -> dict:
    result = pretrain(config)
    names = ("loss", "grad_norm", "loss_scale", "skipped_steps", "validation_loss", "test_loss")
    return {name: [repr(value) for value in result.series(name)] for name in names}  # so that NaN is NaN


EXPERTS = {"moe.num_experts": 4, "moe.layer_freq": (1, 0), "moe.shared_expert_ffn_hidden": 16, "optim.fp8": "hybrid"}
PADDED = {"moe.capacity_factor": 1.0, "moe.pad_to_capacity": True}
CASES = {
    "gpt": {},
    "validation between replays": {"train.eval_steps": 1, "train.eval_interval": 2},
    "dropout": DROPOUT,
    "rotary positions": {"model.position": "rope", "model.kv_heads": 2, "model.norm": "rmsnorm"},
    "attention alone": {"graph.cuda_graph_modules": ("attn",), **DROPOUT},
    "mlp alone": {"graph.cuda_graph_modules": ("mlp",), **DROPOUT},
    "recomputed core attention": {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)},
    "recomputed mlp": {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
    "no fusion": {"optim.gradient_accumulation_fusion": False},
    "naive data parallelism": {"optim.data_parallel": "naive"},
    "bf16": {"optim.precision": "bf16"},
    "fp8, delayed scales": {"optim.fp8": "hybrid", "train.eval_steps": 1, "train.eval_interval": 1},
    "fp8, current scales": {"optim.fp8": "e4m3", "optim.fp8_recipe": "current"},
    "fp8, blocks": {"optim.fp8": "hybrid", "optim.fp8_recipe": "blockwise"},
    "fp8, full iteration": {**FULL, "optim.fp8": "hybrid", "train.eval_steps": 1, "train.eval_interval": 1},
    "fp8, experts in part": {**EXPERTS, "graph.cuda_graph_modules": ("attn", "moe_router", "moe_preprocess")},
    "fp8, whole experts": {**EXPERTS, **PADDED, "optim.fp8_recipe": "current", "graph.cuda_graph_modules": ("moe",)},
    "fp8, blocks of experts": {**EXPERTS, **PADDED, "optim.fp8_recipe": "blockwise"},
    "fp8, full iteration with experts": {**FULL, **EXPERTS, **PADDED},
    "fp16 with overflows": {"optim.precision": "fp16", "optim.initial_loss_scale": 2.0**24, "optim.hysteresis": 1},
    "sum over tokens": {"optim.calculate_per_token_loss": True},
    "all forwards first": {"schedule.name": "gpipe"},
    "split backwards": {"schedule.name": "zero_bubble_h1", **DROPOUT},
    "no warm-up": {"graph.cuda_graph_warmup_steps": 0},
    "full iteration": {**FULL, "train.eval_steps": 2, "train.eval_interval": 1},
    "full iteration, dropout": {**FULL, **DROPOUT},
    "full iteration, fp16": {**FULL, "optim.precision": "fp16", "optim.loss_scale": 1024.0},
    "full iteration, full recomputation": {**FULL, "recompute_granularity": "full"},
    "full iteration, sum over tokens": {**FULL, "optim.calculate_per_token_loss": True},
}


@pytest.mark.parametrize("name", CASES)
def test_losses_are_bit_equal_to_those_without_graphs(name):
    changes = CASES[name]
    eager = {key: value for key, value in changes.items() if not key.startswith("graph.")}
    assert numbers(small(**GRAPHS | changes)) == numbers(small(**eager))


@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
def test_twenty_steps_of_the_tiny_preset_are_bit_equal(name):
    eager = {key: value for key, value in CASES[name].items() if not key.startswith("graph.")}
    config = presets.tiny()
    assert numbers(config.override(GRAPHS | CASES[name])) == numbers(config.override(eager))


def test_after_the_warm_up_layers_run_by_replays_alone():
    """Two graphs a layer: pp = 1 captures one microbatch, which all use."""
    events = pretrain(small(**GRAPHS)).events
    replays = Counter(event.name for event in events if event.kind == "graph_replay")
    assert len(replays) == 2 * LAYERS
    assert set(replays.values()) == {MICROBATCHES * (STEPS - 1)}


def test_a_counter_in_a_captured_body_counts_warm_up_and_capture_and_nothing_more(monkeypatch):
    calls = Counter()
    plain = TransformerLayer.forward_mlp

    def counting(self, x_SBH):
        calls["capture" if is_graph_capturing() else "warm-up" if is_graph_warmup() else "eager"] += 1
        return plain(self, x_SBH)

    monkeypatch.setattr(TransformerLayer, "forward_mlp", counting)
    pretrain(small(**GRAPHS, **{"train.steps": 21}))
    assert calls["eager"] == LAYERS * MICROBATCHES and calls["capture"] == LAYERS
    # Ten eager runs of a layer ahead of its capture, those of the warm-up step included.
    assert calls["warm-up"] == LAYERS * (10 - MICROBATCHES)


def test_evaluation_is_eager_with_graphs_of_layers_and_replays_with_one_of_the_iteration():
    changes = {"train.eval_steps": 2, "train.eval_interval": 1, "data.split": "90,10,0"}
    events = pretrain(small(**GRAPHS | FULL, **changes)).events
    replays = Counter(event.name for event in events if event.kind == "graph_replay")
    # The first of two batches of the first validation is the warm-up of the second graph.
    assert replays == {"full iteration, training": STEPS - 1, "full iteration, validation": 2 * STEPS - 1}
    layers = pretrain(small(**GRAPHS, **changes)).events
    training = pretrain(small(**GRAPHS)).events
    assert sum(e.kind == "graph_replay" for e in layers) == sum(e.kind == "graph_replay" for e in training)


SAID = {
    "layers": ({}, [(2, 2 * LAYERS)]),
    "attention alone": ({"graph.cuda_graph_modules": ("attn",)}, [(2, 2 * LAYERS)]),
    "iteration": ({**FULL, "train.eval_steps": 2, "train.eval_interval": 2}, [(2, 1), (2, 2)]),
    "never captured": ({"graph.cuda_graph_warmup_steps": STEPS}, []),
    "eager": ({"graph.cuda_graph_impl": "none", "graph.cuda_graph_warmup_steps": 3}, []),
}


@pytest.mark.parametrize("name", SAID)
def test_a_run_says_once_after_a_capture_what_its_graphs_hold(name):
    changes, expected = SAID[name]
    found = pretrain(small(**GRAPHS | changes)).series("graphs")
    assert [(step, held["graphs"][0]) for step, held in found] == expected
    for _, held in found:
        assert all(0 < least == most for least, most in held.values())


# ---- by hand ----


def test_a_plan_that_frees_a_buffer_one_step_early_is_refused_and_corrupts_the_losses():
    config = small(**GRAPHS, **{"schedule.name": "gpipe"})
    early = Training(config)
    helper = early.helper
    helper.create_cudagraphs(early_release=1)
    with pytest.raises(PlanError, match="buffer"):
        check_plan(helper.plan, helper.order)
    right = Training(config)
    right.helper.create_cudagraphs()
    check_plan(right.helper.plan, helper.order)
    eager = Training(small(**{"schedule.name": "gpipe"}))
    wrong, right, eager = early.losses(3), right.losses(3), eager.losses(3)
    assert right == eager
    assert wrong[0] == eager[0], "the forwards of the first step read nothing stale"
    assert wrong[1] != eager[1] and wrong[2] != eager[2]


def test_graphs_that_were_reset_leave_an_eager_run_of_the_same_bits():
    eager, graphs = Training(small()), Training(small(**GRAPHS))
    losses = graphs.losses(3)
    helper = graphs.helper
    pool = helper.pool
    assert pool.live_bytes > 0
    helper.reset()
    assert not helper.graphs_created() and pool.live_bytes == 0
    assert losses + graphs.losses(2) == eager.losses(5)


def test_rows_that_cannot_be_captured_are_refused():
    backwards_turned = Schedule.from_csv("0F0,0F1,0B1,0B0,0F2,0F3,0B2,0B3\n")
    with pytest.raises(ValueError, match=r"forward for microbatches \[0, 1, 2, 3\] and backward for B \[1, 0, 2, 3\]"):
        pretrain(small(**GRAPHS), schedule=backwards_turned)
    engine = {"graph.cuda_graph_impl": "transformer_engine", "schedule.name": "zero_bubble_h1"}
    with pytest.raises(ValueError, match="splits backwards into input and weight gradients"):
        pretrain(small(**engine))


@pytest.mark.parametrize("scope", [(), ("full_iteration",)])
def test_graphs_of_a_gpu_are_refused_on_the_host_before_the_first_step(scope):
    with pytest.raises(ValueError, match="cuda_graph_impl = local: it captures on cuda, but this run is on cpu"):
        Training(small(**{"graph.cuda_graph_impl": "local", "graph.cuda_graph_modules": scope}))


PRECISION = {
    "keeps the loss scale of its capture": {**FULL, "optim.precision": "fp16"},
    "the first step has no history": {"optim.fp8": "e4m3", "graph.cuda_graph_warmup_steps": 0},
}


@pytest.mark.parametrize("reason", PRECISION)
def test_numbers_that_python_keeps_are_refused_in_a_graph(reason):
    with pytest.raises(ConfigError, match=reason):
        small(**GRAPHS | PRECISION[reason]).validate()


def test_what_a_forward_counts_stays_where_it_was():
    """Warm-up and capture run forwards and backwards; nothing of it may show."""
    graphs = Training(small(**GRAPHS))
    before = {name: p.detach().clone() for name, p in graphs.pipeline.chunks[0].named_parameters()}
    state = torch.get_rng_state()
    graphs.helper.create_cudagraphs()
    assert torch.equal(state, torch.get_rng_state())
    for name, p in graphs.pipeline.chunks[0].named_parameters():
        assert torch.equal(p, before[name]) and p.grad is None, name
