"""What only CUDA can show of precision: fp8 tensor cores, fp16 training, Transformer Engine itself, memory that
recomputation saves, reductions that run while the backward goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from labkit.config import ModelConfig, OptimConfig, RunConfig, TrainConfig
from labkit.fp8 import Float8Recipe, Float8Spec
from labkit.fp8.casting import E4M3, E5M2
from labkit.fp8.gemms import product, scaled_product
from labkit.launch import run
from labkit.launch.transformer_engine import why_no_transformer_engine
from labkit.models import GPTModel
from labkit.parallel import single_process_groups
from labkit.parallel.parameters.parameter_record import weight_gradient
from labkit.train.pretraining import layer_spec_with

pytestmark = pytest.mark.gpu

MODEL = ModelConfig(layers=2, hidden=128, heads=4, vocab_size=1024, seq_length=64)
RECIPES = ("delayed", "current", "blockwise")


def need_fp8() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip(f"{torch.cuda.get_device_name()} has no fp8 tensor cores (Ada, Hopper or later have)")


def need_transformer_engine() -> None:
    if (missing := why_no_transformer_engine()) is not None:
        pytest.skip(f"needs transformer_engine: {missing}")


def tokens() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, MODEL.vocab_size, (4, 65), generator=torch.Generator().manual_seed(1)).cuda()
    return ids[:, :-1], ids[:, 1:]


def loss_and_gradients(steps: int = 1, **more: Any) -> dict[str, Tensor]:
    """Of the last of `steps` passes over the same tokens, in bf16."""
    given: dict[str, Any] = {"layers": range(2), "seed": 1, "dtype": torch.bfloat16, "device": "cuda"} | more
    config, float8 = given.pop("config", MODEL), given.pop("float8", None)
    spec = layer_spec_with(config, float8)
    model = GPTModel(config, single_process_groups(device="cuda"), spec=spec, **given)
    ids, labels = tokens()
    found: dict[str, Tensor] = {}
    for _ in range(steps):
        model.zero_grad()
        loss = model(ids, labels_BS=labels).mean()
        loss.backward()
        model.precision.end_step()
        found = {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found


def distance(found: Tensor, exact: Tensor) -> float:
    return ((found.float() - exact.float()).norm() / exact.float().norm()).item()


@pytest.mark.parametrize("gradient", [E4M3, E5M2])
def test_tensor_cores_multiply_what_the_cpu_multiplies(gradient: torch.dtype) -> None:
    need_fp8()
    a = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).to(gradient)
    b = torch.randn(96, 256, generator=torch.Generator().manual_seed(2)).to(E4M3)
    scale_inv = torch.tensor(0.5), torch.tensor(0.25)
    expected = product(a, b, scale_inv, torch.float32)
    on_gpu = scaled_product(a.cuda(), b.cuda(), (scale_inv[0].cuda(), scale_inv[1].cuda()), torch.float32, fast=False)
    torch.testing.assert_close(on_gpu.cpu(), expected, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_is_bf16_but_for_its_rounding(recipe: str) -> None:
    exact = loss_and_gradients()
    rounded = loss_and_gradients(2, float8=Float8Recipe(recipe))
    assert distance(rounded["loss"], exact["loss"]) < 0.02
    for name in exact:
        assert distance(rounded[name], exact[name]) < 0.35, name
    assert any(not torch.equal(rounded[name], exact[name]) for name in exact)


def test_casting_does_not_wait_for_the_gpu() -> None:
    """No host synchronisation in forward, backward or the end of a step."""
    for recipe in RECIPES:
        loss_and_gradients(1, float8=Float8Recipe(recipe))  # kernels are loaded with the first call
        made: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda", "spec": Float8Spec(Float8Recipe(recipe))}
        made |= {"pre_process": False, "post_process": False}
        model = GPTModel(MODEL, single_process_groups(device="cuda"), layers=range(2), seed=1, **made)
        x = torch.randn(64, 2, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        model.set_input_tensor(x)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(None).sum().backward()
            model.precision.end_step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def trained(precision: dict[str, Any], impl: str = "local") -> tuple[list[float], int]:
    from labkit.train import pretrain

    config = RunConfig(
        model=replace(MODEL, transformer_impl=impl),
        optim=OptimConfig(lr=2e-3, **precision),
        train=TrainConfig(steps=10, micro_batch_size=4, global_batch_size=8),
    )
    result = pretrain(config)
    return result.losses, result.skipped_steps


@pytest.mark.parametrize(
    "precision",
    [
        {"precision": "fp16"},
        {"precision": "bf16"},
        *({"precision": "bf16", "fp8": "hybrid", "fp8_recipe": recipe} for recipe in RECIPES),
    ],
    ids=["fp16", "bf16", *RECIPES],
)
def test_training_follows_float32(precision: dict[str, Any]) -> None:
    [(exact, _)] = run(trained, 1, {"precision": "fp32"}, device="cuda", timeout=180)
    [(losses, skipped)] = run(trained, 1, precision, device="cuda", timeout=180)
    assert skipped <= 3, "the loss scale finds its size within a few steps"
    if not skipped:
        assert losses == pytest.approx(exact, abs=0.05)
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("float8", [None, *(Float8Recipe(name) for name in RECIPES)])
def test_transformer_engines_layers_compute_what_ours_do(float8: Float8Recipe | None) -> None:
    need_transformer_engine()
    if float8 is not None:
        need_fp8()
    engine = replace(MODEL, transformer_impl="transformer_engine")
    ours = loss_and_gradients(2, float8=float8)
    theirs = loss_and_gradients(2, config=engine, float8=float8)
    assert theirs.keys() == ours.keys()
    assert distance(theirs["loss"], ours["loss"]) < 0.01
    for name in ours:
        assert distance(theirs[name], ours[name]) < (0.1 if float8 is None else 0.4), name


def test_training_on_transformer_engine_follows_training_on_our_layers() -> None:
    need_transformer_engine()
    [(ours, _)] = run(trained, 1, {"precision": "bf16"}, device="cuda", timeout=180)
    [(theirs, _)] = run(trained, 1, {"precision": "bf16"}, "transformer_engine", device="cuda", timeout=180)
    assert theirs == pytest.approx(ours, abs=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_gradients_of_16_bits_add_up_in_fp32(dtype: torch.dtype) -> None:
    """One unit in the last place of fp32 for each product bounds the sum of positive products. A product that is first
    rounded to 16 bits, 9 of them or 12 significant, misses the bound."""
    tokens, microbatches, outputs, inputs = 256, 4, 96, 160
    buffer = torch.full((3, outputs * inputs), torch.nan, device="cuda")
    main_grad = buffer[1].view(outputs, inputs)
    exact, rounded = torch.zeros_like(main_grad, dtype=torch.float64), torch.zeros_like(main_grad)
    for seed in range(microbatches):
        generator = torch.Generator().manual_seed(seed)
        grad_NO, x_NI = (torch.rand(tokens, size, generator=generator).to("cuda", dtype) for size in (outputs, inputs))
        weight_gradient(grad_NO, x_NI, main_grad, replace=seed == 0)
        exact += grad_NO.double().t() @ x_NI.double()
        rounded += grad_NO.t() @ x_NI
    error, error_of_rounded = (((found - exact) / exact).abs().max().item() for found in (main_grad, rounded))
    assert error <= tokens * microbatches * torch.finfo(torch.float32).eps < error_of_rounded
    assert buffer[::2].isnan().all(), "its neighbours in the buffer are as they were"


# ---- recomputation ----


def peak_bytes(**choice: Any) -> tuple[int, dict[str, Tensor]]:
    """Largest memory of forward and backward over what was there before, and the gradients.

    Attention is unfused: a fused kernel adds the parts of a query's gradient up in any order, and has 4 of them here.
    """
    config = replace(MODEL, layers=8, hidden=512, seq_length=512, attention_backend="unfused", **choice)
    model = GPTModel(config, single_process_groups(device="cuda"), layers=range(8), seed=1, dtype=torch.bfloat16,
                     device="cuda", pre_process=False, post_process=False)  # fmt: skip
    x = torch.randn(512, 8, 512, generator=torch.Generator().manual_seed(1)).cuda().bfloat16().requires_grad_()
    before = 0
    for _ in range(2):  # the first time libraries take their workspaces
        model.zero_grad()
        x.grad = None
        model.set_input_tensor(x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(None).float().square().mean().backward()
    found = torch.cuda.max_memory_allocated() - before
    return found, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_recomputation_saves_memory_and_changes_no_bit() -> None:
    whole, exact = peak_bytes()
    for choice, share in (
        ({"recompute_granularity": "full"}, 0.5),
        ({"recompute_granularity": "selective", "recompute_modules": ("mlp",)}, 0.85),
    ):
        less, found = peak_bytes(**choice)
        assert less < share * whole, (choice, less, whole)
        assert all(torch.equal(found[name], exact[name]) for name in exact)


# ---- streams ----


def reduced_behind_the_backward(overlap: bool) -> list[tuple[float, float]]:
    """Of the last step: the (start, end) of every gradient reduction, and first that of the whole backward."""
    from labkit.train import pretrain

    config = RunConfig(
        model=replace(MODEL, layers=4, hidden=256),
        optim=OptimConfig(precision="bf16", overlap_grad_reduce=overlap, bucket_size=200_000 if overlap else None),
        train=TrainConfig(steps=4, micro_batch_size=4, global_batch_size=8),
    )
    events = [event for event in pretrain(config).events if event.chunk is not None or "all_reduce dp" in event.name]
    backward = [event for event in events if event.kind == "backward" and event.chunk is not None][-1]
    later = [event for event in events if "all_reduce dp" in event.name and event.end > backward.start]
    return [(backward.start, backward.end), *((event.start, event.end) for event in later)]


def test_gradients_are_on_their_way_before_the_backward_ends() -> None:
    for backward, *reductions in run(reduced_behind_the_backward, 2, True, backend="gloo", device="cuda", timeout=180):
        assert reductions, "events of the reductions"
        assert min(start for start, _ in reductions) < backward[1]
    for backward, *reductions in run(reduced_behind_the_backward, 2, False, backend="gloo", device="cuda", timeout=180):
        assert min(start for start, _ in reductions) >= backward[1] - 1e-3
