"""Exercises of chapter 21: the time of a product, what a split saves, the days of an epoch.

`roofline_seconds`, `saved_seconds` and `epoch_days` are the right answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from labkit.check.scoring import Misreadings, Outcome, asked, close, exercise

_CLOSE = close(rtol=1e-6)
DAY = 86_400

# ---- a product ----

_MACHINES = ((100e9, 20e9), (125e12, 0.9e12), (990e12, 3.35e12))
"""(FLOP/s, bytes/s)."""
_PRODUCTS = tuple(
    (m, n, k, element, *machine)
    for m, n, k, element, machine in (
        (1, 1024, 1024, 4, _MACHINES[0]),
        (512, 1024, 1024, 4, _MACHINES[0]),
        (8, 12288, 3072, 2, _MACHINES[1]),
        (8192, 12288, 3072, 2, _MACHINES[1]),
        (4096, 4096, 32, 2, _MACHINES[2]),
    )
)
"""(m, n, k, bytes of an element, FLOP/s, bytes/s)."""


def roofline_seconds(m: int, n: int, k: int, element: int, peak: float, bandwidth: float) -> float:
    """Return the seconds of a product [m, k] x [k, n] by the roofline (Williams and others, CACM 2009)."""
    return max(2 * m * n * k / peak, element * (m * k + k * n + m * n) / bandwidth)


@exercise("21.roofline", "Write seconds(m, n, k, element, peak, bandwidth) -> the time of a product by the roofline.")
def roofline(answer: Any) -> Iterator[Outcome]:
    """Judge products that memory limits and products that arithmetic limits, on three machines."""
    return asked(
        _PRODUCTS,
        given="[{}, k] x [k, {}], k {}, {} bytes each, {:.3g} FLOP/s, {:.3g} bytes/s".format,
        right=roofline_seconds,
        tried=lambda *case: float(answer(*case)),
        misread=_misread_roofline,
        equal=_CLOSE,
    )


def _misread_roofline(m: int, n: int, k: int, element: int, peak: float, bandwidth: float) -> Misreadings:
    flops, elements = 2 * m * n * k, m * k + k * n + m * n
    moved = element * elements
    return {
        "this counts the arithmetic alone; the bytes need time, too": flops / peak,
        "this counts the bytes alone; the arithmetic needs time, too": moved / bandwidth,
        "the two go on at the same time, so the longer one counts, not their sum": flops / peak + moved / bandwidth,
        "a multiplication and an addition are two operations": max(m * n * k / peak, moved / bandwidth),
        "bandwidth is in bytes per second; an element has several": max(flops / peak, elements / bandwidth),
        "the result is written to memory as well": max(flops / peak, element * (m * k + k * n) / bandwidth),
        "the weights come from memory as well": max(flops / peak, element * (m * k + m * n) / bandwidth),
    }


# ---- what a split saves ----

_SPLITS = (
    (48, 2, 128, 100e9, 2e-4, 1e9),
    (1024, 2, 128, 100e9, 2e-4, 1e9),
    (3072, 8, 8192, 60e12, 5e-5, 134e9),
    (3072, 4, 8192, 400e12, 4e-5, 365e9),
    (3072, 16, 1024, 400e12, 1e-4, 47e9),
)
"""(hidden size, ranks, tokens, FLOP/s, latency, bytes/s)."""


def saved_seconds(hidden: int, ranks: int, tokens: int, rate: float, latency: float, bandwidth: float) -> float:
    """Return the seconds that a tensor-parallel MLP saves in forward: less arithmetic, and one all-reduce more."""
    arithmetic = 16 * tokens * hidden**2 / rate
    all_reduce = latency + 2 * (ranks - 1) / ranks * 4 * tokens * hidden / bandwidth
    return arithmetic * (1 - 1 / ranks) - all_reduce


@exercise("21.saved", "Write saved(hidden, ranks, tokens, rate, latency, bandwidth) -> what tensor parallelism saves.")
def saved(answer: Any) -> Iterator[Outcome]:
    """Judge splits that lose and splits that pay, over two to sixteen ranks."""
    return asked(
        _SPLITS,
        given="hidden {}, {} ranks, {} tokens, {:.3g} FLOP/s, latency {:.3g} s, {:.3g} bytes/s".format,
        right=saved_seconds,
        tried=lambda *case: float(answer(*case)),
        misread=_misread_saved,
        equal=_CLOSE,
    )


def _misread_saved(hidden: int, ranks: int, tokens: int, rate: float, latency: float, bandwidth: float) -> Misreadings:
    whole, share = 16 * tokens * hidden**2 / rate, 1 - 1 / ranks
    size = 4 * tokens * hidden
    sent = 2 * share * size / bandwidth
    return {
        "the split saves no whole MLP: each rank still computes its share": whole - latency - sent,
        "this is what the split saves before its all-reduce": whole * share,
        "an empty message takes time as well: the latency is missing": whole * share - sent,
        "an all-reduce passes the bytes twice, as a reduce-scatter and an all-gather": whole * share
        - latency
        - sent / 2,
        "in a ring a rank sends (t - 1)/t of the tensor, not all of it, in each of two passes": whole * share
        - latency
        - 2 * size / bandwidth,
        "a rank sends 2 (t - 1)/t of the tensor, not the tensor once": whole * share - latency - size / bandwidth,
        "t ranks save (t - 1)/t of the arithmetic, which is a half only for two": whole / 2 - latency - sent,
        "an element has four bytes": whole * share - latency - sent / 4,
        "the sign: positive is what the split saves": latency + sent - whole * share,
        "each of the two products has 8 T h^2 operations, so both have 16": whole / 2 * share - latency - sent,
    }


# ---- the days of an epoch ----

_RUNS = (
    (1_000, 64, 24, 1024, 1024, 32_768, 1e15, True),
    (1_000, 64, 24, 1024, 1024, 32_768, 1e15, False),
    (20_000, 512, 54, 1920, 1024, 51_200, 4.1e15, True),
    (1_000, 64, 24, 1024, 2048, 32_768, 1e15, False),
)
"""(iterations, samples, layers, hidden size, sequence, vocabulary, FLOP/s of all GPUs, every layer is recomputed)."""


def epoch_days(
    iterations: int, samples: int, layers: int, hidden: int, sequence: int, vocab: int, rate: float, recompute: bool
) -> float:
    """Return the days of an epoch by the operations of arXiv 2104.04473, section 5.1."""
    return iterations * _operations(samples, layers, hidden, sequence, vocab, 4 if recompute else 3) / rate / DAY


def _operations(samples: int, layers: int, hidden: int, sequence: int, vocab: int, passes: int) -> float:
    """Return operations of a step whose layers compute `passes` forwards: one, two in backward, and perhaps one again.

    A layer's weights take 24 h^2 per token and pass, its scores 4 s h. The logits are never computed again.
    """
    tokens = samples * sequence
    layer = 24 * hidden**2 + 4 * sequence * hidden
    return tokens * (passes * layers * layer + 3 * 2 * hidden * vocab)


@exercise(
    "21.days",
    "Write days(iterations, samples, layers, hidden, sequence, vocab, rate, recompute) -> the days of an epoch.",
)
def days(answer: Any) -> Iterator[Outcome]:
    """Judge a small model with and without recomputation, the 2.5B model, and one with longer sequences."""
    return asked(
        _RUNS,
        given="{} steps of {} samples, {} layers, hidden {}, {} tokens, {} words, {:.3g} FLOP/s, recompute {}".format,
        right=epoch_days,
        tried=lambda *case: float(answer(*case)),
        misread=_misread_days,
        equal=_CLOSE,
    )


def _misread_days(
    iterations: int, samples: int, layers: int, hidden: int, sequence: int, vocab: int, rate: float, recompute: bool
) -> Misreadings:
    passes = 4 if recompute else 3
    tokens, factor = samples * sequence, iterations / rate / DAY
    sizes = samples, layers, hidden, sequence, vocab
    right, logits = _operations(*sizes, passes), 2 * tokens * hidden * vocab
    return {
        "this counts a forward alone; backward takes two more": factor * (_operations(*sizes, 1) - 2 * logits),
        "a recomputed layer runs forward twice: four passes, not three": factor * _operations(*sizes, 3),
        "without recomputation a layer costs three passes, not four": factor * _operations(*sizes, 4),
        "the logits are not computed again, only the layers are": factor * (right + (passes - 3) * logits),
        "the scores of attention are missing, 4 s h per token and pass": factor
        * (right - tokens * passes * layers * 4 * sequence * hidden),
        "the logits are missing, 6 h V per token": factor * (right - 3 * logits),
        "these are seconds; a day has 86,400": factor * DAY * right,
        "a multiplication and an addition are two operations": factor * right / 2,
    }
