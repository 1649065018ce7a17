"""Solutions of chapter 21, Scaling laws of the machine."""

from labkit.check.solution_source import solves


@solves("21.roofline")
def seconds(m, n, k, element, peak, bandwidth):
    """The longer of arithmetic and bytes."""
    moved = element * (m * k + k * n + m * n)
    return max(2 * m * n * k / peak, moved / bandwidth)


@solves("21.saved")
def saved(hidden, ranks, tokens, rate, latency, bandwidth):
    """A rank skips (t - 1)/t of the arithmetic, and sends 2 (t - 1)/t of the result."""
    share = 1 - 1 / ranks
    arithmetic = 2 * 2 * tokens * hidden * 4 * hidden / rate
    return arithmetic * share - latency - 2 * share * 4 * tokens * hidden / bandwidth


@solves("21.days")
def days(iterations, samples, layers, hidden, sequence, vocab, rate, recompute):
    """Three passes of everything, and a fourth of the layers if they are recomputed."""
    passes = 4 if recompute else 3
    layer = 24 * hidden**2 + 4 * sequence * hidden
    operations = samples * sequence * (passes * layers * layer + 3 * 2 * hidden * vocab)
    return iterations * operations / rate / 86_400
