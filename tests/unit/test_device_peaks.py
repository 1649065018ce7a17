"""Peaks of GPUs: which names are known, which precision counts, ranks that share a GPU, and a run's MFU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from labkit.config import OptimConfig, presets
from labkit.parallel import single_process_groups
from labkit.plan.flops import forward_flops, step_flops
from labkit.plan.peaks import PEAKS, known_peak
from labkit.train.reporting.device_peaks import Gpu, mean_peak, peak_of, peak_of_a_rank
from labkit.train.reporting.progress_line import step_words
from labkit.train.reporting.report import Throughput

BF16 = OptimConfig(precision="bf16")
H200, A100 = "NVIDIA H200", "NVIDIA A100-SXM4-80GB"


@pytest.mark.parametrize(
    ("name", "half"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5), ("NVIDIA H100 PCIe", 756.5), ("NVIDIA H100 NVL", 835.5), (H200, 989.5),
        ("NVIDIA H200 NVL", 835.5), ("NVIDIA GH200 480GB", 989.5), ("NVIDIA B200", 2250.0), ("NVIDIA GB200", 2500.0),
        (A100, 312.0), ("A100-PCIE-40GB", 312.0), ("NVIDIA A100 80GB PCIe", 312.0), ("NVIDIA A10", 125.0),
        ("NVIDIA A30", 165.0), ("NVIDIA A40", 149.7), ("NVIDIA L4", 121.0), ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 3090", 71.0), ("NVIDIA GeForce RTX 4090", 165.2), ("NVIDIA GeForce RTX 5090", 209.5),
    ],
)  # fmt: skip
def test_names_that_torch_gives(name: str, half: float) -> None:
    assert peak_of(name, BF16) == half


@pytest.mark.parametrize(
    "name",
    ["", "CPU", "NVIDIA H100", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA A10G",
     "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA L40",
     "NVIDIA H20", "Tesla T4", "AMD Instinct MI300X"],
)  # fmt: skip
def test_other_devices_are_unknown_not_guessed(name: str) -> None:
    assert known_peak(name) is None and peak_of(name, BF16) is None


@pytest.mark.parametrize("pattern", PEAKS)
def test_rates_of_one_gpu_stand_in_the_ratios_of_its_tensor_cores(pattern: str) -> None:
    """fp8 twice the rate of bf16, TF32 half of it; a typing error in the table breaks one."""
    peak = PEAKS[pattern]
    assert peak.half / peak.tf32 == pytest.approx(2, rel=0.03)
    assert peak.fp8 is None or peak.fp8 / peak.half == pytest.approx(2, rel=0.03)
    assert peak.fp32 <= peak.tf32


def test_the_precision_of_the_run_decides() -> None:
    peak = known_peak(H200)
    assert peak is not None
    assert peak_of(H200, OptimConfig(precision="fp16")) == peak.half
    assert peak_of(H200, OptimConfig(precision="bf16", fp8="hybrid")) == peak.fp8 == 1979.0
    assert peak_of(A100, OptimConfig(precision="bf16", fp8="hybrid")) is None
    assert peak_of(H200, OptimConfig(precision="bf16", fp8="hybrid", fp8_recipe="current")) == peak.fp8
    assert peak_of(H200, OptimConfig(precision="bf16", fp8="hybrid", fp8_recipe="blockwise")) is None, "a simulation"
    assert peak_of(H200, OptimConfig(precision="fp64")) is None
    fp32, matmul = OptimConfig(precision="fp32"), torch.backends.cuda.matmul
    assert peak_of(H200, fp32) == peak.fp32 == 67.0
    before = matmul.allow_tf32
    try:
        matmul.allow_tf32 = True
        assert peak_of(H200, fp32) == peak.tf32
    finally:
        matmul.allow_tf32 = before
    assert peak_of(H200, fp32) == peak.fp32


def test_ranks_share_the_peaks_of_their_gpus() -> None:
    def peak(*names: tuple[str, str, str]) -> float | None:
        return mean_peak([Gpu(*name) for name in names], BF16)

    one, two, far = ("a", "0", H200), ("a", "1", H200), ("b", "0", A100)
    assert peak(one) == peak(one, two) == 989.5
    assert peak(one, one) == 989.5 / 2 and peak(one, one, one, two) == 989.5 / 2
    assert peak(one, two, far) == pytest.approx((2 * 989.5 + 312) / 3)
    assert peak(one, ("a", "2", "Tesla T4")) is None


def test_a_rank_asks_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def properties(device: torch.device) -> SimpleNamespace:
        asked.append(device)
        return SimpleNamespace(name=A100, uuid="GPU-1")

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    groups = single_process_groups(device=torch.device("cuda", 3))
    assert peak_of_a_rank(groups, BF16) == 312.0 and asked == [torch.device("cuda", 3)]


def test_mfu_and_hfu_are_the_rates_of_the_models_and_the_hardwares_operations_over_the_peak() -> None:
    config = presets.tiny_moe().override({"recompute_granularity": "full"})
    samples = config.train.global_batch_size
    flops = step_flops(config.model, samples=samples, moe=config.moe).total
    again = forward_flops(config.model, samples=samples, moe=config.moe, logits=False).total
    rates = Throughput(config, 4, peak=312.0).rates(0.5)
    assert rates["mfu"] == pytest.approx(flops / 0.5 / (4 * 312e12))
    assert rates["hfu"] == pytest.approx((flops + again) / 0.5 / (4 * 312e12))
    assert not {"mfu", "hfu"} & set(Throughput(config, 4).rates(0.5))
    assert step_words({"step": 1, "mfu": 0.4127, "hfu": 0.5}) == ["step 1:", "MFU 41.3%", "HFU 50.0%"]
