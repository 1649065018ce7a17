"""What only CUDA can show of the model: the same numbers as the CPU, bf16, NCCL, several ranks on one GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from labkit.config import ModelConfig, OptimConfig, ParallelConfig, RunConfig, TrainConfig, presets
from labkit.launch import rank_info, run
from labkit.models import GPTModel
from labkit.parallel import all_reduce, initialize_model_parallel, record_of, single_process_groups
from labkit.parallel.parameters.weights import gather_parameter
from labkit.plan.peaks import known_peak
from labkit.train import TrainResult

pytestmark = pytest.mark.gpu

GPT2 = ModelConfig(layers=2, hidden=64, heads=4, vocab_size=301, make_vocab_size_divisible_by=32, seq_length=32)
LLAMA = replace(
    GPT2,
    kv_heads=2,
    position="rope",
    norm="rmsnorm",
    activation="swiglu",
    bias=False,
    untie_embeddings_and_output_weights=True,
)


def tokens(config: ModelConfig) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, config.vocab_size, (3, config.seq_length + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def loss_and_gradients(config: ModelConfig, groups: Any, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    model = GPTModel(config, groups, layers=range(config.layers), seed=1, dtype=dtype, device=device)
    ids, labels = (x.to(device) for x in tokens(config))
    loss = model(ids, labels_BS=labels).mean()
    loss.backward()
    found = {"loss": loss.detach().cpu()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        if record_of(parameter).sequence_parallel:  # of this rank's part of the sequence
            all_reduce(parameter.grad, groups.tp)
        found[name] = gather_parameter(parameter.grad, parameter, groups.tp).cpu()
    return found


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_cuda_computes_what_the_cpu_computes(config: ModelConfig) -> None:
    cpu, cuda = (
        loss_and_gradients(config, single_process_groups(device=where), torch.device(where), torch.float64)
        for where in ("cpu", "cuda")
    )
    for name, expected in cpu.items():
        torch.testing.assert_close(cuda[name], expected, rtol=1e-8, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


KERNELS = ("fused", "flash", "cudnn", "math")


@pytest.mark.parametrize(
    ("config", "backend"),
    [(GPT2, "efficient"), *product((GPT2, LLAMA), KERNELS)],
    ids=lambda value: value if isinstance(value, str) else value.position,
)
def test_bf16_is_float32_but_for_rounding(config: ModelConfig, backend: str) -> None:
    groups, device = single_process_groups(), torch.device("cuda")
    exact = loss_and_gradients(config, groups, device, torch.float32)  # float64 draws other weights
    rounded = loss_and_gradients(replace(config, attention_backend=backend), groups, device, torch.bfloat16)
    assert rounded["loss"].dtype == torch.float32
    torch.testing.assert_close(rounded["loss"], exact["loss"], rtol=0.02, atol=0.0)
    for name in exact:
        error = (rounded[name].float() - exact[name]).norm() / exact[name].norm()
        # A key bias has no gradient but rounding; it is a third of qkv.bias, whose norm is the value's.
        assert error < 0.1, (name, error)


FAMILIES = {
    "bert": presets.bert_tiny(),
    "t5": presets.t5_tiny(),
    "t5 relative": presets.t5_tiny().override({"model.position": "relative", "model.norm": "rmsnorm"}),
    "mamba": presets.mamba_tiny(),
    "experts": presets.tiny_moe().override({"moe.shared_expert_ffn_hidden": 64, "moe.shared_expert_overlap": True}),
}


def losses_of_families(precision: str) -> dict[str, list[float]]:
    from labkit.train import pretrain

    shorter = {"optim.precision": precision, "train.steps": 3, "train.global_batch_size": 4, "model.layers": 2}
    found = {}
    for name, config in FAMILIES.items():
        own = {"model.hybrid_override_pattern": "M*"} if config.model.family == "mamba" else {}
        found[name] = pretrain(config.override(shorter | own)).losses
    return found


def test_every_family_trains_as_on_the_cpu() -> None:
    [exact], [found] = (run(losses_of_families, 1, "fp64", device=where, timeout=180) for where in ("cpu", "cuda"))
    assert found == {name: pytest.approx(losses, rel=1e-10) for name, losses in exact.items()}


def test_every_family_trains_in_bf16_but_for_rounding() -> None:
    """A bf16 number has 8 bits, so a weight or an activation is off by at most 1 part in 256, and a loss by few. In
    float32 the weights are drawn alike, in float64 they are not."""
    [exact], [found] = (run(losses_of_families, 1, kind, device="cuda", timeout=180) for kind in ("fp32", "bf16"))
    assert found == {name: pytest.approx(losses, rel=1 / 256) for name, losses in exact.items()}


def train_in_bf16(changes: dict[str, Any]) -> tuple[str, TrainResult]:
    from labkit.train import pretrain

    model = ModelConfig(layers=2, hidden=64, heads=4, vocab_size=1024, seq_length=64)
    config = RunConfig(
        model=model,
        optim=OptimConfig(precision="bf16", lr=2e-3),
        train=TrainConfig(steps=8, micro_batch_size=4, global_batch_size=8),
    )
    return f"{rank_info().backend} {rank_info().device.type}", pretrain(config.override(changes))


@pytest.mark.parametrize("kind", ["none", "pytorch", "nsys"])
def test_bf16_steps_lower_the_loss_on_one_nccl_rank(kind: str, tmp_path: Path) -> None:
    """With gradients in bf16 as well, and profiled, which changes nothing of it."""
    steps = {"profile_step_start": 2, "profile_step_end": 3, "output_dir": str(tmp_path)}
    changes = {} if kind == "none" else {"profile": kind, "grad_reduce_in_bf16": True, **steps}
    [(where, result)] = run(train_in_bf16, 1, changes, device="cuda", timeout=180)
    if kind == "pytorch":
        events = json.loads((tmp_path / "profile-rank0.json").read_text())["traceEvents"]
        seen = {(event.get("cat"), event["name"]) for event in events}
        assert {("user_annotation", "0F0"), ("user_annotation", "optimizer")} <= seen
        assert any(cat == "kernel" for cat, _ in seen)
    assert where == "nccl cuda"
    assert result.losses[-1] < result.losses[0] - 0.3
    known = known_peak(torch.cuda.get_device_name()) is not None
    assert [{"mfu", "hfu"} <= set(line) for line in result.metrics if "loss" in line] == [known] * 8
    assert all(0 < share < 1 for _, share in result.series("mfu"))


def shared_gpu(config: ModelConfig, tp: int, sequence_parallel: bool) -> tuple[str, dict[str, Tensor]]:
    groups = initialize_model_parallel(ParallelConfig(tp=tp, sequence_parallel=sequence_parallel))
    where = f"{groups.backend} {groups.device}"
    return where, loss_and_gradients(config, groups, groups.device, torch.float64)


@pytest.mark.parametrize(
    ("config", "tp", "sp"),
    [(GPT2, 2, False), (GPT2, 4, False), (LLAMA, 2, False), (GPT2, 4, True), (LLAMA, 2, True)],
    ids=["gpt2-2", "gpt2-4", "llama-2", "gpt2-4-sp", "llama-2-sp"],
)
def test_ranks_that_share_a_gpu_equal_one_process(config: ModelConfig, tp: int, sp: bool) -> None:
    alone = loss_and_gradients(config, single_process_groups(), torch.device("cuda"), torch.float64)
    results = run(shared_gpu, tp, config, tp, sp, backend="gloo", device="cuda", timeout=180)
    for rank, (where, found) in enumerate(results):
        assert where == f"gloo cuda:{rank % torch.cuda.device_count()}"
        for name, expected in alone.items():
            torch.testing.assert_close(found[name], expected, rtol=1e-8, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_attention_runs_on_a_fused_kernel_in_bf16() -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip(f"{torch.cuda.get_device_name()} has no bf16 tensor cores, so no fused bf16 attention is promised")
    from torch.profiler import ProfilerActivity, profile

    model = GPTModel(
        replace(GPT2, hidden=256), single_process_groups(), layers=range(2), seed=1, dtype=torch.bfloat16, device="cuda"
    )
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        model(tokens(GPT2)[0].cuda())
    names = " ".join(event.key for event in seen.key_averages())
    assert "_scaled_dot_product_flash_attention" in names or "_scaled_dot_product_cudnn_attention" in names
    assert "_scaled_dot_product_attention_math" not in names
