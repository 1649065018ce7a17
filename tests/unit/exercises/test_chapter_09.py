"""Wrong answers to the exercises of chapter 09, with what each believes and words of its score."""

from labkit.check import chapter_09, score
from labkit.check.chapter_09 import _chosen, _cut, _kept, _laid_out, _sent, owners

SHARDS = {
    "by parameter": (lambda *case: [sorted(own) for own in _cut(*case)], "list them in the order of the buffer"),
    "turns": (
        lambda buckets, dp: [
            [(p, 0, b - a) for _, _, placed in buckets for p, a, b in placed][rank::dp] for rank in range(dp)
        ],
        "whole parameters are dealt out",
    ),
    # Cuts the buffer as a whole, not each bucket: then one rank owns a whole bucket, and its link carries it alone.
    "whole buffer": (
        lambda buckets, dp: _cut([(0, buckets[-1][1], [p for _, _, each in buckets for p in each])], dp),
        "the buffer is cut as a whole",
    ),
    # Cuts what is in a bucket and not the bucket: parts are shorter, and no message is a d-th of the bucket.
    "no padding": (
        lambda buckets, dp: _cut([(a, each[-1][2], each) for a, _, each in buckets], dp),
        "padding after it",
    ),
    "from 0": (lambda buckets, dp: _cut([(0, b - a, each) for a, b, each in buckets], dp), "as if it began at 0"),
    "in the buffer": (lambda *case: _cut(*case, within=False), "counted in the buffer"),
    "form": (lambda buckets, dp: [], "one list of pieces for each of the 4 ranks"),
}


# ---- 09.order ----


def order(*, ahead=True, keep=None, gather_again=True, scatter=True, free_last=True):
    """An order for sharded layers; an argument that is not its default is a misunderstanding."""

    def answer(layers, room):
        kept = {"all": layers, None: room}.get(keep, keep)
        steps = [("gather", 0)]
        for i in range(layers):
            if ahead and i + 1 < layers:
                steps.append(("gather", i + 1))
            elif not ahead and i:
                steps.append(("gather", i))
            steps.append(("forward", i))
            if i < layers - kept:
                steps.append(("free", i))
        for i in reversed(range(layers)):
            if not ahead and gather_again and i < layers - kept:
                steps.append(("gather", i))
            steps.append(("backward", i))
            if i or free_last:
                steps.append(("free", i))
            if ahead and gather_again and i >= kept:
                steps.append(("gather", i - kept))
            if scatter:
                steps.append(("scatter", i))
        return steps

    return answer


def only_the_last(layers, room):
    """Keeps one layer, and is ahead by one in the backward, too."""
    steps = [("gather", 0)]
    for i in range(layers - 1):
        steps += [("gather", i + 1), ("forward", i), ("free", i)]
    steps.append(("forward", layers - 1))
    for i in reversed(range(layers)):
        if i:
            steps.append(("gather", i - 1))
        steps += [("backward", i), ("free", i), ("scatter", i)]
    return steps


ORDERS = {
    "nothing freed in forward": (order(keep="all"), "free a layer before you gather the next"),
    # Gathers a layer when it is due, as the hooks of a first FSDP do: it runs, and waits for every message.
    "when due": (order(ahead=False, keep=0), "start it one computation earlier"),
    # Frees the layers with which the backward begins.
    "all freed": (order(ahead=False, keep=0), "there is room to keep the last ones"),
    "only the last": (only_the_last, "some of the last layers stay"),
    # Believes that a backward needs no weights; dx = dy W does.
    "no second gather": (order(gather_again=False), "gather it first"),
    "no scatter": (order(scatter=False), "is never scattered, so no rank has the sum"),
    "still whole": (order(free_last=False), "free each layer after its backward"),
    "twice": (lambda n, room: [("gather", 0), ("gather", 0)], "is gathered while it is whole"),
    "wrong way": (lambda n, room: [("gather", 1), ("forward", 1)], "forward 1 comes where forward 0 is due"),
    "too early": (lambda n, room: [("gather", 0), ("scatter", 0)], "is scattered before its backward"),
    "freed first": (lambda n, room: [("free", 0)], "is freed, but is not whole"),
    "stops": (lambda n, room: [("gather", 0), ("forward", 0)], "forward 1 is missing"),
    "form": (lambda n, room: [("fetch", 0)], "give a list of pairs (operation, layer)"),
}

# ---- 09.stage ----


def stage(*, kept=_kept, sent=_sent, **other):
    return lambda *case: _chosen(*case, kept=kept, sent=sent, **other)


FITS = {
    "divides everything": (stage(kept=lambda d, s: 18 / (d if s else 1)), "every stage divides everything"),
    # Stops at the first stage that fits, which for a small model is stage 0: it sends gradients twice, in 4 bytes.
    "first that fits": (stage(least=False), "stage 1 sends less than stage 0"),
    "always 3": (stage(stages=(3,)), "this always shards everything"),
    # Forgets that a rank without room for the whole gradient must reduce after each microbatch.
    "one microbatch": (stage(sent=lambda m, s: _sent(1, s)), "reduce the gradients of each microbatch"),
    "gathered once": (stage(sent=lambda m, s: _sent(m, s) - 2 * m * (s == 3)), "once for the forward and once for"),
    "stage 1 too often": (stage(sent=lambda m, s: 4 * m + 2 if s == 1 else _sent(m, s)), "it reduces once per step"),
    "no ring": (stage(ring=False), "(d - 1)/d of a tensor"),
    "one type": (stage(sent=lambda m, s: (8, 8, 4 * m + 4, 12 * m)[s]), "carries weights, of 2 bytes"),
}

TABLES = {"09.shards": SHARDS, "09.order": ORDERS, "09.stage": FITS}


def test_the_rules_of_the_exercise_give_the_slices_of_the_library():
    for case in (((100, 300, 50), 256, 4), ((7, 1, 900, 64), 100, 6)):
        assert _cut(_laid_out(*case), case[2]) == owners(*case)


def test_owners_that_cannot_be_are_told_by_an_element():
    """The cases before compare whole maps; of forty parameters the first wrong element says more."""

    def got(answer) -> str:
        return score("09.shards", answer).outcomes[-1].got

    def everything(buckets, dp):
        return [[(p, 0, b - a) for _, _, placed in buckets for p, a, b in placed]] * dp

    assert got(everything).endswith("owned twice, by ranks 0 and 1")
    assert got(lambda buckets, dp: [[]] * dp).endswith(" without an owner")
    alone = lambda buckets, dp: [everything(buckets, 1)[0]] + [[]] * (dp - 1)  # noqa: E731
    assert " on rank 0, which belongs to rank 1" in got(alone)
    assert got(_cut) == score("09.shards", _cut).outcomes[-1].expected

    def more(*case):
        first, *others = _cut(*case)
        return [[*first, (99, 0, 1)], *others]

    assert got(more) == "an element 0 of parameter 99, which has no such element"
    assert got(lambda buckets, dp: None).endswith("one list of pieces for each of the 6 ranks")


def test_an_order_is_drawn_if_it_runs():
    drawn = chapter_09.draw_order(only_the_last)
    assert drawn is not None and "14 units and 7 gathers (14 and 6 are enough)" in drawn.sentence
    assert chapter_09.draw_order(order(scatter=False)) is None
