"""Exercises of chapter 08: the mean of gradients over tokens, the order in which buckets leave, the best cut.

A wrong mean is compared with the answers of known misunderstandings. For buckets the score names the first thing that
goes wrong, and what follows from it for the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

from labkit.check.scoring import Finding, Misreadings, Outcome, asked, close, exercise, holds, plain, shown

# ---- the mean over tokens ----

_MEANS = (
    ([[1.0, 2.0], [5.0, 6.0]], [4, 4]),
    ([[1.0, 0.0], [5.0, -2.0]], [3, 1]),
    ([[3.0, 1.0], [-1.0, 2.0], [0.5, 4.0]], [2, 5, 1]),
    ([[2.0, -4.0], [0.0, 0.0], [6.0, 1.0]], [6, 0, 2]),
    ([[1.5], [2.5], [0.0], [4.0]], [1, 1, 0, 8]),
)
"""(gradient of each rank's mean loss, its tokens)."""


@exercise("08.tokens", "Write mean_gradient(gradients, tokens) -> the gradient of the mean over all tokens.")
def tokens(answer: Any) -> Iterator[Outcome]:
    """Judge equal and unequal numbers of tokens, and ranks without any."""
    return asked(
        _MEANS,
        given="gradients {} and tokens {}".format,
        right=lambda gradients, counts: _weighted(gradients, counts, sum(counts)),
        tried=lambda gradients, counts: answer([list(each) for each in gradients], list(counts)),
        misread=_misread_means,
        equal=close(atol=1e-9),
    )


def _weighted(gradients: Sequence[Sequence[float]], weights: Sequence[float], divisor: float) -> list[float]:
    return [sum(w * g for w, g in zip(weights, column)) / divisor for column in zip(*gradients)]


def _misread_means(gradients: Sequence[Sequence[float]], counts: Sequence[int]) -> Misreadings:
    ones, replicas, total = [1] * len(counts), len(counts), sum(counts)
    fed = sum(count > 0 for count in counts)
    return {
        "this is the mean of the ranks' means; a token of a rank with few tokens counts more than another": _weighted(
            gradients, ones, replicas
        ),
        "this is the mean over the ranks that have tokens; a token of a rank with few tokens still counts more": (
            _weighted(gradients, ones, fed)
        ),
        "the gradients are added and never divided": _weighted(gradients, ones, 1),
        "this is the gradient of the sum; divide it by the tokens of all ranks": _weighted(gradients, counts, 1),
        "sums over tokens are divided by the number of ranks; divide by the tokens of all ranks": _weighted(
            gradients, counts, replicas
        ),
        "the mean is divided by the tokens once more; multiply each mean by its own tokens first": _weighted(
            gradients, ones, total
        ),
    }


# ---- the order in which buckets leave ----

_BUCKETS = (["d", "c"], ["b", "a"])
_LEAVING = (
    ("one microbatch, gradients in the buffer's order", _BUCKETS, [["d", "c", "b", "a"]]),
    ("the second bucket complete first", _BUCKETS, [["b", "a", "d", "c"]]),
    ("three microbatches", _BUCKETS, [["c", "b", "d", "a"], ["d", "b", "c", "a"], ["d", "c", "b", "a"]]),
    ("buckets of unequal size", (["e"], ["d", "c", "b"], ["a"]), [["c", "d", "a", "b", "e"]]),
    ("four buckets, complete in reverse", (["d"], ["c"], ["b"], ["a"]), [["a", "b", "c", "d"], ["a", "b", "c", "d"]]),
)
"""(words, buckets, arrivals of each microbatch)."""
Leaving = list[tuple[str, int]]


def _leaving(buckets: Sequence[Sequence[str]], arrivals: Sequence[str]) -> Leaving:
    found: Leaving = []
    arrived: set[str] = set()
    for name in arrivals:
        arrived.add(name)
        while len(found) < len(buckets) and arrived >= set(buckets[len(found)]):
            found.append((name, len(found)))
    return found


@exercise("08.leaving", "Write leaving(buckets, backwards) -> (gradient, bucket) for each bucket, as it leaves.")
def leaving(answer: Any) -> Iterator[Outcome]:
    """Judge gradients in and out of the buffer's order, in one microbatch and in several."""
    for words, buckets, backwards in _LEAVING:

        def tried(buckets: Any = buckets, backwards: Any = backwards) -> Finding:
            value = answer([list(each) for each in buckets], [list(each) for each in backwards])
            kind, sentence = _first_wrong(plain(value), buckets, backwards)
            return kind, sentence and f"{shown(value)}: {sentence}"

        given = f"{words}: buckets {list(buckets)} and arrivals {backwards}"
        yield holds(given, shown(_leaving(buckets, backwards[-1])), tried)


def _first_wrong(value: Any, buckets: Sequence[Sequence[str]], backwards: Sequence[Sequence[str]]) -> tuple[str, str]:
    """Return (kind of the first mistake, sentence with its consequence); both empty for a right answer."""
    last, total = backwards[-1], len(buckets)
    right = _leaving(buckets, last)
    form = isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value)
    if not form or any(name not in last or number not in range(total) for name, number in value):
        return "form", "give a list of pairs (name of a gradient, number of a bucket)"
    if len(backwards) > 1 and len(value) > total:
        return "microbatch", f"{len(value)} messages for {total} buckets: only the last microbatch may send"
    first = [list(pair) for pair in _leaving(buckets, backwards[0])]
    if value == first != [list(pair) for pair in right]:
        return "microbatch", "the buckets leave in the first microbatch: only the last microbatch may send"
    arrived = {name: place for place, name in enumerate(last)}
    for place, (name, number) in enumerate(value):
        missing = [each for each in buckets[int(number)] if arrived[each] > arrived[name]]
        if number in [other for _, other in value[:place]]:
            return "twice", f"bucket {number} leaves twice; the second sum adds up the result of the first"
        if missing:
            return "early", f"bucket {number} leaves with {name}; {missing[0]} arrives later, and is never added up"
        due = right[place][0] if number == place else name
        if number != place or arrived[name] < arrived[due]:
            return "order", (
                f"bucket {number} leaves with {name}, before an earlier bucket; on a rank whose gradients arrive in "
                "another order another bucket is sent there, and the all-reduce adds up two different buckets"
            )
        if name != due:
            return "late", f"bucket {number} leaves with {name}; it could leave with {due}, so time is lost"
    if len(value) < total:
        return "missing", f"bucket {len(value)} never leaves; its gradients differ from rank to rank"
    return "", ""


# ---- the best cut ----


class _Backward(NamedTuple):
    """Milliseconds and kilobytes of each gradient, in the order of the backward, and the link."""

    words: str
    ready: tuple[float, ...]
    sizes: tuple[float, ...]
    latency: float
    bandwidth: float

    def exposed(self, counts: Sequence[int]) -> float:
        """Return the milliseconds that are exposed with these numbers of gradients in the buckets."""
        leaves = arrives = 0.0
        first = 0
        for count in counts:
            mine = slice(first, first + count)
            leaves = max(leaves, *self.ready[mine])
            arrives = max(leaves, arrives) + self.latency + sum(self.sizes[mine]) / self.bandwidth
            first += count
        return arrives - self.ready[-1]

    def best(self) -> float:
        """Return the least exposed milliseconds of all cuts."""
        return min(self.exposed(_counts(marks)) for marks in product((False, True), repeat=len(self.sizes) - 1))


def _counts(marks: Sequence[bool]) -> list[int]:
    """Return the numbers of gradients between the cuts; `marks[i]` is True for a cut after gradient i."""
    found = [1]
    for cut in marks:
        if cut:
            found.append(1)
        else:
            found[-1] += 1
    return found


_BACKWARDS = (
    _Backward("a fast link without latency", (1.0, 2.0, 3.0, 4.0), (10.0, 10.0, 10.0, 10.0), 0.0, 100.0),
    _Backward("a latency of two gradients", tuple(float(i) for i in range(1, 9)), (10.0,) * 8, 2.0, 20.0),
    _Backward("a latency longer than the backward", (1.0, 2.0, 3.0, 4.0, 5.0), (10.0,) * 5, 9.0, 100.0),
    _Backward("a large last gradient", (1.0, 2.0, 3.0, 4.0, 5.0, 6.0), (10.0, 10.0, 10.0, 10.0, 10.0, 90.0), 0.5, 20.0),
    _Backward("two gradients that wait for the end", (2.0, 4.0, 6.0, 8.0, 9.0, 9.0, 9.0, 10.0, 10.0),
              (8.0, 30.0, 8.0, 30.0, 8.0, 4.0, 4.0, 2.0, 20.0), 1.5, 15.0),
)  # fmt: skip


@exercise("08.cuts", "Write cuts(ready, sizes, latency, bandwidth) -> the number of gradients of each bucket.")
def cuts(answer: Any) -> Iterator[Outcome]:
    """Judge five backwards; each cut must expose no more than the best of all cuts."""
    for case in _BACKWARDS:

        def tried(case: _Backward = case) -> Finding:
            value = answer(list(case.ready), list(case.sizes), case.latency, case.bandwidth)
            return _why_exposed(plain(value), case)

        link = f"latency {case.latency:g} and bandwidth {case.bandwidth:g}"
        given = f"{case.words}, that is {len(case.sizes)} gradients of {sum(case.sizes):g} bytes in all, {link}"
        yield holds(given, f"at most {case.best():.4g} exposed", tried)


def _why_exposed(value: Any, case: _Backward) -> tuple[str, str]:
    """Return (kind, what is exposed and why); both empty for a best cut."""
    gradients = len(case.sizes)
    if not isinstance(value, list) or not all(isinstance(n, int) and n > 0 for n in value) or sum(value) != gradients:
        return "form", f"{shown(value)}: give numbers above 0 that add up to {gradients}"
    exposed = case.exposed(value)
    if exposed <= case.best() + 1e-9:
        return "", ""
    words = f"{exposed:.4g} with {value}"
    if len(value) == 1:
        return "one", f"{words}: the only bucket leaves when the backward has ended, so nothing is hidden"
    if len(value) == gradients:
        return "each", f"{words}: {gradients} buckets pay the latency {gradients} times, and queue up at the link"
    alone = case.latency + sum(case.sizes[gradients - value[-1] :]) / case.bandwidth
    if exposed > alone + 1e-9:
        late = f"the last bucket waits {exposed - alone:.4g} for the link; the buckets before it are many or late"
        return "queue", f"{words}: {late}"
    return "last", f"{words}: the last bucket alone takes {alone:.4g}; gradients in it were complete before the end"
