"""The tables of Megatron-LM's three papers: arXiv 1909.08053, 2104.04473 and 2205.05198."""

from __future__ import annotations

import re

from scale_page.compared import Timed, interval, named, percent, seconds, stated_rows, whole
from site_pages.tables import table

from labkit.config import RunConfig
from labkit.plan.layer_times import layer_passes
from labkit.plan.layout import layout_of
from labkit.plan.machine import load_machine
from labkit.plan.workload import Workload

ONE_GPU = 39e12
"""FLOP/s of one V100 in arXiv 1909.08053, recomputation counted; its scaling efficiencies are relative to it."""
EPOCH = 68_507
"""Iterations of an epoch there."""
DAY = 86_400.0
_STEP = ("step s: paper / predicted", "80 % interval", "error")


def _step(each: Timed) -> list[str]:
    return [f"{seconds(each.measured)} / {seconds(each.step.seconds)}", interval(each), each.verdict]


def _shape(each: Timed) -> str:
    """Return a layout such as `tp 8, pp 4, vpp 3, dp 32`."""
    assert each.row.workload is not None
    workload, parallel = each.row.workload, each.row.workload.config.parallel
    sizes = {"tp": parallel.tp, "pp": parallel.pp, "vpp": parallel.vpp, "dp": workload.dp}
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one GPU"


def _efficiency(each: Timed) -> float:
    """Return the published scaling efficiency as a share."""
    found = re.search(r"efficiency ([0-9.]+) %", each.stated["note"])
    assert found is not None
    return float(found[1]) / 100


def weak_scaling_rows() -> list[Timed]:
    """Return the runs of Figure 5: model parallelism alone, then with 64-way data parallelism."""
    return sorted(named("1909_fig5"), key=lambda each: int(each.stated["gpus"]))


def per_gpu(each: Timed) -> tuple[float, float]:
    """Return FLOP/s of a GPU in Figure 5, published and predicted."""
    published = ONE_GPU * _efficiency(each)
    return published, published * each.ratio


def weak_scaling() -> str:
    """Figure 5 as FLOP/s of a GPU, and Figure 1 as those of all GPUs."""
    head = ("model", "GPUs", "layout", "TFLOP/s per GPU: paper / predicted", "efficiency: paper / predicted",
            "PFLOP/s in all: paper / predicted", "error of the step")  # fmt: skip
    rows = []
    for each in weak_scaling_rows():
        count, (published, predicted) = int(each.stated["gpus"]), per_gpu(each)
        rows.append([
            each.row.model, f"{count}", _shape(each), f"{published / 1e12:.1f} / {predicted / 1e12:.1f}",
            f"{whole(published / ONE_GPU)} / {whole(predicted / ONE_GPU)}",
            f"{count * published / 1e15:#.3g} / {count * predicted / 1e15:#.3g}", each.verdict,
        ])  # fmt: skip
    return table(head, rows)


def days_of(each: Timed) -> tuple[float, float]:
    """Return days of an epoch, published and predicted."""
    return each.measured * EPOCH / DAY, each.step.seconds * EPOCH / DAY


def epochs() -> str:
    """Table 2: days of an epoch."""
    head = ("model", "GPUs", "layout", "days: paper / predicted", "80 % interval", "error")
    rows = []
    for each in sorted(named("1909_t2"), key=lambda each: int(each.stated["gpus"])):
        published, predicted = days_of(each)
        low, high = (end * EPOCH / DAY for end in (each.step.low, each.step.high))
        rows.append([each.row.model, f"{_gpus(each):,}", _shape(each), f"{published:.2f} / {predicted:.2f}",
                     f"{low:.2f} to {high:.2f}", each.verdict])  # fmt: skip
    return table(head, rows)


def heads() -> str:
    """Table 7: the number of attention heads."""
    rows = [
        [each.stated["heads"], f"{whole(_efficiency(each))} / {whole(_efficiency(each) * each.ratio)}", *_step(each)]
        for each in sorted(named("1909_t7"), key=lambda each: int(each.stated["heads"]))
    ]
    return table(("heads", "efficiency: paper / predicted", *_STEP), rows)


def strong_scaling() -> str:
    """Table 8: one model on more GPUs."""
    found = sorted(named("1909_t8"), key=lambda each: int(each.stated["gpus"]))
    alone = found[0]
    rows = [
        [each.stated["gpus"],
         f"{alone.measured / each.measured:.2f} / {alone.step.seconds / each.step.seconds:.2f}", *_step(each)]
        for each in found
    ]  # fmt: skip
    return table(("GPUs", "speed-up: paper / predicted", *_STEP), rows)


def a_trillion() -> str:
    """Table 1 of arXiv 2104.04473."""
    head = ("model", "GPUs", "layout", "TFLOP/s per GPU: paper / predicted", *_STEP)
    rows = []
    for each in sorted(named("sc21_t1"), key=lambda each: int(each.stated["gpus"])):
        rate = float(each.stated["tflops_gpu"])
        rows.append([each.row.model, f"{_gpus(each):,}", _shape(each), f"{rate:.0f} / {rate * each.ratio:.0f}",
                     *_step(each)])  # fmt: skip
    return table(head, rows)


def against_zero() -> str:
    """Table 2 of arXiv 2104.04473: days for 300 billion tokens."""
    head = ("parallelism", "model", "GPUs", "samples per microbatch", "days: paper / predicted", *_STEP)
    rows = []
    for each in sorted(named("sc21_t2"), key=lambda each: ("ZeRO" not in each.row.id, _size(each), _gpus(each))):
        stated = each.stated
        days = re.search(r"300B tokens: ([0-9.]+) days", stated["note"])
        assert days is not None
        steps = 300e9 / (float(stated["gbs"]) * float(stated["seq"]))
        kind = "ZeRO-3" if "ZeRO" in each.row.id else "tensor and pipeline"
        rows.append([kind, each.row.model, f"{_gpus(each):,}", stated["mbs"],
                     f"{days[1]} / {steps * each.step.seconds / DAY:.0f}", *_step(each)])  # fmt: skip
    return table(head, rows)


def _size(each: Timed) -> float:
    return float(each.row.model.removeprefix("GPT ").removesuffix("B"))


def _gpus(each: Timed) -> int:
    return int(each.stated["gpus"])


def one_layer() -> str:
    """Table 4 of arXiv 2205.05198: milliseconds of one layer of the model with 22 billion parameters."""
    head = ("recomputation", "sequence parallel", "forward ms: paper / predicted", "error",
            "backward ms: paper / predicted", "error")  # fmt: skip
    rows = []
    for name, stated in stated_rows().items():
        if not name.startswith("2205_t4"):
            continue
        repeated = stated["recompute"].partition(",")[0]
        sharded = "no SP" not in stated["recompute"]
        found = re.search(r"forward ([0-9.]+) ms, backward ([0-9.]+) ms", stated["note"])
        assert found is not None
        cells = [repeated, "yes" if sharded else "no"]
        for published, predicted in zip(map(float, found.groups()), _layer_ms(repeated, sharded), strict=True):
            cells += [f"{published:.1f} / {predicted:.1f}", percent(predicted / published - 1)]
        rows.append(cells)
    return table(head, rows)


def _layer_ms(recompute: str, sequence_parallel: bool) -> tuple[float, float]:
    """Return milliseconds of forward and backward of a layer on 8 A100, tp 8, four samples."""
    config = RunConfig().replaced(
        {
            "model.layers": 48, "model.hidden": 6144, "model.heads": 64, "model.seq_length": 2048,
            "model.attention_backend": "unfused", "model.attention_dropout": 0.1, "model.hidden_dropout": 0.1,
            "model.recompute_granularity": recompute, "parallel.tp": 8, "parallel.sequence_parallel": sequence_parallel,
            "train.micro_batch_size": 4, "train.global_batch_size": 4, "optim.precision": "fp16",
        }
    )  # fmt: skip
    layout = layout_of(Workload(config, 8, software="megatron_2022"))
    passes = layer_passes(config.model, None, layout, load_machine("a100"))
    forward = sum(term.seconds for term in passes.forward)
    backward = sum(term.seconds for term in (*passes.input_grad, *passes.weight_grad, *passes.recompute))
    return forward * 1e3, backward * 1e3


def recomputation() -> str:
    """Table 5 of arXiv 2205.05198, and its run with data parallelism."""
    found = sorted(named("2205_"), key=lambda each: (_gpus(each), "full" not in each.row.id))
    head = ("model", "GPUs", "layout", "recomputation", "MFU %: paper / predicted", *_STEP)
    rows = []
    for each in found:
        stated = each.stated
        share = float(stated["mfu_pct"]) if stated["mfu_pct"] else None
        shares = "" if share is None else f"{share:.1f} / {share * each.ratio:.1f}"
        rows.append([each.row.model, f"{_gpus(each):,}", _shape(each), stated["recompute"].partition(" (")[0], shares,
                     *_step(each)])  # fmt: skip
    return table(head, rows)
