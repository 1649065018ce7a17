"""The measured samples as the mapping of a machine's file (`labkit.plan.machine`), and the file's text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from labkit.train.calibration.rank import Samples
from labkit.train.calibration.timing import Sample

FORMULAS = 0.10
"""Relative error of the formulas alone, with exact constants (assumed; `benchmarks/plan_on_cpu.py` tells)."""


@dataclass(frozen=True)
class Host:
    """What the machine is, without a measurement."""

    name: str
    """Its own name."""
    processor: str
    """Model of the CPU or the GPU."""
    units: int
    """Cores of a rank, or SMs of its GPU."""
    memory_bytes: int
    """Memory of a rank."""
    device: str
    """`cpu` or `cuda`."""
    ranks: int
    """Ranks that measured."""
    backend: str
    """gloo or NCCL."""


def machine_values(host: Host, samples: Samples, source: str) -> dict[str, Any]:
    """Return the constants of a machine. Launches and the host's part of a step, 0 here, are measured with it."""
    products = _by_kind(samples, "products")
    peaks = {dtype: max(sample.value for _, sample in rows) for dtype, rows in products.items()}
    main = next(iter(peaks))
    copy = samples["memory", "copy"]
    rates = {str(key[1]): sample for key, sample in samples.items() if key[0] == "memory" and key[1] != "copy"}
    assumed = {"value": 1.0, "source": "the peak, or the rate, is what was measured"}
    attention = {
        way: _constant(_share(samples["attention", way], peaks[main]), source) for way in ("forward", "backward")
    }
    return {
        "name": host.name,
        "gpu": host.processor,
        "default_software": "labkit_cpu" if host.device == "cpu" else "megatron_core",
        "sms": {"value": host.units, "source": "this machine"},
        "memory_bytes": {"value": host.memory_bytes, "source": "this machine, shared by its ranks"},
        "memory_bandwidth": _constant(copy, source),
        "memory_efficiency": assumed,
        "memory_rates": {kind: _constant(_over(sample, copy), source) for kind, sample in rates.items()},
        "peak_flops": {dtype: {"value": _rounded(peak), "source": source} for dtype, peak in peaks.items()},
        "gemm_ceiling": dict.fromkeys(peaks, assumed),
        "gemm_depth": {"value": 0, "source": "in the products"},
        "weight_gradient_efficiency": _constant(_share(samples["weight gradient",], 1.0), source),
        "attention_ceiling": attention,
        "kernel_launch": {"value": 0, "source": "in the host's launches"},
        "host_launch": {"value": 0, "source": "in the gaps between kernels"},
        "software": {
            "default": assumed,
            "default attention": assumed,
            "default host": {"value": 0, "source": "not measured"},
        },
        "interval": {"default": _interval(samples)},
        "products": {
            dtype: {"source": source, "rows": [_product(key, sample, peaks[dtype]) for key, sample in rows]}
            for dtype, rows in products.items()
        },
        "levels": [_level(host, samples, source)],
    }


def _by_kind(samples: Samples, what: str) -> dict[str, list[tuple[tuple[Any, ...], Sample]]]:
    """Return the samples of `what`, by their second key, with the rest of it."""
    found: dict[str, list[tuple[tuple[Any, ...], Sample]]] = {}
    for key, sample in samples.items():
        if key[0] == what:
            found.setdefault(str(key[1]), []).append((key[2:], sample))
    return found


def _product(shape: tuple[Any, ...], sample: Sample, peak: float) -> dict[str, Any]:
    m, n, k = shape
    return {"m": m, "n": n, "k": k, "efficiency": _rounded(sample.value / peak), "spread": _rounded(sample.spread)}


def _level(host: Host, samples: Samples, source: str) -> dict[str, Any]:
    """Return the level of the network: its curves, and from them constants for what has none."""
    curves = _by_kind(samples, "transfers")
    level: dict[str, Any] = {
        "name": f"{host.backend} between ranks of this machine",
        "ranks": {"value": math.inf, "source": "no other level was measured"},
    }
    if not curves:
        alone = {"value": 0, "source": "one rank: nothing was measured"}
        level |= {"bandwidth": {"value": 1e9, "source": "assumed: one rank"}, "latency": alone}
    else:
        (_, fastest), (size, largest) = curves["p2p"][0], curves["all_gather"][-1]
        moved = size[0] * (host.ranks - 1) / host.ranks
        level |= {"bandwidth": _constant(largest.inverted(moved), source), "latency": _constant(fastest, source)}
    nothing = {"value": 0, "source": "in the measured times"}
    level |= {"hop": nothing, "ramp": nothing}
    if host.ranks == 2:
        level["measured"] = {
            kind: {
                "source": source,
                "rows": [
                    {"bytes": size, "seconds": _rounded(sample.value), "spread": _rounded(sample.spread)}
                    for (size,), sample in rows
                ],
            }
            for kind, rows in curves.items()
        }
    return level


def _interval(samples: Samples) -> dict[str, Any]:
    """Return the half width of a prediction's interval: the error of the formulas, and the mean of typical spreads."""
    spreads = typical_spreads(samples)
    width = math.hypot(FORMULAS, statistics.fmean(spreads.values()))
    listed = ", ".join(f"{kind} {spread:.2f}" for kind, spread in spreads.items())
    source = f"{FORMULAS:g} for the formulas (assumed), and the mean of the spreads of {listed}"
    return {"value": _rounded(width), "source": source}


def typical_spreads(samples: Samples) -> dict[str, float]:
    """Return the median spread of products, of kernels that move bytes, and of transfers."""
    kinds: dict[str, list[float]] = {kind: [] for kind in ("products", "memory", "transfers")}
    for key, sample in samples.items():
        if key[0] in kinds:
            kinds[str(key[0])].append(sample.spread)
    return {kind: statistics.median(spreads) for kind, spreads in kinds.items() if spreads}


def _constant(sample: Sample, source: str) -> dict[str, Any]:
    return {"value": _rounded(sample.value), "spread": _rounded(sample.spread), "source": source}


def _over(sample: Sample, other: Sample) -> Sample:
    return Sample(sample.value / other.value, sample.spread)


def _share(sample: Sample, whole: float) -> Sample:
    """Return the sample as a share of `whole`, at most all of it."""
    return Sample(min(1.0, sample.value / whole), sample.spread)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def text_of(values: dict[str, Any], notes: Sequence[str]) -> str:
    """Return the file's text: notes as comments, then each constant and each row on a line of its own."""
    head = "".join(f"# {note}\n" for note in notes)
    return head + yaml.dump(values, Dumper=_WithoutAliases, sort_keys=False, default_flow_style=None, width=1 << 20)


class _WithoutAliases(yaml.SafeDumper):
    """Writes an equal constant again where it occurs again."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
