"""Wrong answers to the exercises of chapter 21, with what each believes and words of its score."""

import pytest

from labkit.check.chapter_21 import epoch_days, roofline_seconds, saved_seconds
from labkit.config import presets
from labkit.plan import paper_step_flops

# ---- 21.roofline ----


def flops(m, n, k):
    return 2 * m * n * k


def elements(m, n, k):
    return m * k + k * n + m * n


def longer(arithmetic, moved):
    """An answer that takes the longer of two times, with its own counts of operations and bytes."""
    return lambda m, n, k, e, peak, bandwidth: max(arithmetic(m, n, k) / peak, moved(m, n, k, e) / bandwidth)


ROOFLINE = {
    # Believes in the data sheet: a product is as fast as its peak, however few rows it has.
    "arithmetic": (lambda m, n, k, e, peak, bandwidth: flops(m, n, k) / peak, "the arithmetic alone"),
    "bytes": (lambda m, n, k, e, peak, bandwidth: e * elements(m, n, k) / bandwidth, "the bytes alone"),
    # Adds what overlaps: a kernel loads the next tile while it multiplies the last.
    "sum": (
        lambda m, n, k, e, peak, bandwidth: flops(m, n, k) / peak + e * elements(m, n, k) / bandwidth,
        "not their sum",
    ),
    # Counts multiply-adds, as some CPU benchmarks do; data sheets of GPUs count both halves.
    "one operation": (
        longer(lambda m, n, k: m * n * k, lambda m, n, k, e: e * elements(m, n, k)),
        "an addition are two operations",
    ),
    "elements": (longer(flops, lambda m, n, k, e: elements(m, n, k)), "an element has several"),
    "result": (longer(flops, lambda m, n, k, e: e * (m * k + k * n)), "the result is written"),
    "weights": (longer(flops, lambda m, n, k, e: e * (m * k + m * n)), "the weights come from memory"),
}

# ---- 21.saved ----


def split(share=lambda t: 1 - 1 / t, sent=lambda t: 2 * (t - 1) / t, *, operations=16, element=4, waits=1):
    """An answer with its own share of saved arithmetic, bytes of an all-reduce, and latency."""
    return lambda h, t, tokens, rate, latency, bandwidth: (
        operations * tokens * h**2 / rate * share(t) - waits * latency - sent(t) * element * tokens * h / bandwidth
    )


SAVED = {
    "whole": (split(share=lambda t: 1), "each rank still computes its share"),
    # Takes communication for free, as a strong-scaling plot on a slide does.
    "free": (split(sent=lambda t: 0, waits=0), "before its all-reduce"),
    # Knows the bandwidth from the data sheet and forgets that small messages do not see it.
    "latency": (split(waits=0), "the latency is missing"),
    "one pass": (split(sent=lambda t: (t - 1) / t), "passes the bytes twice"),
    "all of it": (split(sent=lambda t: 2), "not all of it"),
    "once": (split(sent=lambda t: 1), "not the tensor once"),
    "half": (split(share=lambda t: 0.5), "a half only for two"),
    "elements": (split(element=1), "an element has four bytes"),
    "sign": (lambda *case: -saved_seconds(*case), "the sign"),
    "one product": (split(operations=8), "so both have 16"),
}

# ---- 21.days ----


def epoch(passes=lambda again: 3 + again, scores=4, logits=lambda again: 6, seconds=86_400, each=1.0):
    """An answer with its own passes of a layer, and operations of scores and logits."""
    return lambda steps, samples, layers, h, s, vocab, rate, again: (
        each
        * (steps * samples * s / rate / seconds)
        * (passes(again) * layers * (24 * h**2 + scores * s * h) + logits(again) * h * vocab)
    )


DAYS = {
    "forward": (epoch(passes=lambda again: 1, logits=lambda again: 2), "a forward alone"),
    # Reads every TFLOP/s of every paper as model FLOPs.
    "three": (epoch(passes=lambda again: 3), "four passes, not three"),
    "four": (epoch(passes=lambda again: 4), "three passes, not four"),
    "logits again": (epoch(logits=lambda again: 6 + 2 * again), "only the layers are"),
    "scores": (epoch(scores=0), "the scores of attention are missing"),
    "logits": (epoch(logits=lambda again: 0), "the logits are missing"),
    "seconds": (epoch(seconds=1), "these are seconds"),
    "one operation": (epoch(each=0.5), "an addition are two operations"),
}

TABLES = {"21.roofline": ROOFLINE, "21.saved": SAVED, "21.days": DAYS}
RIGHT = {"21.roofline": roofline_seconds, "21.saved": saved_seconds, "21.days": epoch_days}


@pytest.mark.parametrize("again", [False, True])
def test_the_days_are_those_of_the_operations_that_labkit_counts(again):
    model = presets.get("table1_8_3b").override({"model.vocab_size": 51_200}).model
    sizes = model.layers, model.hidden, model.seq_length, model.vocab_size
    expected = 68_507 * paper_step_flops(model, samples=512, recompute=again) / 15.1e15 / 86_400
    assert epoch_days(68_507, 512, *sizes, 15.1e15, again) == pytest.approx(expected, rel=1e-12)
