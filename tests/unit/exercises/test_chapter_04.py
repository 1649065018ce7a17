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


def losses(*, top="all", total="all", label="all", padding=False, restore=True, sign=1, calls=2):
    """One rank's program of the loss; an argument that is not its default is a misunderstanding."""

    def answer(logits, labels, first, real, all_reduce):
        words = logits if padding else logits[:, :real]
        own_top = words.max(1)
        shared = all_reduce(own_top, "max")
        most = {"all": shared, "one": np.full_like(shared, shared.max()), "own": own_top, "none": 0 * own_top}[top]
        local = labels - first
        own = (local >= 0) & (local < logits.shape[1])
        target = logits[np.arange(len(labels)), np.where(own, local, 0)]
        target = target if label == "unmasked" else own * target
        exponentials = np.exp(words - (own_top if top == "scales" else most)[:, None]).sum(1)
        if calls == 2 and total == label == "all":
            exponentials, target = all_reduce(np.stack([exponentials, target]), "sum")
        else:
            if label != "own":
                target = all_reduce(target, "max" if label == "max" else "sum")
            if total == "logs":
                logs = all_reduce(np.log(exponentials) + most, "sum")
                return sign * (logs - target), logs
            exponentials = exponentials if total == "own" else all_reduce(exponentials, "sum")
        logs = np.log(exponentials) + restore * most
        return sign * (logs - target), logs

    return answer


def different_scales(logits, labels, first, real, all_reduce):
    words = logits[:, :real]
    sums = all_reduce(np.exp(words - words.max(1)[:, None]).sum(1), "sum")
    loss, _ = losses()(logits, labels, first, real, all_reduce)
    right = losses()(logits, labels, first, real, all_reduce)[1]
    log_sum = np.log(sums) + all_reduce(words.max(1), "max")
    return loss - right + log_sum, log_sum


def uneven(logits, labels, first, real, all_reduce):
    """Only the rank with the first label calls."""
    top = all_reduce(logits.max(1), "max") if first == 0 else logits.max(1)
    return top, top


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
    "three calls": (losses(calls=3), "two sums of one shape can travel in one array"),
    "stall": (uneven, "rank 0 is in all_reduce max and rank 1 in return: they deadlock"),
}

# ---- 04.tied ----


def added(group, factor=1.0):
    """One rank's program that adds over the ranks of `group(t, d, p, pp)`; None stands for no call."""

    def complete(grad, place, pp, all_reduce):
        places = group(*place, pp)
        return grad if grad is None or places is None else factor * all_reduce(grad, places)

    return complete


def ends(t, d, p, pp):
    return [(t, d, 0), (t, d, pp - 1)]


def keeps(stage):
    """A program in which one end of the pipeline takes part in the sum, and keeps its own gradient."""

    def complete(grad, place, pp, all_reduce):
        total = added(ends)(grad, place, pp, all_reduce)
        return grad if place[2] == (0 if stage == "first" else pp - 1) else total

    return complete


def middle(grad, place, pp, all_reduce):
    total = added(ends)(grad, place, pp, all_reduce)
    return np.zeros(2) if total is None else total


TIED = {
    "nothing": (added(lambda *_: None), "nothing is added"),
    # Takes the mean, as data parallelism does; here the two gradients are parts of one, not two samples of it.
    "mean": (added(ends, 0.5), "this is the mean"),
    # Gives the sum to the first stage alone, as to a server; the last stage's copy then takes another update.
    "first alone": (keeps("last"), "the last stage keeps its own"),
    "last alone": (keeps("first"), "the first stage keeps its own"),
    "neighbours": (added(lambda t, d, p, pp: [(t, d, p), (t, d, p + 1 if p == 0 else p - 1)]), "a deadlock"),
    "middle stages": (middle, "a middle stage holds no copy"),
    "everybody calls": (lambda g, place, pp, ar: ar(g, ends(*place, pp)), "calls all_reduce over ranks of which"),
    "twice": (
        lambda g, place, pp, ar: (g is not None and ar(g, ends(*place, pp)), added(ends)(g, place, pp, ar))[1],
        "2 on the rank at (0, 0, 0)",
    ),
}


def over(tp=False, dp=False):
    """Add over all of tp, whose ranks hold different rows of the table, or over replicas, which are summed already."""

    def complete(grad, place, pp, all_reduce):
        for width in ((2, 2), (2, 1), (1, 2), (1, 1)):  # the layout is not told: try the larger ones first
            ts = range(width[0]) if tp else [place[0]]
            ds = range(width[1]) if dp else [place[1]]
            try:
                return (
                    None if grad is None else all_reduce(grad, [(t, d, p) for t in ts for d in ds for p in {0, pp - 1}])
                )
            except ValueError:
                continue
        return grad

    return complete


TIED |= {
    "over tp": (over(tp=True), "ranks of one tp group hold other rows of the table"),
    "over dp": (over(dp=True), "replicas are added once more"),
    "everything": (over(tp=True, dp=True), "all ranks are added"),
}

TABLES = {"04.lookup": LOOKUPS, "04.loss": LOSSES, "04.tied": TIED}
RIGHT = {"04.lookup": places(here, inside), "04.loss": losses(), "04.tied": added(ends)}


def test_a_loss_that_sends_all_logits_is_told_the_price():
    def gathered(logits, labels, first, real, all_reduce):
        width, ranks = logits.shape[1], {6: 1, 4: 2, 3: 4}[logits.shape[1]]
        placed = np.full((len(labels), ranks * width), -np.inf)
        placed[:, first : first + real] = logits[:, :real]
        whole = all_reduce(placed, "max")
        top = whole.max(1)
        log_sum = np.log(np.exp(whole - top[:, None]).sum(1)) + top
        return log_sum - whole[np.arange(len(labels)), labels], log_sum

    found = score("04.loss", gathered)
    assert found.total - found.passed == 1 and "at most 12, three for each of 4 tokens, got 48" in repr(found)
