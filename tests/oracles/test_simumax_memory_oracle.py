"""`labkit.plan.device_memory` against peaks of large models that SimuMax's authors measured with Megatron-LM on B200.

Their table (MooreThreads/SimuMax, docs, v1.2) gives the largest rank of 8 GPUs, of models cut to a few layers. Where it
leaves something out, the models' papers say it. DeepSeek's first layer is dense.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

import pytest

from labkit.config import RunConfig
from labkit.plan.device_memory import device_memory
from labkit.plan.latent_attention import Latent
from labkit.plan.workload import Extras, Software, Workload

GIB = 1 << 30
LLAMA_70B: dict[str, Any] = {"layers": 12, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn_hidden": 28672}
LLAMA_405B: dict[str, Any] = {"layers": 4, "hidden": 16384, "heads": 128, "kv_heads": 16, "ffn_hidden": 53248}
V2: dict[str, Any] = {"layers": 4, "hidden": 5120, "heads": 128, "ffn_hidden": 12288, "vocab_size": 102400}
V3: dict[str, Any] = {"layers": 4, "hidden": 7168, "heads": 128, "ffn_hidden": 18432, "vocab_size": 129280}
EXPERTS: dict[int, dict[str, Any]] = {
    V2["hidden"]: {"num_experts": 160, "top_k": 6, "ffn_hidden": 1536, "shared_expert_ffn_hidden": 3072},
    V3["hidden"]: {"num_experts": 256, "top_k": 8, "ffn_hidden": 2048, "shared_expert_ffn_hidden": 2048},
}
ROWS: list[tuple[dict[str, Any], dict[str, int], int, float]] = [
    (LLAMA_70B, {"tp": 2}, 4096, 60.68),
    (LLAMA_70B, {"tp": 4}, 4096, 39.07),
    (LLAMA_70B, {"tp": 8}, 4096, 28.29),
    (LLAMA_70B, {"pp": 2}, 4096, 66.55),
    (LLAMA_70B, {"cp": 8}, 32768, 104.51),
    (LLAMA_70B, {"tp": 2, "cp": 4}, 131072, 112.67),
    (LLAMA_70B, {"cp": 8}, 131072, 147.99),
    (LLAMA_405B, {"pp": 2}, 4096, 87.08),
    (LLAMA_405B, {"tp": 2}, 4096, 81.59),
    (LLAMA_405B, {"tp": 4}, 4096, 52.89),
    (LLAMA_405B, {"tp": 2, "cp": 4}, 32768, 87.03),
    (LLAMA_405B, {"cp": 8}, 32768, 139.22),
    (LLAMA_405B, {"tp": 2, "cp": 4}, 131072, 118.13),
    (V2, {"ep": 8}, 4096, 45.63),
    (V2, {"pp": 2, "ep": 4}, 4096, 44.7),
    (V3, {"ep": 8}, 4096, 104.3),
    (V3, {"pp": 2, "ep": 4}, 4096, 114.0),
]
"""Model, layout, tokens of a sequence, measured peak in GiB."""


def workload(model: dict[str, Any], layout: dict[str, int], length: int) -> Workload:
    experts = EXPERTS.get(model["hidden"])
    common = {"vocab_size": 128256, "position": "rope", "norm": "rmsnorm", "activation": "swiglu", "bias": False,
              "untie_embeddings_and_output_weights": True, "transformer_impl": "transformer_engine",
              "attention_backend": "cudnn", "seq_length": length}  # fmt: skip
    routed = {"grouped_gemm": True, "layer_freq": (0, 1, 1, 1)} | (experts or {})
    sections = {
        "model": common | model,
        "parallel": layout | {"sequence_parallel": layout.get("tp", 1) > 1, "etp": 1},
        "optim": {"precision": "bf16", "distributed_optimizer": True},
        "train": {"micro_batch_size": 1, "global_batch_size": 32},
        "moe": routed if experts else {},
    }
    values = {f"{section}.{name}": value for section, given in sections.items() for name, value in given.items()}
    extras = Extras(latent=Latent(query_rank=1536), qk_norm=True) if experts else Extras()
    return Workload(RunConfig().replaced(values), 8, extras=extras, software=Software(megatron=True, gpu="b200"))


def error(row: tuple[dict[str, Any], dict[str, int], int, float]) -> float:
    """Return the error of the largest rank in percent."""
    model, layout, length, measured = row
    run = workload(model, layout, length)
    largest = max(device_memory(run, place).peak for place in range(layout.get("pp", 1)))
    return 100 * (largest / GIB / measured - 1)


@pytest.mark.oracle
@pytest.mark.parametrize(
    "rows, most, largest", [(ROWS[:13], 1.3, 3.0), (ROWS[13:], 1.5, 3.5)], ids=["Llama", "DeepSeek"]
)
def test_peaks_of_large_models_on_b200(
    rows: list[tuple[dict[str, Any], dict[str, int], int, float]], most: float, largest: float
) -> None:
    errors = [abs(error(row)) for row in rows]
    assert mean(errors) <= most
    assert max(errors) <= largest
