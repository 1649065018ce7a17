"""Wrong answers to the exercises of chapter 03, with what each believes and words of its score."""

import json
import re
from pathlib import Path

import numpy as np

from labkit.check import score

# ---- 03.parts ----


def split(first, second, *, rank_of=lambda rank: rank):
    """An answer that cuts fc1 and fc2 along these axes; None leaves a weight whole."""

    def parts(fc1, fc2, rank, t):
        return [w if axis is None else np.split(w, t, axis)[rank_of(rank)] for w, axis in ((fc1, first), (fc2, second))]

    return parts


PARTS = {
    # Cuts what torch stores as if it were A and B themselves, so A loses rows and B columns.
    "transposed": (split(1, 0), "torch stores the transpose of A and of B"),
    # Cuts both along dimension 0, as if every weight were cut alike.
    "both by columns": (split(0, 0), "this cuts B by columns"),
    "both by rows": (split(1, 1), "partial sums meet the GeLU"),
    "fc2 whole": (split(0, None), "fc2 is whole"),
    "fc1 whole": (split(None, 1), "fc1 is whole"),
    "nothing cut": (split(None, None), "nothing is cut"),
    "rank 0": (split(0, 1, rank_of=lambda rank: 0), "every rank gets the part of rank 0"),
    # Deals the columns out one by one; the sum is right, but the parts do not fit Megatron's checkpoints.
    "strided": (lambda fc1, fc2, rank, t: (fc1[rank::t], fc2[:, rank::t]), "neighbouring columns"),
}

# ---- 03.f_and_g ----


def mlp(*, g="sum", f="sum", bias="once", dy="whole", mask=True, weights="own", dbias="tokens"):
    """An MLP over ranks; an argument that is not its default is a misunderstanding."""

    def answer(x, grad, A, B, b, all_reduce):
        t = len(A)

        def reduced(parts, how):
            if how == "none":
                return parts
            total = all_reduce(parts)
            total = [each / t for each in total] if how == "mean" else total
            return [total[0], *parts[1:]] if how == "first" else all_reduce(total) if how == "twice" else total

        inner = [np.maximum(x @ a.T, 0) for a in A]
        y = reduced([h @ w.T + b * (bias == "each") for h, w in zip(inner, B)], g)
        y = [each + b * (bias == "once") for each in y]
        grads = all_reduce([grad] * t) if dy == "summed" else [grad] * t
        d_inner = [(d @ w) * ((h > 0) if mask else 1) for d, w, h in zip(grads, B, inner)]
        dx = reduced([d @ a for d, a in zip(d_inner, A)], f)
        dA, dB = [d.T @ x for d in d_inner], [d.T @ h for d, h in zip(grads, inner)]
        how = {"own": "none", "summed": "sum", "averaged": "mean"}[weights]
        dA, dB = (reduced(each, how) for each in (dA, dB))
        own = {"tokens": lambda d: d.sum(0), "kept": lambda d: d, "divided": lambda d: d.sum(0) / t}[dbias]
        return y, dx, dA, dB, [own(d) for d in grads]

    return answer


MLPS = {
    "no g": (mlp(g="none"), "each rank keeps its partial sum"),
    "g is a mean": (mlp(g="mean"), "g is a sum over ranks, not a mean"),
    "g for rank 0": (mlp(g="first"), "only rank 0 has the sum"),
    # Adds the bias on every rank before g, so that the sum contains it tp times.
    "bias on each rank": (mlp(bias="each"), "the sum holds it t times"),
    "no bias": (mlp(bias="none"), "the bias is missing"),
    # Believes that g reduces in both directions: gradients that all ranks already hold alike are added up tp times.
    "dy summed": (mlp(dy="summed"), "every rank holds dy whole"),
    # Forgets f: the output is right, but each rank keeps only its own share of the input gradient.
    "no f": (mlp(f="none"), "f is missing"),
    "f is a mean": (mlp(f="mean"), "f is a sum over ranks, not a mean"),
    "f twice, with a summed dy": (mlp(f="twice", dy="summed"), "f's sum is taken twice"),
    "no mask": (mlp(mask=False), "the gradient of relu is missing"),
    "weights summed": (mlp(weights="summed"), "gradients of different parts are added"),
    # Takes the ranks for replicas of data parallelism.
    "weights averaged": (mlp(weights="averaged"), "as if the ranks were replicas"),
    "tokens kept": (mlp(dbias="kept"), "not summed over the tokens"),
    "dbias divided": (mlp(dbias="divided"), "its gradient is not divided by t"),
    "no result": (lambda x, dy, A, B, bias, _: (None,) * 5, "there is no result yet"),
    "four lists": (lambda x, dy, A, B, bias, _: ([], [], [], []), "it returns five lists"),
    "one sum for all": (lambda x, dy, A, B, bias, reduce: reduce([x]), "all_reduce takes a list"),
}

# ---- 03.plan ----


def plan(first, second, *, f=("f",)):
    """Makes everything whole after each product, unless a misunderstanding is given."""
    before = list(f) if first == "column" else ["split"]
    whole = ["gather"] if first == "column" else ["g"]
    return [before, whole, ["f"] if second == "column" else ["split"], ["gather"] if second == "column" else ["g"]]


def changed(slot, operators):
    """The wasteful plan with another slot."""

    def answer(first, second):
        slots = plan(first, second)
        slots[slot] = list(operators)
        return slots

    return answer


BEST = {
    ("column", "row"): [["f"], [], [], ["g"]],
    ("row", "row"): [["split"], ["g_split"], [], ["g"]],
    ("column", "column"): [["f"], [], ["gather_f"], ["gather"]],
    ("row", "column"): [["split"], ["g_split"], ["gather_f"], ["gather"]],
}
PLANS = {
    "always whole": (plan, "an all-reduce whose result is then cut"),
    "late sum": (changed(1, []), "the GeLU meets a partial sum"),
    "no f": (lambda first, second: plan(first, second, f=()), "f is missing"),
    "f twice": (lambda first, second: plan(first, second, f=("f", "f")), "t times too large"),
    "no end": (changed(3, []), "every rank needs it whole"),
    "a word": (lambda first, second: "f g", "a plan is four lists"),
    "another operator": (changed(0, ["all_reduce"]), "is no operator"),
}

TABLES = {"03.parts": PARTS, "03.f_and_g": MLPS, "03.plan": PLANS}
RIGHT = {"03.parts": split(0, 1), "03.f_and_g": mlp(), "03.plan": lambda first, second: BEST[first, second]}


def test_all_reduces_are_not_counted_in_a_group_of_one():
    """An answer that never talks is right for one rank."""
    found = score("03.f_and_g", lambda *case: mlp()(*case[:-1], list))
    failed = [outcome.given for outcome in found.outcomes if not outcome.passed]
    assert failed == [
        f"tp {tp}, {of}" for tp in (2, 4) for of in ("y on every rank", "dx on every rank", "the number of all-reduces")
    ]


def test_the_stored_timelines_show_what_the_text_says():
    """f hides dA in the last line, and both together take less time than one after the other."""
    cells = json.loads((Path(__file__).parents[3] / "notebooks/03_f_and_g.ipynb").read_text())["cells"]
    (cell,) = [cell for cell in cells if "viz.layer_timelines(runs)" in "".join(cell["source"])]
    said = re.findall(r"([\d.]+) ms, of which ([\d.]+)", "".join(cell["outputs"][0]["data"]["text/plain"]))
    (g, g_waits), (after, after_waits), (hidden, hidden_waits) = (map(float, line) for line in said)
    assert min(g_waits, after_waits) >= 100, "in the first two lines a rank waits for the whole message"
    assert g > g_waits and after > after_waits
    assert hidden < after - 5 and hidden_waits < after_waits - 5
