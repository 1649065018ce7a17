"""Exercises of chapters 08 and 09: each misunderstanding gets a sentence of its own, and gets it once."""

import math

import pytest

from labkit.check import check
from labkit.check.chapter_08 import _BACKWARDS, _leaving
from labkit.check.chapter_09 import _cut, _laid_out, _once, _squares, owners


def weighted(weights, divisor):
    """An answer to 08.tokens: sums over ranks by `weights(tokens)`, over `divisor(tokens)`."""
    return lambda gradients, tokens: [
        sum(w * g for w, g in zip(weights(tokens), column)) / divisor(tokens) for column in zip(*gradients)
    ]


def ones(tokens):
    return [1] * len(tokens)


MEANS = {
    "means": (weighted(ones, len), "this is the mean of the ranks' means"),
    "fed": (weighted(ones, lambda tokens: sum(map(bool, tokens))), "the mean over the ranks that have tokens"),
    "sum": (weighted(ones, lambda tokens: 1), "are added and never divided"),
    "token sum": (weighted(list, lambda tokens: 1), "this is the gradient of the sum"),
    "by ranks": (weighted(list, len), "divided by the number of ranks"),
    "twice": (weighted(ones, sum), "divided by the tokens once more"),
}

LEAVING = {
    "first": (lambda buckets, backwards: _leaving(buckets, backwards[0]), "leave in the first microbatch"),
    "at once": (
        lambda buckets, backwards: sorted(
            ((max(names, key=backwards[-1].index), n) for n, names in enumerate(buckets)),
            key=lambda pair: backwards[-1].index(pair[0]),
        ),
        "ahead of an earlier bucket",
    ),
    "microbatches": (lambda b, backwards: [p for each in backwards for p in _leaving(b, each)], "only the last microb"),
    "early": (lambda buckets, backwards: [(names[0], n) for n, names in enumerate(buckets)], "is never added up"),
    "late": (lambda buckets, backwards: [(backwards[-1][-1], n) for n in range(len(buckets))], "so time is lost"),
    "missing": (lambda buckets, backwards: _leaving(buckets, backwards[-1])[:-1], "never leaves"),
    "twice": (lambda b, backwards: (right := _leaving(b, backwards[-1]))[:1] + right[:1], "leaves twice"),
    "form": (lambda buckets, backwards: [n for n, _ in enumerate(buckets)], "give a list of pairs"),
}

CUTS = {
    "one": (lambda ready, sizes, *link: [len(sizes)], "so nothing is hidden"),
    "each": (lambda ready, sizes, *link: [1] * len(sizes), "pay the latency 8 times"),
    "late cut": (lambda ready, sizes, *link: [len(sizes) - 1, 1], "the last bucket waits"),
    "early cut": (lambda ready, sizes, *link: [1, len(sizes) - 1], "the last bucket alone takes"),
    "form": (lambda ready, sizes, *link: [2, 2, 2], "give numbers above 0 that add up to 4"),
}


def kept(*, master=lambda w: 4 if w < 4 else 0, gradient=lambda w: max(4, w), moments=2, width=None, from_stage=0):
    def answer(weight, d, stage):
        share = [d if stage + from_stage >= least else 1 for least in (3, 2, 1, 1)]
        wide = max(4, weight) if width is None else width(weight)
        sizes = weight, gradient(weight), master(weight), moments * wide
        return sum(size / by for size, by in zip(sizes, share))

    return answer


BYTES = {
    "all": (lambda w, d, stage: kept()(w, d, 0) / (d if stage else 1), "every stage divides everything; only"),
    "nothing": (lambda w, d, stage: kept()(w, d, 0), "nothing is divided"),
    "wide master": (kept(master=lambda w: 4), "its own master"),
    "no master": (kept(master=lambda w: 0), "the master is missing"),
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
    "whole buffer": (
        lambda *case: _cut([(0, (b := _laid_out(*case))[-1][1], [p for _, _, each in b for p in each])], case[2]),
        "the buffer is cut as a whole",
    ),
    "end to end": (lambda *case: _cut(_laid_out(*case, align=1), case[2]), "must start at a multiple of 64"),
    "no padding": (lambda *case: _cut(_laid_out(*case, align=1, multiple=1), case[2]), "end to end, and buckets"),
    "padded to dp": (lambda *case: _cut(_laid_out(*case, multiple=1), case[2]), "must be a multiple of lcm(dp, 128)"),
    "padded to 128": (lambda *case: _cut(_laid_out(*case[:2], 1), case[2]), "padded to 128 alone"),
    "registered": (lambda *case: _cut(_laid_out(*case, backward=False), case[2]), "as they were registered"),
    "in the buffer": (lambda *case: _cut(_laid_out(*case), case[2], within=False), "counted in the buffer"),
    "one bucket": (lambda n, _, dp: _cut(_laid_out(n, math.inf, dp), dp), "the buffer is cut as a whole"),
    "form": (lambda sizes, bucket_size, dp: [], "one list of pieces for each of the 4 ranks"),
}


def root(counts):
    return lambda ranks: math.sqrt(_squares(ranks, counts))


NORMS = {
    "first replica": (root(lambda rank, p: rank["dp"] == 0 and _once(rank, p)), "only dp rank 0 counts; with"),
    "and copies": (root(lambda rank, p: rank["dp"] == 0), "and with it copies"),
    "everything": (root(lambda rank, p: True), "every piece of every rank counts"),
    "tied": (root(lambda rank, p: p["cut"] or rank["tp"] == 0), "the tied copy counts"),
    "alike": (root(lambda rank, p: not p["shared"]), "count on each of them"),
    "tp rank 0": (root(lambda rank, p: rank["tp"] == 0 and not p["shared"]), "tp rank 0 alone counts"),
    "norms": (lambda ranks: sum(root(_once)([rank]) for rank in ranks), "norms of ranks are added"),
    "largest": (lambda ranks: max(root(_once)([rank]) for rank in ranks), "the largest norm of a rank"),
    "no root": (lambda ranks: _squares(ranks, _once), "the root is missing"),
}

TABLES = {
    "08.tokens": MEANS,
    "08.leaving": LEAVING,
    "08.cuts": CUTS,
    "09.bytes": BYTES,
    "09.shards": SHARDS,
    "09.norm": NORMS,
}


@pytest.mark.parametrize(
    ("exercise", "answer", "words"),
    [pytest.param(name, *row, id=f"{name} {key}") for name, table in TABLES.items() for key, row in table.items()],
)
def test_a_misunderstanding_is_named_once(exercise, answer, words):
    score = check(exercise, answer)
    assert not score.ok and repr(score).count(words) == 1, repr(score)


def test_the_shipped_backwards_reward_a_cut_between_one_and_each():
    """Otherwise one bucket, or a bucket for each gradient, would be an answer to all cases."""
    best = [case.best() for case in _BACKWARDS]
    assert sum(case.exposed([len(case.sizes)]) > least + 1e-9 for case, least in zip(_BACKWARDS, best)) >= 3
    assert sum(case.exposed([1] * len(case.sizes)) > least + 1e-9 for case, least in zip(_BACKWARDS, best)) >= 3


def test_the_rules_of_the_exercise_give_the_slices_of_the_library():
    for case in (((100, 300, 50), 256, 4), ((7, 1, 900, 64), 100, 6)):
        assert _cut(_laid_out(*case), case[2]) == owners(*case)
