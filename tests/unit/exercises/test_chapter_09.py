"""Wrong answers to the exercises of chapter 09, with what each believes and words of its score."""

import math

from labkit.check import chapter_09, score
from labkit.check.chapter_09 import _cut, _laid_out, _once, _squares, owners


def kept(*, master=lambda w: 4 if w < 4 else 0, gradient=lambda w: max(4, w), moments=2, width=None, from_stage=0):
    def answer(weight, d, stage):
        share = [d if stage + from_stage >= least else 1 for least in (3, 2, 1, 1)]
        wide = max(4, weight) if width is None else width(weight)
        sizes = weight, gradient(weight), master(weight), moments * wide
        return sum(size / by for size, by in zip(sizes, share))

    return answer


BYTES = {
    # Divides everything by d from stage 1 on, as only stage 3 does.
    "all": (lambda w, d, stage: kept()(w, d, 0) / (d if stage else 1), "every stage divides everything; only"),
    "nothing": (lambda w, d, stage: kept()(w, d, 0), "nothing is divided"),
    # Gives weights of 4 and 8 bytes a master, too, though Adam can update these weights themselves.
    "wide master": (kept(master=lambda w: 4), "its own master"),
    "no master": (kept(master=lambda w: 0), "the master is missing"),
    # Forgets that Adam keeps two running means, of the gradient and of its square.
    "one moment": (kept(moments=1), "this counts one"),
    "moments of 4 bytes": (kept(width=lambda w: 4), "both moments have 4 bytes here"),
    "narrow moments": (kept(width=lambda w: w), "moments are as narrow as the weight"),
    "never wider": (kept(gradient=lambda w: 4, width=lambda w: 4), "both are wider for a weight of 8 bytes"),
    "narrow gradient": (kept(gradient=lambda w: w), "the gradient has max(4, weight) bytes"),
    "next stage": (kept(from_stage=1), "what the next stage divides"),
}

SHARDS = {
    "numbered as they lie": (
        lambda sizes, *rest: [
            [(len(sizes) - 1 - p, a, b) for p, a, b in own] for own in _cut(_laid_out(sizes, *rest), rest[1])
        ],
        "numbered in the order of the buffer",
    ),
    "by parameter": (
        lambda *case: [sorted(own) for own in _cut(_laid_out(*case), case[2])],
        "list them in the order of the buffer",
    ),
    "turns": (
        lambda sizes, _, dp: [[(p, 0, n) for p, n in enumerate(sizes) if p % dp == rank] for rank in range(dp)],
        "whole parameters are dealt out",
    ),
    # Cuts the buffer as a whole, not each bucket: then one rank owns a whole bucket, and its link carries it alone.
    "whole buffer": (
        lambda *case: _cut([(0, (b := _laid_out(*case))[-1][1], [p for _, _, each in b for p in each])], case[2]),
        "the buffer is cut as a whole",
    ),
    "end to end": (lambda *case: _cut(_laid_out(*case, align=1), case[2]), "must start at a multiple of 64"),
    # Lays parameters end to end: parts are still equal, but a parameter starts anywhere, off the hardware's stride.
    "no padding": (lambda *case: _cut(_laid_out(*case, align=1, multiple=1), case[2]), "end to end, and buckets"),
    "padded to dp": (lambda *case: _cut(_laid_out(*case, multiple=1), case[2]), "must be a multiple of lcm(dp, 128)"),
    "padded to 128": (lambda *case: _cut(_laid_out(*case[:2], 1), case[2]), "padded to 128 alone"),
    # Lays parameters out as they were registered: the first bucket is then complete when the backward is.
    "registered": (lambda *case: _cut(_laid_out(*case, backward=False), case[2]), "as they were registered"),
    "in the buffer": (lambda *case: _cut(_laid_out(*case), case[2], within=False), "counted in the buffer"),
    "one bucket": (lambda n, _, dp: _cut(_laid_out(n, math.inf, dp), dp), "the buffer is cut as a whole"),
    "form": (lambda sizes, bucket_size, dp: [], "one list of pieces for each of the 4 ranks"),
}


def root(counts):
    return lambda ranks: math.sqrt(_squares(ranks, counts))


NORMS = {
    # Keeps the rule of an optimizer that is whole on every rank: replicas hold the same, so only the first counts.
    "first replica": (root(lambda rank, p: rank["dp"] == 0 and _once(rank, p)), "only dp rank 0 counts; with"),
    "and copies": (root(lambda rank, p: rank["dp"] == 0), "and with it copies"),
    # Adds up everything that any rank holds, and so counts a norm's weight on each rank of tp.
    "everything": (root(lambda rank, p: True), "every piece of every rank counts"),
    "tied": (root(lambda rank, p: p["cut"] or rank["tp"] == 0), "the tied copy counts"),
    "alike": (root(lambda rank, p: not p["shared"]), "count on each of them"),
    "tp rank 0": (root(lambda rank, p: rank["tp"] == 0 and not p["shared"]), "tp rank 0 alone counts"),
    # Adds norms as if they were squares; the norm of two parts is the root of the sum of their squares.
    "norms": (lambda ranks: sum(root(_once)([rank]) for rank in ranks), "norms of ranks are added"),
    "largest": (lambda ranks: max(root(_once)([rank]) for rank in ranks), "the largest norm of a rank"),
    "no root": (lambda ranks: _squares(ranks, _once), "the root is missing"),
}

TABLES = {"09.bytes": BYTES, "09.shards": SHARDS, "09.norm": NORMS}


def test_the_rules_of_the_exercise_give_the_slices_of_the_library():
    for case in (((100, 300, 50), 256, 4), ((7, 1, 900, 64), 100, 6)):
        assert _cut(_laid_out(*case), case[2]) == owners(*case)


def test_owners_that_cannot_be_are_told_by_an_element():
    """The cases before compare whole maps; of forty parameters the first wrong element says more."""

    def got(answer) -> str:
        return score("09.shards", answer).outcomes[-1].got

    everything = lambda sizes, bucket_size, dp: [[(p, 0, n) for p, n in enumerate(sizes)]] * dp  # noqa: E731
    assert got(everything) == "element 0 of parameter 0 owned twice, by ranks 0 and 1"
    assert got(lambda sizes, bucket_size, dp: [[]] * dp).endswith(" without an owner")
    alone = lambda sizes, bucket_size, dp: [everything(sizes, 0, 1)[0]] + [[]] * (dp - 1)  # noqa: E731
    assert " on rank 0, which belongs to rank 1" in got(alone)
    right = chapter_09.owners
    assert got(right) == score("09.shards", right).outcomes[-1].expected

    def more(*case):
        first, *others = right(*case)
        return [[*first, (99, 0, 1)], *others]

    assert got(more) == "an element 0 of parameter 99, which has no such element"
    assert got(lambda sizes, bucket_size, dp: None).endswith("one list of pieces for each of the 6 ranks")
