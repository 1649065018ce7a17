"""Wrong answers to the exercises of chapter 06, with what each believes and words of its score."""

import numpy as np

# ---- 06.shapes ----


def shapes(s, b, h, t, split):
    between, inside = [s // t if split else s, b, h], [s, b, 4 * h // t]
    names = {"norm input": between, "fc1 input": between, "dropout mask": between}
    return names | {"gelu input": inside, "fc2 input": inside}


def cut(*names, change=lambda s, b, h, t: {}):
    """An answer that cuts the positions of these tensors alone, with a change under sequence parallelism."""

    def answer(s, b, h, t, split):
        found = shapes(s, b, h, t, False)
        return found | {name: [s // t, b, h] for name in names} | change(s, b, h, t) if split else found

    return answer


BETWEEN = ("norm input", "fc1 input", "dropout mask")
SHAPES = {
    "always": (lambda s, b, h, t, split: shapes(s, b, h, t, True), "only sequence parallelism cuts these"),
    "nothing": (cut(), "nothing has changed"),
    # Keeps the gathered input of fc1, as an ordinary product does: a tensor between the regions stays whole.
    "fc1": (cut("norm input", "dropout mask"), "fc1 keeps the gathered input"),
    "mask": (cut("norm input", "fc1 input"), "the mask has as many positions"),
    "only mask": (cut("dropout mask"), "only the mask is cut"),
    # Cuts the width between the regions, but a norm needs the whole row of a position.
    "width": (
        cut(change=lambda s, b, h, t: {name: [s, b, h // t] for name in BETWEEN}),
        "a norm needs whole rows",
    ),
    # Cuts the positions inside the regions as well, where a rank has all of them and a part of the width.
    "twice": (
        cut(*BETWEEN, change=lambda s, b, h, t: {n: [s // t, b, 4 * h // t] for n in ("gelu input", "fc2 input")}),
        "positions and width are cut inside",
    ),
}

# ---- 06.sequence ----


def block(*, enter=True, leave="scatter", dy_whole=True, d="scatter", dgain="sum", dx="gain", dA="whole"):
    """One rank's program; an argument that is not its default is a misunderstanding."""

    def answer(x, dy, gain, A, B, tp):
        def own(a):
            return np.split(a, tp.size)[tp.rank]

        reduce = {"scatter": tp.reduce_scatter, "own": own, "none": lambda a: a}
        scaled = tp.all_gather(x * gain) if enter else x * gain
        inner = np.maximum(scaled @ A.T, 0)
        y = reduce[leave](inner @ B.T)
        d_inner = ((tp.all_gather(dy) if dy_whole else dy) @ B) * (inner > 0)
        d_scaled = reduce[d](d_inner @ A)
        found = (d_scaled * x).sum(0)
        found = found if dgain == "own" else tp.all_reduce(found)
        found = tp.all_reduce(found) if dgain == "twice" else found / tp.size if dgain == "mean" else found
        dx_own = d_scaled * (gain if dx == "gain" else 1)
        if dA == "own":
            return y, dx_own, found, own(d_inner).T @ (x * gain)
        return y, dx_own, found, d_inner.T @ (scaled / gain if dA == "no gain" else scaled)

    return answer


def uneven(x, dy, gain, A, B, tp):
    """Rank 0 alone calls a collective."""
    return tp.all_gather(x) if tp.rank == 0 else x, x, gain, A


SEQUENCE = {
    "no gather": (block(enter=False, leave="none", dy_whole=False, d="none"), "gather before A, and add up after B"),
    "backward of it": (block(enter=False, leave="none", dy_whole=False, d="none"), "gather dy before B"),
    "own part of y": (block(leave="own"), "gather before A, and add up after B"),
    # Takes its own positions out of the gathered gradient instead of reduce-scattering: the gradient of one rank's
    # columns of A, not the sum over all.
    "own part of dx": (block(d="own"), "gather dy before B, and add up after A"),
    "no gain": (block(dx="none"), "the gain is left out"),
    # Leaves the gain's gradient as it is: each rank knows its own positions alone, and the gains drift apart.
    "own gain": (block(dgain="own"), "the gains drift apart"),
    # Takes a mean of the gain's gradients, as one does over replicas.
    "mean": (block(dgain="mean"), "too small by the number of ranks"),
    "twice": (block(dgain="twice"), "too large by the number of ranks"),
    # Uses what the rank has without a gather: its own positions. A has met all of them.
    "own dA": (block(dA="own"), "the sum over one rank's positions"),
    "dA of x": (block(dA="no gain"), "the input of A is x gain, not x"),
    "whole y": (block(leave="none"), "the shape of y is wrong"),
    "stall": (uneven, "rank 0 is in all_gather and rank 1 in return: they deadlock"),
}

# ---- 06.seeds ----


def seed(*, common=lambda place, split: place == "between" and not split, tp=1, pp=100, own=2718):
    return lambda place, t, p, split: 1234 + pp * p + (0 if common(place, split) else own + tp * t)


SEEDS = {
    # Gives each rank its own state everywhere: without sequence parallelism the ranks' hidden states diverge.
    "own": (seed(common=lambda place, split: False), "they hold the same values, which then diverge"),
    "common": (seed(common=lambda place, split: True), "which are then dropped together"),
    # Forgets that sequence parallelism changes what a rank holds between the regions: other positions, one mask.
    "sp": (seed(common=lambda place, split: place == "between"), "which are then dropped together"),
    "stages": (seed(pp=0), "let the seed depend on the stage"),
    # Adds the two ranks up, so that neighbours in both share a seed.
    "sum": (seed(pp=1), "the sum of two ranks is not unique"),
    "rank 0": (seed(own=0), "a rank's own state repeats a common one"),
}

TABLES = {"06.shapes": SHAPES, "06.sequence": SEQUENCE, "06.seeds": SEEDS}
