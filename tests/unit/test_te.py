"""Transformer Engine's modules on our parameters, held against the signatures of the engine's own source."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import te_stub
import torch
from torch import Tensor

from labkit.cli import main
from labkit.config import ConfigError, GraphConfig, ModelConfig, RunConfig, presets
from labkit.fp8 import Float8Recipe
from labkit.graphs import CudaGraphHelper
from labkit.models import GPTModel
from labkit.parallel import ColumnParallelLinear, RowParallelLinear, single_process_groups
from labkit.parallel.layers import LinearOptions
from labkit.parallel.parameters.parameter_record import record_of
from labkit.schedules import one_f_one_b, zero_bubble_h1
from labkit.te import linear
from labkit.train import pretrain
from labkit.train.pretraining import layer_spec_with
from labkit.train.run_schedule import check_schedule

GPT2 = ModelConfig(layers=2, hidden=32, heads=4, vocab_size=64, make_vocab_size_divisible_by=16, seq_length=16)
LLAMA = replace(
    GPT2, kv_heads=2, position="rope", norm="rmsnorm", activation="swiglu", bias=False,
    untie_embeddings_and_output_weights=True,
)  # fmt: skip
BOTH = pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])


@pytest.fixture
def engine() -> Iterator[te_stub.Record]:
    with te_stub.installed() as record:
        yield record


def model(
    config: ModelConfig, impl: str = "transformer_engine", float8: Float8Recipe | None = None, **more: Any
) -> GPTModel:
    given: dict[str, Any] = {"layers": range(config.layers), "seed": 1, "dtype": torch.float64} | more
    config = replace(config, transformer_impl=impl)
    return GPTModel(config, single_process_groups(), spec=layer_spec_with(config, float8), **given)


def tokens(config: ModelConfig) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, config.vocab_size, (3, 17), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def results(made: GPTModel) -> dict[str, Tensor]:
    """Loss and gradients."""
    made.zero_grad()
    ids, labels = tokens(made.config)
    loss = made(ids, labels_BS=labels).mean()
    loss.backward()
    gradients = {name: p.grad for name, p in made.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    return {"loss": loss.detach()} | gradients  # type: ignore[return-value]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


@BOTH
def test_a_state_dict_moves_between_the_implementations(engine: te_stub.Record, config: ModelConfig) -> None:
    ours, theirs = model(config, "local"), model(config)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    assert_same(theirs.state_dict(), ours.state_dict())  # the same seed gives the same weights
    attributes = ("partition_dim", "partition_stride", "sequence_parallel", "tensor_model_parallel")
    for (name, one), (_, two) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert all(getattr(record_of(one), a) == getattr(record_of(two), a) for a in attributes), name
        assert one.full_name == two.full_name
    other = model(config, "local", seed=2)
    theirs.load_state_dict(other.state_dict())
    assert_same(results(theirs), results(other))
    ours.load_state_dict(theirs.state_dict())
    assert_same(results(ours), results(other))


@BOTH
def test_the_engine_is_told_what_the_model_is(engine: te_stub.Record, config: ModelConfig) -> None:
    model(config, gradient_accumulation_fusion=True, dtype=torch.bfloat16)
    kv = config.kv_heads or config.heads
    columns = (config.heads + 2 * kv) * 8
    inner = 2 * 4 * 32 if config.activation == "swiglu" else 4 * 32
    wanted: dict[str, Any] = {
        "bias": config.bias, "tp_group": None, "tp_size": 1, "sequence_parallel": False, "device": "meta",
        "fuse_wgrad_accumulation": True, "params_dtype": torch.bfloat16, "delay_wgrad_compute": False,
    }  # fmt: skip
    norm = {"normalization": "RMSNorm" if config.norm == "rmsnorm" else "LayerNorm", "eps": config.norm_eps}
    first = engine.of("LayerNormLinear")
    sizes = {"attention.qkv": columns, "mlp.fc1": inner}
    assert [(c["in_features"], c["out_features"], c["name"]) for c in first] == [
        (32, size, f"layers.{index}.{name}") for index in range(2) for name, size in sizes.items()
    ]
    assert all(call.items() >= (wanted | norm | {"parallel_mode": "column"}).items() for call in first)
    second = engine.of("Linear")
    assert [(c["in_features"], c["out_features"]) for c in second] == [(32, 32), (128, 32)] * 2
    assert all(call.items() >= (wanted | {"parallel_mode": "row"}).items() for call in second)
    attention = {"num_attention_heads": 4, "kv_channels": 8, "num_gqa_groups": kv, "cp_group": None}
    third = engine.of("DotProductAttention")
    assert len(third) == 2 and all(call.items() >= attention.items() for call in third)


def test_a_parameter_that_moves_or_changes_is_the_engines_too(engine: te_stub.Record) -> None:
    made = model(GPT2)
    qkv = made.layers["0"].attention.qkv
    (layer,) = qkv.engine_layer
    made.double().to("cpu")
    made.layers["0"].attention.norm.weight.data.fill_(3.0)
    assert layer.weight is qkv.weight and layer.layer_norm_weight is made.layers["0"].attention.norm.weight
    assert not any("engine" in name for name, _ in made.named_modules())


def test_attention_drops_in_training_only_and_from_the_state_of_its_rank(engine: te_stub.Record) -> None:
    config = replace(GPT2, attention_dropout=0.5)
    made = model(config)
    ids, labels = tokens(config)
    with torch.no_grad():
        states = made.rng.get_states()  # type: ignore[union-attr]
        dropped = [made(ids, labels_BS=labels) for _ in range(2)]
        made.rng.set_states(states)  # type: ignore[union-attr]
        again = made(ids, labels_BS=labels)
        made.eval()
        whole = [made(ids, labels_BS=labels) for _ in range(2)]
        expected = model(GPT2)(ids, labels_BS=labels)
    assert torch.equal(again, dropped[0]) and not torch.equal(dropped[0], dropped[1])
    assert torch.equal(whole[0], whole[1]) and torch.equal(whole[0], expected)


# ---- fp8 ----

RECIPES = {
    "delayed": ("DelayedScaling", {"margin": 2, "amax_history_len": 7, "amax_compute_algo": "most_recent"}),
    "current": ("Float8CurrentScaling", {}),
    "blockwise": ("Float8BlockScaling", {}),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("hybrid", [True, False])
def test_every_recipe_is_the_engines(engine: te_stub.Record, recipe: str, hybrid: bool) -> None:
    made = model(GPT2, float8=Float8Recipe(recipe, hybrid, 7, "most_recent", 2))
    results(made)
    name, wanted = RECIPES[recipe]
    [call] = engine.of(name)
    assert call["fp8_format"] is (te_stub.Format.HYBRID if hybrid else te_stub.Format.E4M3)
    assert call.items() >= wanted.items()
    if recipe == "delayed":
        assert call["reduce_amax"] is False, "one rank agrees with nobody; without a group the engine asks the world"
    [region] = engine.of("autocast")
    assert region["enabled"] is True and type(region["recipe"]).__name__ == name
    forwards = [c for c in engine.calls if c.method == "forward"]
    assert len(forwards) == 2 * 5 and all(c.in_fp8 for c in forwards)


def test_a_weight_is_cast_with_the_first_microbatch_of_a_step(engine: te_stub.Record) -> None:
    made = model(GPT2, float8=Float8Recipe("current"))
    for _ in range(2):
        for _ in range(3):
            results(made)
        made.precision.end_step()
    found = [c["is_first_microbatch"] for c in engine.of("Linear", "forward")]
    assert found == ([True] * 4 + [False] * 8) * 2, "of four layers and three microbatches"
    without = model(GPT2)
    results(without)
    assert engine.of("Linear", "forward")[-1]["is_first_microbatch"] is None


@pytest.mark.parametrize("float8", [None, Float8Recipe("delayed")])
def test_recomputation_is_the_engines_where_it_casts(engine: te_stub.Record, float8: Float8Recipe | None) -> None:
    config = replace(GPT2, recompute_granularity="full", recompute_num_layers=1)
    made = model(config, float8=float8)
    found = results(made)
    assert_same(found, results(model(GPT2)))
    assert len(engine.of("checkpoint", "__call__")) == (2 if float8 else 0)
    first_pass_and_again = [c for c in engine.calls if c.method == "forward" and c.name == "Linear"][:8]
    assert [c.in_fp8 for c in first_pass_and_again] == [float8 is not None] * 8


def test_graphs_are_told_of_the_engines_fp8_and_none_of_ours_may_capture_it(engine, monkeypatch) -> None:
    def helper(impl: str) -> CudaGraphHelper:
        graph = GraphConfig(cuda_graph_impl=impl)
        chunk = model(GPT2, float8=Float8Recipe("delayed"))
        return CudaGraphHelper([chunk], graph, GPT2.seq_length, 1, schedule=one_f_one_b(1, 4))

    asked: dict[str, Any] = {}
    monkeypatch.setattr("labkit.graphs.cuda_graph_helper.choose_impl", lambda *_: None)
    monkeypatch.setattr(
        "labkit.graphs.cuda_graph_helper.make_graphed_callables",
        lambda *_, **more: asked.update(more) or [lambda x: x] * 2,
    )
    made = helper("transformer_engine")
    made.create_cudagraphs()
    options = asked["engine_options"]
    assert options["enabled"] and options["cache_quantized_params"] and "amax_reduction_group" in options
    assert options["recipe"] is made.chunks[0].precision.recipe  # type: ignore[union-attr]
    assert asked["plan"] is None and asked["order"] == [1, -1] and asked["reuse_buffers"]
    for impl in ("local", "emulated"):
        with pytest.raises(ValueError, match="does not know the fp8 scales of Transformer Engine's"):
            helper(impl)


# ---- training, refusals ----


def training(**more: Any) -> RunConfig:
    small = {"model.layers": 2, "model.hidden": 32, "model.seq_length": 16, "train.global_batch_size": 4}
    return presets.tiny().override(small | {"train.steps": 3, "optim.lr": 1e-2} | more)


def test_training_on_the_engine_follows_training_on_our_layers(engine: te_stub.Record) -> None:
    ours = pretrain(training()).losses
    theirs = pretrain(training(**{"model.transformer_impl": "transformer_engine"})).losses
    assert theirs == pytest.approx(ours, rel=1e-5) and theirs[-1] < theirs[0]
    layers = engine.of("Linear") + engine.of("LayerNormLinear")
    assert len(layers) == 2 * 4 and all(call["fuse_wgrad_accumulation"] for call in layers)
    cached = pretrain(
        training(**{"model.transformer_impl": "transformer_engine", "optim.fp8": "hybrid", "optim.precision": "bf16"})
    )
    assert len(cached.losses) == 3 and cached.losses[-1] < cached.losses[0]


def test_a_resumed_run_says_that_the_engines_fp8_history_starts_anew(
    engine: te_stub.Record, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = "Transformer Engine does not hand out its fp8 history, so the history starts anew"
    for steps, (impl, fp8) in enumerate(
        [("transformer_engine", "none")] * 2 + [("transformer_engine", "hybrid"), ("local", "hybrid")], start=1
    ):
        saved = {"checkpoint.dir": str(tmp_path), "train.steps": steps, "optim.fp8": fp8, "optim.precision": "bf16"}
        assert pretrain(training(**{"model.transformer_impl": impl, **saved})).resumed_after == steps - 1
        assert (said in capfd.readouterr().err) == (steps == 3)


def test_shared_options_are_options_of_both_layers() -> None:
    """The engine's layers, MLPs and `Build` pass these on; the layers say what they mean and their defaults."""
    for layer in (ColumnParallelLinear, RowParallelLinear):
        assert LinearOptions.__annotations__.keys() <= inspect.signature(layer).parameters.keys()


def test_without_the_engine_one_sentence_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match=r"Transformer Engine is not installed, and .*; or set it to local") as raised:
        model(GPT2)
    assert "\n" not in str(raised.value)


def test_the_command_line_says_so_before_it_starts_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--preset", "tiny", "--nproc", "2", "--model.transformer_impl", "transformer_engine"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "Transformer Engine is not installed, and" in err and "pip install" in err


def test_the_stub_refuses_what_the_engine_would(engine: te_stub.Record) -> None:
    with pytest.raises(TypeError, match="in_feature"):
        linear.engine().Linear(4, 4, in_feature=3)
    with pytest.raises(TypeError, match="missing a required argument"):
        linear.engine().LayerNormLinear(4)
    with pytest.raises(TypeError, match="rng"):
        linear.engine().checkpoint(print, rng=None)


def test_what_the_engine_cannot_do_is_refused(engine: te_stub.Record) -> None:
    chosen = {"model.transformer_impl": "transformer_engine"}
    norms = {"model.recompute_granularity": "selective", "model.recompute_modules": ("layernorm",)}
    with pytest.raises(ConfigError, match=r"model\.recompute_modules"):
        training(**chosen, **norms).validate(1)
    with pytest.raises(ValueError, match="chooses its kernels itself"):
        model(replace(GPT2, attention_backend="unfused"))
    config = training(**chosen, **{"parallel.pp": 2, "schedule.name": "zero_bubble_h1"})
    with pytest.raises(ValueError, match="puts weight gradients into actions of their own"):
        check_schedule(zero_bubble_h1(2, config.num_microbatches(2)), config, 2)
