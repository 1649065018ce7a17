"""Wrong answers to the exercises of chapter 26, with what each believes and words of its score."""

import math
from statistics import mean, median

import numpy as np

# ---- 26.rounded ----


def rounding(to_step=round, *, least=None, clamp=True, bits=0, flush=False):
    """An answer that rounds a quotient by `to_step`; `bits` more than the format, exponents from `least` on."""

    def answer(x, mantissa, lowest, largest):
        if x == 0:
            return 0.0
        exponent = math.floor(math.log2(abs(x)))
        if flush and exponent < lowest:
            return 0.0
        step = 2.0 ** (max(exponent, lowest if least is None else least) - mantissa - bits)
        found = to_step(x / step) * step
        return max(-largest, min(largest, found)) if clamp else found

    return answer


ROUNDED = {
    # Adds a half and takes the floor.
    "up": (rounding(lambda q: math.floor(q + 0.5)), "a middle goes up"),
    "away": (rounding(lambda q: math.copysign(math.floor(abs(q) + 0.5), q)), "away from 0"),
    "cut": (rounding(math.trunc), "cut off"),
    "not held": (rounding(clamp=False), "isn't held at the largest"),
    # Knows normal numbers only.
    "endless": (rounding(least=-99), "don't get smaller any more"),
    "flushed": (rounding(flush=True), "subnormal"),
    "leading bit": (rounding(bits=-1), "after the leading one"),
    "a bit too many": (rounding(bits=1), "the leading bit isn't among"),
}

# ---- 26.guess ----

GUESS = {
    "largest": (max, "still remembers the outlier"),
    "most recent": (lambda history: history[0], "where is your reserve"),
    "twice the largest": (lambda history: 2 * max(history), "still remembers the outlier"),
    "mean": (mean, "where is your reserve"),
    # Takes the middle of all steps, which is eight steps late.
    "median of all": (lambda history: 4 * median(history), "where is your reserve"),
    "huge": (lambda history: 2.0**20, "so large that small values become 0"),
    "zero": (lambda history: 0.0, "divided by"),
}

# ---- 26.blocks ----


def of_blocks(*, a_scaled=True, b_scaled=True, times=False, mean_scale=False, only_last=False):
    def answer(a, a_scale, b, b_scale, block):
        a_scale = a_scale if a_scaled else np.ones_like(a_scale)
        b_scale = b_scale if b_scaled else np.ones_like(b_scale)
        if mean_scale:
            return a @ b.T / np.outer(a_scale.mean(1), b_scale.mean(1))
        total = np.zeros((len(a), len(b)))
        for j in range(a.shape[1] // block):
            k, scale = slice(j * block, (j + 1) * block), np.outer(a_scale[:, j], b_scale[:, j])
            part = a[:, k] @ b[:, k].T
            part = part * scale if times else part / scale
            total = part if only_last else total + part
        return total

    return answer


BLOCKS = {
    "first block": (
        lambda a, sa, b, sb, block: a @ b.T / np.outer(sa[:, 0], sb[:, 0]),
        "the first block are taken for all",
    ),
    "mean": (of_blocks(mean_scale=True), "a mean of the scales"),
    "multiplied": (of_blocks(times=True), "multiplied by the scales"),
    "without b": (of_blocks(b_scaled=False), "b's scales are missing"),
    "without a": (of_blocks(a_scaled=False), "a's scales are missing"),
    "no scale": (lambda a, sa, b, sb, block: a @ b.T, "no scale is taken away"),
    # Overwrites instead of adding.
    "last block": (of_blocks(only_last=True), "only the last block"),
    "first row": (
        lambda a, sa, b, sb, block: of_blocks()(a, sa[:1].repeat(len(a), 0), b, sb, block),
        "scale of its first row",
    ),
}

# ---- 26.places ----


def placed(room, *, before=False):
    """An answer that gives each expert `room(count, counts, alignment)` rows."""

    def answer(counts, alignment):
        found, start = [], 0
        for count in counts:
            size = room(count, counts, alignment)
            first = start + size - count if before else start
            found += range(first, first + count)
            start += size
        return found, start

    return answer


def up(count, counts, alignment):
    return -(-count // alignment) * alignment


PLACES = {
    "none": (placed(lambda count, counts, alignment: count), "no expert is filled up"),
    "at the end": (
        lambda counts, alignment: (list(range(sum(counts))), up(sum(counts), counts, alignment)),
        "once, at the end",
    ),
    "empty expert": (placed(lambda *case: max(case[2], up(*case))), "an expert without rows"),
    "capacity": (
        placed(lambda count, counts, alignment: up(max(counts), counts, alignment)),
        "as many rows as the largest",
    ),
    "one more": (placed(lambda count, counts, alignment: (count // alignment + 1) * alignment), "a multiple already"),
    "before": (placed(up, before=True), "before an expert's rows"),
}

TABLES = {"26.rounded": ROUNDED, "26.guess": GUESS, "26.blocks": BLOCKS, "26.places": PLACES}
RIGHT = {
    "26.rounded": rounding(),
    "26.guess": lambda history: 4 * sorted(history[:3])[len(history[:3]) // 2],
    "26.blocks": of_blocks(),
    "26.places": placed(up),
}


def test_places_are_those_of_labkit():
    import torch

    from labkit.moe.grouped_gemm import Segments

    for counts in ([3, 5], [16, 1, 0, 17], [0, 4]):
        segments = Segments(torch.tensor(counts))
        rows = torch.arange(1.0, sum(counts) + 1)[:, None]
        found = segments.spread(rows, segments.aligned())[:, 0].tolist()
        places, total = placed(up)(counts, 16)
        assert len(found) == total
        assert [found[place] for place in places] == rows[:, 0].tolist()
