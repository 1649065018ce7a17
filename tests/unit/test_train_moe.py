"""Training with experts on one process: scale of the routers' losses, biases, counts, and what is written down."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from labkit.config import MoEConfig, RunConfig, presets
from labkit.models.chunks import build_model_chunk, build_model_chunks
from labkit.moe.router import routers_of
from labkit.parallel import NaiveDataParallel, initialize_model_parallel, single_process_groups
from labkit.parallel.data_parallel.distributed_data_parallel import wrap_model_chunks
from labkit.parallel.parameters.parameter_record import main_grad_of
from labkit.schedules import PipelineRuntime, forward_backward_no_pipelining, one_f_one_b
from labkit.train import pretrain
from labkit.train.forward_step import gpt_forward_step
from labkit.train.not_finite import find, sentence
from labkit.train.pretraining import build_optimizer
from labkit.train.reporting.metrics import scalars
from labkit.train.reporting.router_metrics import router_line

SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "seq_length": 16, "global_batch_size": 4, "layer_freq": [1],
         "moe.ffn_hidden": 32, "num_experts": 4, "steps": 2, "precision": "fp64", "record_events": False}  # fmt: skip
BIASED = {"score_function": "sigmoid", "expert_bias": True, "expert_bias_update_rate": 0.1}


def small(**changes: Any) -> RunConfig:
    return presets.tiny_moe().override(SHAPE | changes)


class Watcher:
    """Keeps copies of what `look` sees when gradients are final, step by step."""

    def __init__(self, look: Any) -> None:
        self.look, self.seen = look, []

    def on_model(self, groups: Any, chunks: Sequence[nn.Module], schedule: Any) -> None:
        """Nothing to see."""

    def on_gradients(self, step: int, chunks: Sequence[nn.Module]) -> None:
        """Look."""
        self.seen.append(self.look(chunks))

    def on_update(self, step: int, chunks: Sequence[nn.Module]) -> None:
        """Nothing to see."""


def watched(config: RunConfig, look: Any) -> list[Any]:
    watcher = Watcher(look)
    pretrain(config, observer=watcher)
    return watcher.seen


# ---- the scale of attached losses ----


def moved(config: RunConfig, directions: dict[str, Tensor], by: float) -> float:
    """Loss and weighted routers' losses of one step, with every router moved by `by` times its direction."""

    def provider(config: RunConfig, groups: Any, **stage: Any) -> nn.Module:
        chunk = build_model_chunk(config, groups, **stage)
        with torch.no_grad():
            for router in routers_of([chunk]):
                router.weight += by * directions[router.name]
        return chunk

    line = pretrain(config, model_provider=provider).metrics[0]
    layers = config.model.layers
    aux, z = config.moe.aux_loss_coeff, config.moe.z_loss_coeff
    return line["loss"] + layers * (aux * line["moe/load_balancing_loss"] + z * line["moe/z_loss"])


@pytest.mark.parametrize(
    "changes",
    [{}, {"calculate_per_token_loss": True}, {"micro_batch_size": 2},
     {"load_balancing": "seq_aux_loss", "micro_batch_size": 2}],
    ids=["mean", "per token", "micro batch 2", "by sequence"],
)  # fmt: skip
def test_gradients_are_those_of_the_loss_and_the_reported_losses_of_routers(changes: dict[str, Any]) -> None:
    """Central differences of what is reported, in a random direction of all routers. The load of an expert does not
    move: so small a step changes no choice."""
    config = small(steps=1, aux_loss_coeff=1.0, z_loss_coeff=0.1, **changes)
    generator = torch.Generator().manual_seed(0)
    directions = {
        f"layers.{layer}.mlp.router": torch.randn(4, 32, generator=generator, dtype=torch.float64) for layer in (0, 1)
    }
    (gradients,) = watched(
        config, lambda chunks: {router.name: main_grad_of(router.weight).clone() for router in routers_of(chunks)}
    )
    slope = sum((gradients[name] * direction).sum().item() for name, direction in directions.items())
    step = 1e-6
    numeric = (moved(config, directions, step) - moved(config, directions, -step)) / (2 * step)
    assert slope == pytest.approx(numeric, rel=1e-6)
    weak = config.override({"aux_loss_coeff": 1e-9, "z_loss_coeff": 1e-9})
    (without,) = watched(weak, lambda chunks: [main_grad_of(router.weight).clone() for router in routers_of(chunks)])
    rest = sum((grad * d).sum().item() for grad, d in zip(without, directions.values(), strict=True))
    assert abs(slope - rest) > 0.1 * abs(slope), "the routers' losses count for something in this direction"


def gradients_of(config: RunConfig, **options: Any) -> dict[str, Tensor]:
    """Gradients of one step of the runtime alone, or of an entry point, over tokens drawn at random."""
    groups, count = single_process_groups(), 3
    chunks = build_model_chunks(config, groups)
    wrapped = NaiveDataParallel(chunks[0], groups.dp_cp, groups.edp, grad_dtype=torch.float64)
    tokens = torch.randint(0, 1024, (count, 1, 17), generator=torch.Generator().manual_seed(1))
    batches = [
        {"tokens_BS": t[:, :-1], "labels_BS": t[:, 1:], "loss_mask_BS": torch.ones(1, 16)} for t in tokens.unbind(0)
    ]
    if "seq_length" in options:
        forward_backward_no_pipelining(
            forward_step_func=gpt_forward_step, data_iterator=iter(batches), model=wrapped, num_microbatches=count,
            groups=groups, **options,
        )  # fmt: skip
    else:
        schedule = one_f_one_b(1, count)
        runtime = PipelineRuntime(schedule, [wrapped], groups, forward_step_func=gpt_forward_step, **options)
        runtime.run(iter(batches))
    return {name: main_grad_of(p).clone() for name, p in wrapped.module.named_parameters()}


def test_a_loss_scale_multiplies_the_routers_losses_as_well() -> None:
    config = small(aux_loss_coeff=1.0)
    plain = gradients_of(config)
    scaled = gradients_of(config, grad_scaler=lambda loss: loss * 8)
    for name, gradient in plain.items():
        assert torch.equal(8 * gradient, scaled[name]), name


def test_a_loss_per_token_needs_the_tokens_of_a_microbatch() -> None:
    with pytest.raises(ValueError, match="give tokens_per_microbatch = micro batch x sequence length"):
        gradients_of(small(), calculate_per_token_loss=True)
    mean = gradients_of(small(aux_loss_coeff=1.0))
    summed = gradients_of(small(aux_loss_coeff=1.0), calculate_per_token_loss=True, tokens_per_microbatch=16)
    for name, gradient in mean.items():
        assert torch.allclose(gradient * 3 * 16, summed[name], rtol=1e-12, atol=1e-14), name
    through = {"seq_length": 16, "micro_batch_size": 1}
    for name, gradient in gradients_of(small(aux_loss_coeff=1.0), calculate_per_token_loss=True, **through).items():
        assert torch.equal(gradient, summed[name]), f"{name} through an entry point"
    dense = replace(small(), moe=MoEConfig())
    assert gradients_of(dense, calculate_per_token_loss=True), "without experts nothing is needed"


# ---- which rank counts what ----

SIZES = st.fixed_dictionaries(
    {"tp": st.sampled_from([1, 2]), "cp": st.sampled_from([1, 2]), "pp": st.sampled_from([1, 2]),
     "dp": st.sampled_from([1, 2]), "etp": st.sampled_from([1, 2]), "ep": st.sampled_from([1, 2, 4])}
).filter(lambda s: s["tp"] * s["cp"] * s["dp"] % (s["etp"] * s["ep"]) == 0)  # fmt: skip


@settings(max_examples=12, deadline=None)
@given(SIZES, st.booleans(), st.booleans(), st.sampled_from([None, 1]))
@example({"tp": 2, "cp": 1, "pp": 1, "dp": 2, "etp": 1, "ep": 2}, True, False, 1)
@example({"tp": 2, "cp": 1, "pp": 1, "dp": 2, "etp": 1, "ep": 2}, False, False, 1)
def test_every_element_counts_once_in_the_norm(
    sizes: dict[str, int], sharded: bool, untied: bool, kv_heads: int | None
) -> None:
    """Over all ranks of the norm's groups: dense elements over tp x pp, those of experts over etp x ep x pp, whatever
    replicas there are and however the optimizer cuts the buffers."""
    layout = {name: size for name, size in sizes.items() if name != "dp"}
    changes = {"sequence_parallel": sizes["tp"] > 1, "distributed_optimizer": sharded, "hidden": 16, **BIASED}
    changes |= {"untie_embeddings_and_output_weights": untied, "shared_expert_ffn_hidden": 16, "kv_heads": kv_heads}
    config = small(**changes, **layout)
    world = math.prod(sizes[name] for name in ("tp", "cp", "pp", "dp"))
    config.validate(world)
    counted, looked_at = 0, set()
    for rank in range(world):
        groups = initialize_model_parallel(config.parallel, rank=rank, world_size=world)
        chunks = wrap_model_chunks(build_model_chunks(config, groups), groups, config.optim)
        optimizer = build_optimizer(chunks, config.optim, layout=groups)
        counts, others = optimizer.gradient_pieces(), optimizer.uncounted_pieces()
        counted += sum(piece.numel() for piece in counts)
        if not sharded:
            held = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
            assert sum(piece.numel() for piece in [*counts, *others]) == held
        if not sharded:
            looked_at |= {name for group in optimizer.groups for name in group.names}
    (whole,) = build_model_chunks(small(**changes), single_process_groups())
    assert counted == sum(parameter.numel() for parameter in whole.parameters())
    assert sharded or {name.split(" (")[0] for name in looked_at} == {p.full_name for p in whole.parameters()}  # type: ignore[attr-defined]


# ---- expert bias ----

MICROBATCHES, TOKENS, TOP_K = 4, 16, 2


def loads(chunks: Sequence[nn.Module]) -> list[list[int]]:
    counts = [router.local_tokens_per_expert for router in routers_of(chunks)]
    return [count.tolist() for count in counts if count is not None]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"recompute_granularity": "full"},
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        {"eval_interval": 1, "eval_steps": 1},
    ],
    ids=["plain", "full recompute", "moe recomputed", "evaluated"],
)
def test_each_choice_of_a_step_is_counted_once(changes: dict[str, Any]) -> None:
    for step in watched(small(steps=3, **BIASED, **changes), loads):
        assert [sum(layer) for layer in step] == [MICROBATCHES * TOKENS * TOP_K] * 2


def test_recomputation_and_evaluation_change_no_load() -> None:
    plain = pretrain(small(steps=3, **BIASED))
    for changes in ({"recompute_granularity": "full"}, {"eval_interval": 1, "eval_steps": 1}):
        again = pretrain(small(steps=3, **BIASED, **changes))
        for name in ("moe/layers.0/tokens_per_expert", "moe/layers.1/expert_bias", "moe/load_balancing_loss", "loss"):
            assert again.series(name) == plain.series(name), (changes, name)


def test_a_bias_moves_once_a_step_against_the_load() -> None:
    """The paper's rule, from the reported counts: up where fewer than the mean came, down where more (2408.15664)."""
    result = pretrain(small(steps=4, **BIASED))
    for layer in (0, 1):
        before, moves = [0.0] * 4, 0
        for line in result.metrics:
            load, bias = line[f"moe/layers.{layer}/tokens_per_expert"], line[f"moe/layers.{layer}/expert_bias"]
            mean = sum(load) / len(load)
            signs = [(n < mean) - (n > mean) for n in load]
            assert bias == pytest.approx([b + 0.1 * sign for b, sign in zip(before, signs)], abs=1e-6)
            assert sum(load) == MICROBATCHES * TOKENS * TOP_K
            before, moves = bias, moves + sum(map(abs, signs))
        assert moves > 4, "experts got other numbers than the mean"


def test_a_skipped_step_moves_no_bias_and_forgets_its_load() -> None:
    """fp16 with a loss scale that overflows in every step."""
    changes = {"precision": "fp16", "loss_scale": 2.0**60, "steps": 3, "on_not_finite": "skip"}
    result = pretrain(small(**BIASED, **changes))
    assert result.skipped_steps == 3
    assert all(not any(line["moe/layers.0/expert_bias"]) for line in result.metrics)
    for step in watched(small(**BIASED, **changes), loads):
        assert [sum(layer) for layer in step] == [MICROBATCHES * TOKENS * TOP_K] * 2


# ---- what is written down ----


def test_a_line_covers_the_steps_since_the_line_before() -> None:
    every, third = pretrain(small(steps=6, lr=0.0)), pretrain(small(steps=6, lr=0.0, log_interval=3))
    name = "moe/layers.1/tokens_per_expert"
    one, three = (result.series(name) for result in (every, third))
    assert [step for step, _ in three] == [3, 6]
    assert three[1][1] == [sum(counts) for counts in zip(*(load for _, load in one[3:]), strict=True)]
    losses = [loss for _, loss in every.series("moe/load_balancing_loss")]
    assert third.series("moe/load_balancing_loss")[1][1] == pytest.approx(sum(losses[3:]) / 3, rel=1e-12)


def test_what_is_not_computed_is_not_named() -> None:
    line = pretrain(small(steps=1, aux_loss_coeff=0.0, z_loss_coeff=0.0)).metrics[0]
    assert {name for name in line if name.startswith("moe/") and "layers" not in name} == {
        "moe/max_over_mean", "moe/load_entropy"}  # fmt: skip
    assert not any("moe" in name for name in pretrain(presets.tiny().override({"steps": 1})).metrics[0])
    dropping = pretrain(small(steps=1, capacity_factor=1.0)).metrics[0]
    counts = [dropping[f"moe/layers.{layer}/tokens_per_expert"] for layer in (0, 1)]
    assert [sum(load) for load in counts] == [MICROBATCHES * TOKENS * TOP_K] * 2, "before any capacity"
    assert 0 < dropping["moe/dropped_share"] < 0.5
    shares = [dropping[f"moe/layers.{layer}/dropped_share"] for layer in (0, 1)]
    assert dropping["moe/dropped_share"] == pytest.approx(sum(shares) / 2)


def test_scalars_are_the_numbers_of_metrics_one_by_one(tmp_path: Path) -> None:
    pretrain(small(steps=2, eval_steps=1, output_dir=str(tmp_path), **BIASED))
    lines, numbers = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "scalars.jsonl")
    )
    assert all(set(number) == {"step", "tag", "value"} for number in numbers)
    found = {(number["step"], number["tag"]): number["value"] for number in numbers}
    assert len(found) == len(numbers)
    for line in lines[:2]:
        assert found[line["step"], "loss"] == line["loss"]
        assert found[line["step"], "timers/step/max"] == line["timers"]["step"][1]
        for name in ("tokens_per_expert", "expert_bias"):
            values = line[f"moe/layers.1/{name}"]
            assert [found[line["step"], f"moe/layers.1/{name}/{expert}"] for expert in range(4)] == values
    assert found[2, "test_loss"] == lines[-1]["test_loss"]


def test_scalars_of_a_line() -> None:
    line = {"step": 7, "loss": math.inf, "skipped_because": "x", "timers": {"step": (1.0, 2.0)}, "moe/load": [3, 4]}
    assert [tuple(number.values()) for number in scalars(line)] == [
        (7, "loss", math.inf), (7, "timers/step/min", 1.0), (7, "timers/step/max", 2.0),
        (7, "moe/load/0", 3), (7, "moe/load/1", 4),
    ]  # fmt: skip


def test_layers_of_all_stages_make_one_line_in_their_order() -> None:
    def layer(worst: float) -> dict[str, float]:
        return {"max_over_mean": worst, "load_entropy": 1 / worst, "z_loss": worst}

    ranks = [{"layers.10": layer(4.0), "layers.2": layer(2.0)}, {}, {"layers.3": layer(3.0)}]
    line = router_line(ranks)
    assert [name for name in line if name.endswith("z_loss")] == [
        "moe/z_loss", "moe/layers.2/z_loss", "moe/layers.3/z_loss", "moe/layers.10/z_loss"]  # fmt: skip
    assert (line["moe/z_loss"], line["moe/max_over_mean"], line["moe/load_entropy"]) == (3.0, 4.0, 0.25)
    assert router_line([{}, {}]) == {}


def test_experts_that_are_not_finite_are_named_by_number() -> None:
    groups = single_process_groups()
    (chunk,) = build_model_chunks(small(), groups)
    wrapped = NaiveDataParallel(chunk, groups.dp_cp, groups.edp)
    weight = dict(chunk.named_parameters())["layers.1.mlp.experts.fc2.weight"]
    main_grad_of(weight)[2, 0, 0] = math.nan
    found = find([], [wrapped], [0], groups)
    assert sentence(found).startswith("the gradient of layers.1.mlp.experts.fc2.weight of expert 2 is not finite")
    main_grad_of(weight)[:, 0, 0] = math.nan
    assert " of experts 0, 1, 2 and 1 more is not finite" in sentence(find([], [wrapped], [0], groups))
