"""Wrong answers to the exercises of chapter 04, with what each believes and words of its score."""

import numpy as np

from labkit.check import score

# ---- 04.lookup ----


def places(local, own):
    """An answer that reads row `local(place, rows, id)` of its part, or zeros unless `own(place, rows, id)`."""

    def lookup(ids, part, rank):
        rows = len(part)
        found = [(each - rank * rows, each) for each in ids]
        return [part[local(p, rows, i)] if own(p, rows, i) else 0 * part[0] for p, i in found]

    return lookup


def inside(place, rows, _):
    return 0 <= place < rows


def here(place, rows, _):
    return place


LOOKUPS = {
    # Sends foreign ids to row 0, where a lookup is allowed, and forgets to take its result away.
    "row 0": (places(lambda p, n, i: p if 0 <= p < n else 0, lambda *_: True), "reads row 0 of this part"),
    "nearest": (places(lambda p, n, i: min(max(p, 0), n - 1), lambda *_: True), "reads its nearest row"),
    # Asks only for ids beyond the part: a negative place is no error in NumPy, but a row from the end.
    "negative": (places(here, lambda p, n, i: -n <= p < n), "counts from the end of the part"),
    "modulo": (places(lambda p, n, i: i % n, lambda *_: True), "modulo its rows"),
    "no start": (places(lambda p, n, i: i, lambda p, n, i: i < n), "subtract this number"),
    "row 0 is lost": (places(here, lambda p, n, i: 0 < p < n), "row 0 of the part is a real row"),
    # Leaves out the tokens of other ranks: an all-reduce adds tensors of one shape, place by place.
    "left out": (
        lambda ids, part, rank: [part[i - rank * len(part)] for i in ids if 0 <= i - rank * len(part) < len(part)],
        "are left out",
    ),
}

# ---- 04.loss ----


def of_label(logits, labels, zeros=True):
    for rank, part in enumerate(logits):
        local = labels - rank * part.shape[1]
        own = (local >= 0) & (local < part.shape[1])
        picked = part[range(len(part)), np.where(own, local, 0)]
        yield own * picked if zeros else picked


def losses(*, top="all", total="all", label="all", padding=False, restore=True, sign=1):
    """A loss over ranks; an argument that is not its default is a misunderstanding."""

    def answer(logits, labels, columns, all_reduce):
        real = logits if padding else [part[:, :n] for part, n in zip(logits, columns)]
        own_top = [part.max(1) for part in real]
        shared = all_reduce(own_top, "max")
        one = [np.full_like(each, each.max()) for each in shared]
        tops = {"all": shared, "one": one, "own": own_top, "none": [0 * each for each in own_top]}[top]
        sums = [np.exp(part - most[:, None]).sum(1) for part, most in zip(real, tops)]
        if total == "logs":
            logs = all_reduce([np.log(each) + most for each, most in zip(sums, tops)], "sum")
        else:
            sums = sums if total == "own" else all_reduce(sums, "sum")
            logs = [np.log(each) + restore * most for each, most in zip(sums, tops)]
        targets = list(of_label(logits, labels, label != "unmasked"))
        targets = targets if label == "own" else all_reduce(targets, "max" if label == "max" else "sum")
        return [sign * (log - target) for log, target in zip(logs, targets)]

    return answer


def different_scales(logits, labels, columns, all_reduce):
    real = [part[:, :n] for part, n in zip(logits, columns)]
    tops = all_reduce([part.max(1) for part in real], "max")
    sums = all_reduce([np.exp(part - part.max(1)[:, None]).sum(1) for part in real], "sum")
    targets = all_reduce(list(of_label(logits, labels)), "sum")
    return [np.log(each) + most - target for each, most, target in zip(sums, tops, targets)]


LOSSES = {
    # Trusts exp: without a maximum it overflows beyond 709 in float64, and beyond 88 in float32.
    "no maximum": (losses(top="none"), "subtract the largest logit of all ranks first"),
    # Lets each rank subtract its own maximum and adds the sums as they are, which have different scales.
    "different scales": (different_scales, "have different scales"),
    "one maximum": (losses(top="one"), "one number is subtracted for all tokens"),
    "own maximum": (losses(top="own"), "subtracts and adds its own maximum"),
    "logarithms": (losses(total="logs"), "logarithms are added"),
    "own columns": (losses(total="own"), "softmax over its own columns"),
    "not restored": (losses(restore=False), "inside the sum alone"),
    # Counts the padding as words: a column of zeros adds exp(0) to the sum, and its share depends on tp.
    "padding": (losses(padding=True), "padding columns count"),
    "own label": (losses(label="own"), "the owner's logit must reach all ranks"),
    "largest label": (losses(label="max"), "a negative logit is lost"),
    "label unmasked": (losses(label="unmasked"), "it must add 0"),
    "sign": (losses(sign=-1), "its negative"),
}

# ---- 04.tied ----


def added(together, factor=1.0):
    """An answer that adds the gradients of the ranks that belong together."""

    def tied(ranks):
        found = []
        for rank in ranks:
            parts = [other["grad"] for other in ranks if other["grad"] and together(rank, other)]
            found.append([factor * sum(column) for column in zip(*parts)] if rank["grad"] else None)
        return found

    return tied


def pipeline(a, b):
    return (a["tp"], a["dp"]) == (b["tp"], b["dp"])


def keeps(stage):
    """An answer in which one end of the pipeline keeps its own gradient."""

    def tied(ranks):
        at = {"first": 0, "last": max(rank["pp"] for rank in ranks)}[stage]
        return [rank["grad"] if rank["pp"] == at else total for rank, total in zip(ranks, added(pipeline)(ranks))]

    return tied


def filled(ranks):
    by_place = {}
    for rank in ranks:
        by_place.setdefault((rank["tp"], rank["dp"]), []).append(rank["grad"] or [0, 0])
    return [[sum(column) for column in zip(*by_place[rank["tp"], rank["dp"]])] for rank in ranks]


def mean(ranks):
    stages = len({rank["pp"] for rank in ranks if rank["grad"]})
    return added(pipeline, 1 / stages)(ranks)


def ends(ranks):
    first, last = ranks[0]["grad"], ranks[-1]["grad"]
    return [a + b for a, b in zip(first, last)] if len(ranks) > 1 else first


TIED = {
    "nothing": (lambda ranks: [rank["grad"] for rank in ranks], "nothing is added"),
    # Takes the mean, as data parallelism does; here the two gradients are parts of one, not two samples of it.
    "mean": (mean, "this is the mean"),
    # Gives the sum to the first stage alone, as to a server; the last stage's copy then takes another update.
    "first alone": (keeps("last"), "the last stage keeps its own"),
    "last alone": (keeps("first"), "the first stage keeps its own"),
    # Adds up over all of tp, whose ranks hold different rows of the table.
    "over tp": (added(lambda a, b: a["dp"] == b["dp"]), "other rows of the table"),
    "over dp": (added(lambda a, b: a["tp"] == b["tp"]), "sum is done already"),
    "two ends": (
        lambda ranks: [ends(ranks) if i in (0, len(ranks) - 1) else rank["grad"] for i, rank in enumerate(ranks)],
        "get each other's gradient",
    ),
    "ends for all": (lambda ranks: [rank["grad"] and ends(ranks) for rank in ranks], "every rank gets the sum of"),
    "everything": (added(lambda a, b: True), "all gradients of all ranks"),
    "middle stages": (filled, "the middle stages get a gradient"),
    "twice": (
        lambda ranks: added(pipeline, 1 if any(rank["pp"] for rank in ranks) else 2)(ranks),
        "autograd has added already",
    ),
    "neighbours": (
        added(lambda a, b: pipeline(a, b) and abs(a["pp"] - b["pp"]) <= 1),
        "the partner of the first stage is the last",
    ),
}

TABLES = {"04.lookup": LOOKUPS, "04.loss": LOSSES, "04.tied": TIED}
RIGHT = {"04.lookup": places(here, inside), "04.loss": losses(), "04.tied": added(pipeline)}


def test_a_loss_that_sends_all_logits_is_told_the_price():
    def gathered(logits, labels, columns, all_reduce):
        width = logits[0].shape[1]
        placed = [np.zeros((len(labels), len(logits) * width)) for _ in logits]
        for rank, part in enumerate(logits):
            placed[rank][:, rank * width : (rank + 1) * width] = part
        whole = all_reduce(placed, "sum")[0]
        return losses()([whole], labels, [sum(columns)], lambda parts, op: parts) * len(logits)

    found = score("04.loss", gathered)
    assert found.total - found.passed == 1 and "expected at most 12: three for each of 4 tokens, got 48" in repr(found)
