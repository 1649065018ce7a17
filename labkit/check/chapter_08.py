"""Exercises and bets of chapter 08: the mean of gradients over tokens, the best cut, which buckets to start.

A wrong mean is compared with the answers of known misunderstandings. For buckets the score names the first thing that
goes wrong, and what follows from it for the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from labkit.check.bets import ask
from labkit.check.scoring import Finding, Misreadings, Outcome, asked, close, exercise, holds, plain, shown

if TYPE_CHECKING:
    from labkit.viz.figure import Figure

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


# ---- which buckets to start ----


class _Orders(NamedTuple):
    """The gradients of each bucket, and the orders in which they arrive on two ranks."""

    words: str
    buckets: tuple[str, ...]
    """A letter for each gradient."""
    arrivals: tuple[str, str]


_ORDERS = (
    _Orders("both ranks in the order of the buckets", ("dc", "ba"), ("dcba", "dcba")),
    _Orders("both ranks in the opposite order", ("dc", "ba"), ("badc", "badc")),
    _Orders("each rank in an order of its own", ("dc", "ba"), ("badc", "dcba")),
    _Orders("buckets of unequal size", ("e", "dcb", "a"), ("cdabe", "ebacd")),
    _Orders("four buckets", ("d", "c", "b", "a"), ("abcd", "cdab")),
)
Launches = list[tuple[int, int]]
"""(number of gradients that have arrived, bucket that is started), in the order of the starts."""


def _in_order(missing: Sequence[int], started: Sequence[bool]) -> list[int]:
    full = next((number for number, lacks in enumerate(missing) if lacks), len(missing))
    return [number for number in range(full) if not started[number]]


def _played(rule: Any, buckets: Sequence[str], arrivals: str) -> Launches:
    """Return what a rank starts. Raises ValueError, with the reason first, for a start that is none."""
    found: Launches = []
    missing, started = [len(names) for names in buckets], [False] * len(buckets)
    for count, name in enumerate(arrivals, start=1):
        missing[next(number for number, names in enumerate(buckets) if name in names)] -= 1
        now = plain(rule(list(missing), list(started)))
        if not isinstance(now, list) or any(isinstance(n, bool) or n not in range(len(buckets)) for n in now):
            raise ValueError(f"form: {shown(now)} is not a list of numbers of buckets")
        for number in now:
            state = f"missing {missing} and started {started}"
            if missing[number]:
                raise ValueError(
                    f"early: with {state} bucket {number} starts, and a gradient that arrives later is lost"
                )
            if started[number]:
                raise ValueError(f"twice: with {state} bucket {number} starts again; the sum is then taken twice")
            started[number] = True
            found.append((count, number))
    return found


def draw_start(answer: Any) -> Figure | None:
    """Draw what two ranks start that get their gradients in different orders; None for an answer of another form."""
    from labkit.viz.data_parallel.launch_orders import bucket_meetings  # matplotlib, which a score does without

    case = _ORDERS[2]
    try:
        runs = {name: [_steps(rule, case.buckets, order) for order in case.arrivals]
                for name, rule in (("yours", answer), ("the aim", _in_order))}  # fmt: skip
    except ValueError:
        return None
    return bucket_meetings(runs)


def _steps(rule: Any, buckets: Sequence[str], arrivals: str) -> list[tuple[str, str]]:
    launches, steps = _played(rule, buckets, arrivals), []
    for count, name in enumerate(arrivals, start=1):
        steps.append(("arrives", f"bucket {next(n for n, names in enumerate(buckets) if name in names)}"))
        steps += [("starts", f"bucket {number}") for when, number in launches if when == count]
    return steps


@exercise(
    "08.start",
    "Write start(missing, started) -> numbers of the buckets to start now, after a gradient has arrived.",
    draw=draw_start,
)
def start(answer: Any) -> Iterator[Outcome]:
    """Judge two ranks whose gradients arrive in five pairs of orders."""
    for case in _ORDERS:
        given = f"{case.words}: buckets {' '.join(case.buckets)}, arrivals {' and '.join(case.arrivals)}"
        claim = "one order on both ranks, and no bucket later than it could"
        yield holds(given, claim, lambda case=case: _met(answer, case))


def _met(answer: Any, case: _Orders) -> Finding:
    """Return (kind of the first mistake, sentence with its consequence); both empty for a right answer."""
    try:
        ranks = [_played(answer, case.buckets, order) for order in case.arrivals]
    except ValueError as error:
        kind, _, sentence = str(error).partition(": ")
        if kind not in ("form", "early", "twice"):
            raise
        return kind, sentence
    for place, ((_, mine), (_, theirs)) in enumerate(zip(*ranks), start=1):
        if mine != theirs:
            return "mixed", (
                f"all-reduce {place} adds bucket {mine} of rank 0 to bucket {theirs} of rank 1: nothing raises, and "
                "both sums are wrong"
            )
    for rank, (launches, order) in enumerate(zip(ranks, case.arrivals)):
        due = _played(_in_order, case.buckets, order)
        never = [number for number in range(len(case.buckets)) if number not in [n for _, n in launches]]
        if never:
            return "never", f"rank {rank} never starts bucket {never[0]}; its gradients stay those of one replica"
        late = [(when, could, n) for (when, n), (could, _) in zip(launches, due) if when > could]
        if late:
            when, could, number = late[0]
            return "late", (
                f"rank {rank} starts bucket {number} after {when} gradients; after {could} a bucket could leave, so "
                "time is lost"
            )
    return "", ""


# ---- bets ----

ask(
    "08.each",
    "Instead of one message at the end, each gradient gets an all-reduce of its own, at the moment when it is "
    "complete. Is less or more of the communication exposed?",
    choices={
        "less": "The first message starts as soon as the last layer's gradient is there, and all but the last can "
        "travel during the backward, as long as the link keeps up.",
        "more": "Each message pays the latency. If one message takes longer than the backward of one layer, the "
        "link falls behind from the first gradient on, and what has queued up comes after the backward.",
    },
)
ask(
    "08.microbatches",
    "Every microbatch reduces the buckets, not only the last one, and the next microbatch adds its gradients to the "
    "result. What is the gradient of the step?",
    choices={
        "right": "After the first reduction the mean is in the bucket, the same on all ranks. A mean over ranks "
        "leaves it as it is, and adds the mean of what has come since.",
        "too large": "It would be, if the ranks summed: a sum that all d ranks hold already is then added up d "
        "times. But a mean of d equal numbers is that number.",
        "too small": "It would be, if the first reduction's mean were divided again without being added up again. "
        "But d ranks add a d-th of it each.",
    },
)
ask(
    "08.meets",
    "Two buckets of one size. Rank 0 starts text and then image, rank 1 starts image and then text. What happens?",
    choices={
        "it hangs": "Each rank waits for the other, but both wait in an all-reduce, and two all-reduces are enough "
        "to finish each other. It would hang if the ranks called different numbers of them.",
        "an error": "Bytes have no name. With other sizes there would be an error or a hang; here the sizes fit.",
        "wrong sums": "The first all-reduce of rank 0 meets the first one of rank 1. Their sizes fit, so it adds up "
        "text and image, and nobody can tell.",
    },
)
ask(
    "08.torch",
    "The same two towers in torch's own DistributedDataParallel, in the second step. On rank 0 text is full first, "
    "on rank 1 image. Which of them does rank 1 start first?",
    choices={
        "image": "It is full first, and it was registered last, so by your rule it has number 0. But torch numbers the "
        "buckets anew after the first step.",
        "text": "After the first step rank 0 tells all ranks in which order its gradients arrived: text is bucket 0 "
        "everywhere. And a full bucket waits until all buckets before it have started.",
    },
)
ask(
    "08.floor",
    "GPT-2's word table serves at the bottom and at the top. Give the scores a table of their own, whose gradient is "
    "complete when the backward of the scores is. With the best bucket size, and messages without latency: is less, as "
    "much or more of the communication exposed?",
    choices={
        "less": "The scores' gradient no longer waits for the embedding. But the embedding's table is as large as "
        "before, and its gradient still comes last.",
        "as much": "The bottom table's gradient is complete when the backward ends, tied or not. Its 154.5 MB at 10 "
        "GB/s are 15.5 ms, and nothing computes meanwhile.",
        "more": "154.5 MB more have to travel. But they leave first, and the link has carried them long before the "
        "backward ends.",
    },
)


# ---- the best cut ----


class _Backward(NamedTuple):
    """Milliseconds and kilobytes of each gradient, in the order of the backward, and the link."""

    words: str
    ready: tuple[float, ...]
    sizes: tuple[float, ...]
    latency: float
    bandwidth: float

    def travels(self, counts: Sequence[int]) -> list[tuple[float, float]]:
        """Return when each bucket leaves and arrives, with these numbers of gradients in the buckets."""
        found: list[tuple[float, float]] = []
        leaves = arrives = 0.0
        first = 0
        for count in counts:
            mine = slice(first, first + count)
            leaves = max(leaves, *self.ready[mine])
            arrives = max(leaves, arrives) + self.latency + sum(self.sizes[mine]) / self.bandwidth
            found.append((leaves, arrives))
            first += count
        return found

    def exposed(self, counts: Sequence[int]) -> float:
        """Return the milliseconds that are exposed."""
        return self.travels(counts)[-1][1] - self.ready[-1]

    def best_cut(self) -> list[int]:
        """Return a cut that exposes the least."""
        return min(map(_counts, product((False, True), repeat=len(self.sizes) - 1)), key=self.exposed)

    def best(self) -> float:
        """Return the least exposed milliseconds of all cuts."""
        return self.exposed(self.best_cut())


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


def draw_cuts(answer: Any) -> Figure | None:
    """Draw a backward with the answer's buckets above one with the best; None for an answer of another form."""
    from labkit.events import Event
    from labkit.viz.data_parallel.bucket_overlap import overlap_gantt  # matplotlib, which a score does without

    case = _BACKWARDS[1]
    value = plain(answer(list(case.ready), list(case.sizes), case.latency, case.bandwidth))
    if not _fits(value, case):
        return None
    starts = (0.0, *case.ready)
    passes = [Event(0, "", "backward", a / 1e3, b / 1e3) for a, b in zip(starts, case.ready)]
    runs: dict[str, list[Event]] = {}
    for name, counts in (("yours", value), ("the aim", case.best_cut())):
        sent = [Event(0, "", "collective", a / 1e3, b / 1e3) for a, b in case.travels(counts)]
        runs[f"{name} {counts}"] = [*passes, *sent]
    return overlap_gantt(runs, numbers=True)


@exercise(
    "08.cuts",
    "Write cuts(ready, sizes, latency, bandwidth) -> the number of gradients of each bucket.",
    draw=draw_cuts,
)
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
    if not _fits(value, case):
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


def _fits(value: Any, case: _Backward) -> bool:
    """Return True for positive whole numbers that add up to the number of gradients."""
    return (
        isinstance(value, list) and all(isinstance(n, int) and n > 0 for n in value) and sum(value) == len(case.sizes)
    )
