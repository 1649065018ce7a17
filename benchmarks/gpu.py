"""What one GPU can show: step times and MFU in bf16 and fp8, the attention kernel, products of experts, memory of
recomputation, CUDA graphs, and ranks that share the GPU (rows G1 to G7, F25).

    python benchmarks/gpu.py                 # writes results/gpu.json; needs CUDA, takes a few minutes

MFU is the model's operations (causal attention counted as the half that is computed) over time, against two rates: the
989 TFLOP/s of an H100 or H200 in dense bf16 (`--peak` for another GPU), and a bf16 GEMM measured in the same run. Each
part is measured by itself: one that fails is reported as failed, and the others still count.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import gpu_graphs
import gpu_moe
import gpu_precision
import pipeline
import torch
from gpu_steps import DEVICE, batches, layer_flops, layer_step, our_step, peak_memory_gib, rates, timed
from harness import Comparison, report
from plain_gpt import PlainGPT
from torch import Tensor

from labkit.config import ModelConfig, ParallelConfig, presets
from labkit.events import recording
from labkit.launch import rank_info, run
from labkit.models import GPTModel, counts
from labkit.parallel import initialize_model_parallel, single_process_groups
from labkit.schedules import Schedule

LAYER = ModelConfig(layers=1, hidden=4096, heads=32, seq_length=2048)
LAYER_BATCH = 8
GPT2 = replace(presets.gpt2_124m().model, embedding_dropout=0.0, attention_dropout=0.0, hidden_dropout=0.0)
STACK = replace(presets.table1("1.2B").model, embedding_dropout=0.0, attention_dropout=0.0, hidden_dropout=0.0)
SHARED = ModelConfig(layers=4, hidden=256, heads=8, vocab_size=1024, seq_length=256)
SECONDS = 420
"""No new part is begun after this time."""

# ---- parts ----


def gemm() -> tuple[Comparison, float]:
    """A bf16 GEMM of 8192^3 on random data, and its operations per second."""
    size = 8192
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    found = timed(
        "bf16 GEMM 8192 x 8192 x 8192, 10 at once", {"torch.mm": lambda: [torch.mm(a, b, out=out) for _ in range(10)]}
    )
    rate = 10 * 2 * size**3 / found.median("torch.mm")
    return replace(found, facts={"tflop_per_s": round(rate / 1e12, 1)}), rate


def one_layer(gemm_rate: float, peak: float) -> list[Comparison]:
    """G1: aim at most 34 ms on an H200."""
    torch.cuda.reset_peak_memory_stats()
    found = timed("layer h4096 s2048 b8, forward and backward", {"labkit": layer_step(LAYER, LAYER_BATCH)})
    flops = layer_flops(LAYER, LAYER_BATCH)
    facts = {"attention_kernel": attention_kernel(LAYER, LAYER_BATCH), "peak_gib": peak_memory_gib()}
    return [rates(replace(found, facts=facts), flops, gemm_rate, peak)]


def attention_kernel(config: ModelConfig, batch: int) -> str:
    """Which implementation `scaled_dot_product_attention` chose, by the operator it called."""
    from torch.profiler import ProfilerActivity, profile

    step = layer_step(config, batch)
    step()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
        torch.cuda.synchronize()
    names = {event.key.removeprefix("aten::") for event in seen.key_averages() if "scaled_dot_product" in event.key}
    chosen = sorted(name for name in names if name.startswith("_") and not name.endswith("_backward"))
    return ", ".join(chosen) or "unknown"


def plain_step(model: ModelConfig, micro_batch: int) -> Callable[[], Any]:
    """The same step as one writes it for one GPU: compiled, autocast to bf16, torch's clipping and fused AdamW."""
    plain = PlainGPT(model).to(DEVICE)
    compiled = torch.compile(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, betas=(0.9, 0.999), weight_decay=0.01, fused=True)
    data = batches(model, micro_batch)

    def step() -> float:
        batch = next(data)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = compiled(batch["tokens_BS"], batch["labels_BS"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def gpt2_step(gemm_rate: float, peak: float) -> list[Comparison]:
    """G2: GPT-2 124M, the whole step, beside the compiled plain model."""
    micro_batch = 16
    steps = {"labkit": our_step(GPT2, micro_batch), "plain model, compiled": plain_step(GPT2, micro_batch)}
    found = timed("GPT-2 124M, s1024 b16, whole step", steps, warmup=5)
    flops = counts.step_flops(GPT2, samples=micro_batch, causal=True).total
    return [rates(found, flops, gemm_rate, peak)]


def stack_step(gemm_rate: float, peak: float) -> list[Comparison]:
    """G2: the paper's 1.2B model (40 layers, hidden 1536), the whole step at its batch of 8."""
    micro_batch = 8
    torch.cuda.reset_peak_memory_stats()
    found = timed("1.2B (40 layers, h1536), s1024 b8, whole step", {"labkit": our_step(STACK, micro_batch)})
    flops = counts.step_flops(STACK, samples=micro_batch, causal=True).total
    parameters = counts.stage_parameters(STACK, layers=STACK.layers)
    facts = {"parameters": parameters, "state_gib": round(counts.state_bytes(parameters, "bf16").total / 2**30, 2)}
    return [rates(replace(found, facts=facts | {"peak_gib": peak_memory_gib()}), flops, gemm_rate, peak)]


def shared_gpu_loss(tp: int, steps: int) -> tuple[float, str, float]:
    """(loss, backend and device, seconds of the last forward and backward) on a rank of a tensor-parallel group."""
    groups = initialize_model_parallel(ParallelConfig(tp=tp))
    model = GPTModel(SHARED, groups, layers=range(SHARED.layers), seed=1)
    tokens = torch.randint(0, SHARED.vocab_size, (4, 257), generator=torch.Generator().manual_seed(0)).to(groups.device)
    for _ in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = model(tokens[:, :-1], labels_BS=tokens[:, 1:]).mean()
        loss.backward()
        torch.cuda.synchronize()
    return loss.item(), f"{groups.backend} on {groups.device}", time.perf_counter() - start


def shared_gpu() -> list[dict[str, Any]]:
    """Ranks of one tensor-parallel group on the same GPU, over gloo through host memory: the loss of one rank."""
    alone = run(shared_gpu_loss, 1, 1, 5, device="cuda", timeout=120)[0]
    rows = []
    for tp in (2, 4):
        found = run(shared_gpu_loss, tp, tp, 5, backend="gloo", device="cuda", timeout=120)
        rows.append(
            {
                "case": f"{tp} tensor-parallel ranks on one GPU",
                "transport": found[0][1],
                "loss_difference": max(abs(loss - alone[0]) for loss, _, _ in found),
                "ms": round(1e3 * max(seconds for _, _, seconds in found), 2),
                "ms_one_rank": round(1e3 * alone[2], 2),
            }
        )
    return rows


def on_the_gpu(count: int) -> list[dict[str, Tensor]]:
    """The microbatches of the pipeline benchmark on the GPU."""
    made = pipeline.make_batches(pipeline.run_config(count, SHARED), count)
    return [{key: tensor.to(DEVICE) for key, tensor in batch.items()} for batch in made]


def loss_of_one_rank(count: int) -> float:
    """Mean loss of the microbatches on the whole model."""
    config = pipeline.run_config(count, SHARED)
    groups = single_process_groups(device=DEVICE)
    model = GPTModel(SHARED, groups, layers=range(SHARED.layers), seed=config.train.seed)
    with torch.no_grad():
        losses = [model(batch["tokens_BS"], labels_BS=batch["labels_BS"]).mean() for batch in on_the_gpu(count)]
    return float(torch.stack(losses).mean())


def shared_gpu_pipeline_step(schedule: Schedule, steps: int) -> tuple[list[float], float, float, float]:
    """(losses, where this rank has them; seconds of a step, plain and recording Events; share of the recorded step that
    this rank's actions took on the GPU)."""
    count = schedule.num_microbatches
    side = pipeline.our_side(pipeline.run_config(count, SHARED), on_the_gpu(count), schedule)
    found, losses, actions = [], [], []
    for records in (False, True):
        for _ in range(steps):
            torch.distributed.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            with recording(rank_info().rank) if records else nullcontext() as recorder:
                losses = side.step()
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            actions = [event for event in recorder.events if event.chunk is not None] if recorder else []
        found.append(seconds)
    return losses, found[0], found[1], sum(event.duration for event in actions) / found[1]


def shared_gpu_pipeline(count: int = 8) -> list[dict[str, Any]]:
    """Two pipeline ranks on the same GPU, messages through host memory, and what recording by CUDA events costs."""
    alone, rows = loss_of_one_rank(count), []
    for name, build in pipeline.OURS.items():
        found = run(shared_gpu_pipeline_step, 2, build(count), 5, backend="gloo", device="cuda", timeout=120)
        [losses] = [losses for losses, *_ in found if losses]
        rows.append(
            {
                "case": f"2 pipeline ranks on one GPU, {name}, {count} microbatches",
                "loss_difference": abs(sum(losses) / count - alone),
                "ms": round(1e3 * max(plain for _, plain, _, _ in found), 2),
                "ms_recording_events": round(1e3 * max(recorded for _, _, recorded, _ in found), 2),
                "busy_share_by_rank": [round(busy, 3) for *_, busy in found],
            }
        )
    return rows


# ---- all of it ----


def attempt(name: str, part: Callable[[], Any], began: float, failures: list[dict[str, Any]]) -> Any:
    """The part's result, or None and a row that says why not."""
    if time.monotonic() - began > SECONDS:
        failures.append({"case": name, "left_out": f"more than {SECONDS} s had passed"})
        return None
    try:
        return part()
    except Exception as error:
        failures.append({"case": name, "failed": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"})
        return None
    finally:
        torch.cuda.empty_cache()


def main() -> None:
    """Measure what this GPU can show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peak", type=float, default=989.0, help="dense bf16 TFLOP/s of the GPU's data sheet")
    parser.add_argument("--dry", action="store_true", help="print only, write no result")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py needs a GPU: torch sees no CUDA device here (`labkit doctor` says why)")
    began, peak = time.monotonic(), options.peak * 1e12
    comparisons: list[Comparison] = []
    rows: list[dict[str, Any]] = []
    measured = attempt("bf16 GEMM", gemm, began, rows)
    rate = measured[1] if measured else float("nan")
    if measured:
        comparisons.append(measured[0])
    parts = {"layer h4096": one_layer, "fp8 layers": gpu_precision.fp8_layer, "GPT-2 124M": gpt2_step}
    for name, part in (parts | {"1.2B stack": stack_step}).items():
        comparisons += attempt(name, lambda part=part: part(rate, peak), began, rows) or []
    comparisons += attempt("types", lambda: gpu_precision.precisions(GPT2), began, rows) or []
    comparisons += attempt("products of experts", lambda: gpu_moe.grouped_gemm(rate, peak), began, rows) or []
    rows += attempt("launches of experts", gpu_moe.launches, began, rows) or []
    comparisons += attempt("graphs", gpu_graphs.dense, began, rows) or []
    comparisons += attempt("partial graphs", gpu_graphs.experts_in_part, began, rows) or []
    rows += attempt("graphs equal to eager", gpu_graphs.equality, began, rows) or []
    rows += attempt("pool of graphs", gpu_graphs.pipeline_pool, began, rows) or []
    rows += attempt("recomputation", gpu_precision.recomputation, began, rows) or []
    rows += attempt("reduction behind the backward", gpu_precision.overlapped_reduction, began, rows) or []
    rows += attempt("ranks sharing a GPU", shared_gpu, began, rows) or []
    rows += attempt("pipeline ranks sharing a GPU", shared_gpu_pipeline, began, rows) or []
    report(
        "gpu",
        comparisons,
        title="One GPU",
        rows=rows,
        notes=[
            f"mfu is against {options.peak:g} TFLOP/s, share_of_gemm_rate against the GEMM of this run.",
            "Operations count the half of the attention scores that a causal mask leaves.",
        ],
        write=not options.dry,
    )


if __name__ == "__main__":
    main()
