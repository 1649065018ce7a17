"""Parts of the GPU benchmark: fp8 beside bf16 (row G3), types of a whole step, recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gpu_peers import DEVICE, Row, Side, beside, held
from gpu_plain import LAYER_TOLERANCE, our_layers, random_pair, stack_side
from gpu_profile import work_facts
from gpu_steps import GPT2, PLAIN, attention_backend, layer_flops, our_step, rates, timed
from harness import Comparison

from labkit import plan
from labkit.config import ModelConfig, OptimConfig
from labkit.fp8 import Float8Recipe
from labkit.launch.transformer_engine import why_no_transformer_engine
from labkit.models.recomputation import Recomputation
from labkit.parallel import single_process_groups
from labkit.plan.activations import Share, layers_activation_bytes
from labkit.train.pretraining import layer_spec_with

SIZES = ((4096, 8), (1024, 8))
"""Hidden size and samples: fp8 should win at the first (aim 1.25) and may lose at the second."""
FLOAT8_TOLERANCE = 0.2
"""Of outputs and gradients in bf16 from those in fp8, whose numbers have three or four significant bits."""
RECOMPUTED = ModelConfig(layers=8, hidden=2048, heads=16, seq_length=2048, **PLAIN)
TYPES: dict[str, dict[str, Any]] = {
    "labkit, bf16": {"precision": "bf16"},
    "labkit, fp16": {"precision": "fp16"},
    "labkit, fp8 delayed": {"precision": "bf16", "fp8": "hybrid"},
    "labkit, fp32": {"precision": "fp32"},
}
RECOMPUTATIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "selective, layernorm": {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
    "selective, mlp": {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
    "full": {"recompute_granularity": "full"},
}


def float8_side(config: ModelConfig, batch: int, recipe: str | None, device: torch.device) -> Side:
    """One layer in bf16, or in fp8 by a recipe. Each step of it ends a training step: the next one casts the weights
    anew, and the recipe `delayed` moves its scales on."""
    spec = layer_spec_with(config, None if recipe is None else Float8Recipe(recipe))
    precision = spec.precision(single_process_groups(device=device), device)
    [layer] = our_layers(config, device, torch.bfloat16, spec=spec, precision=precision)

    def run(x: torch.Tensor) -> torch.Tensor:
        with precision.region():
            return layer(x)

    x, grad = random_pair(config, batch, device, torch.bfloat16)
    return stack_side(run, layer.mlp, x, grad, [layer], after=precision.end_step)


def fp8_layer(
    sizes: tuple[tuple[int, int], ...] = SIZES,
    seq_length: int = 2048,
    head: int = 128,
    *,
    device: torch.device = DEVICE,
) -> Iterator[Comparison | Row]:
    """G3: one layer in fp8 and in bf16, by our layers (`torch._scaled_mm`) and, where it is, by Transformer Engine."""
    ways = {"fp8 delayed": "delayed", "fp8 current": "current", "bf16": None}
    makers = {"labkit": "local"}
    if (missing := why_no_transformer_engine()) is None:
        makers["Transformer Engine"] = "transformer_engine"
    else:
        yield {"case": "G3: layer by Transformer Engine", "could_not_run": missing}
    optims = {
        f"{maker}, {way}": OptimConfig(precision="bf16", fp8="hybrid", fp8_recipe=recipe)
        for maker in makers
        for way, recipe in ways.items()
        if recipe
    }
    for hidden, batch in sizes:
        config = ModelConfig(layers=1, hidden=hidden, heads=hidden // head, seq_length=seq_length, **PLAIN)
        builds = {
            f"{maker}, {way}": partial(float8_side, replace(config, transformer_impl=impl), batch, recipe, device)
            for maker, impl in makers.items()
            for way, recipe in ways.items()
        }
        case = f"G3: layer h{hidden} s{seq_length} b{batch} in fp8, forward and backward"
        yield from beside(
            case, builds, device=device, tolerance=FLOAT8_TOLERANCE, flops=layer_flops(config, batch), optims=optims,
            describe=lambda side, seconds: work_facts(side.step, seconds, device),
            facts={"attention_backend": attention_backend(config, batch, device, torch.bfloat16)},
        )  # fmt: skip


def precisions(
    model: ModelConfig = GPT2,
    micro_batch: int = 16,
    types: tuple[str, ...] = tuple(TYPES),
    *,
    device: torch.device = DEVICE,
) -> Iterator[Comparison]:
    """A whole training step in each type, and the loss after the timed steps. fp16 skips the update of a step whose
    gradients overflow: the number of such steps is told."""
    steps = {name: our_step(model, micro_batch, device, **TYPES[name]) for name in types}
    results: dict[str, list[Any]] = {name: [] for name in types}
    noted = {name: lambda name=name: results[name].append(steps[name]()) for name in types}
    found = timed(f"GPT-2 124M, s{model.seq_length} b{micro_batch}, whole step by type", noted, device=device)
    facts: Row = {"loss": {name: round(results[name][-1].loss, 3) for name in types}}
    if "labkit, fp16" in types:
        fp16 = results["labkit, fp16"][-len(found.seconds[found.ours]) :]
        facts |= {"fp16_loss_scale": fp16[-1].loss_scale, "fp16_skipped": sum(one.skipped for one in fp16)}
    optims = {name: OptimConfig(**TYPES[name]) for name in types}
    flops = plan.step_flops(model, samples=micro_batch).total
    yield rates(replace(found, facts=facts), flops, device, optims=optims)


def recomputed_side(config: ModelConfig, batch: int, device: torch.device) -> Side:
    """Forward and backward of `config.layers` layers, recomputed as `config` says."""
    layers, run_layers = our_layers(config, device, torch.bfloat16), Recomputation(config).run_layers
    pair = random_pair(config, batch, device, torch.bfloat16)
    return stack_side(lambda x: run_layers(layers, x, None), layers[-1].mlp, *pair, layers)


def predicted_bytes(config: ModelConfig, batch: int, device: torch.device) -> int:
    """What a forward of `config.layers` layers keeps in bf16, its input with it, by the closed form."""
    share = Share(samples=batch, element_bytes=2, device="cuda" if device.type == "cuda" else "cpu")
    return layers_activation_bytes(config, share)


def kept_gib(side: Side, device: torch.device) -> float | None:
    """What a forward keeps for its backward, with its output and without its input, which are as large; None on a CPU,
    which does not count."""
    assert side.passes is not None
    drop, forward, backward = side.passes
    drop()
    before = held(device)[0]
    forward()
    kept = torch.cuda.memory_allocated(device) - before if device.type == "cuda" else None
    backward()
    return None if kept is None else round(kept / 2**30, 3)


def recomputation(
    model: ModelConfig = RECOMPUTED, batch: int = 4, *, device: torch.device = DEVICE
) -> Iterator[Comparison | Row]:
    """Memory of activations and time by `recompute_granularity`: what is kept by the closed form and as measured. The
    peak of a step has gradients and weights in it, too."""
    configs = {f"recomputation {name}": replace(model, **choice) for name, choice in RECOMPUTATIONS.items()}
    foreseen = {name: round(predicted_bytes(one, batch, device) / 2**30, 3) for name, one in configs.items()}
    yield from beside(
        f"{model.layers} layers h{model.hidden} s{model.seq_length} b{batch}, forward and backward by recomputation",
        {name: partial(recomputed_side, one, batch, device) for name, one in configs.items()},
        device=device, tolerance=LAYER_TOLERANCE, facts={"activations_gib_predicted": foreseen},
        describe=lambda side, _: {"activations_gib": kept_gib(side, device)},
    )  # fmt: skip
