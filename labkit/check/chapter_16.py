"""Exercises and bets of chapter 16: the time that launches cost, a pool's next block, a function that a graph can hold.

Wrong answers are compared with those of known misunderstandings, and the score names the one that gives the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from labkit.check.bets import ask
from labkit.check.scoring import Diagnosis, Finding, Misreadings, Outcome, exercise, fitting, holds, shown
from labkit.comm.capturing import GraphCaptureError
from labkit.graphs.capture import make_graphed_callables
from labkit.graphs.study.free_ranges import Free, FreeRanges, Held, best_fit
from labkit.graphs.study.launches import predict_launches
from labkit.graphs.study.refusal import Refusal

if TYPE_CHECKING:
    from labkit.viz.figure import Figure

# ---- the time that launches cost ----

_WORK: tuple[tuple[tuple[int, ...], int], ...] = (
    ((3,) * 10, 8),
    ((12,) * 10, 8),
    ((20, 1, 1, 1), 8),
    ((1, 1, 20, 1), 8),
    ((5, 5, 5), 0),
)
"""(microseconds of each operation, microseconds of a launch)."""


@exercise("16.launches", "Write end(durations, launch, graph) -> the time at which the device has run all operations.")
def launches(answer: Any) -> Iterator[Outcome]:
    """Judge five lists of operations, each launched one by one and as one graph."""
    diagnosis = Diagnosis()
    cases = [(durations, launch, graph) for durations, launch in _WORK for graph in (False, True)]
    rows: Sequence[Misreadings] = [_misread_launches(*case) for case in cases]
    with suppress(Exception, SystemExit):  # a case that raises is judged below
        rows = fitting([answer(list(durations), launch, graph) for durations, launch, graph in cases], rows)
    for (durations, launch, graph), misread in zip(cases, rows):
        yield diagnosis.outcome(
            f"durations {list(durations)}, launch {launch}, {'as a graph' if graph else 'one by one'}",
            int(predict_launches(durations, launch, graph=graph).end),
            lambda case=(list(durations), launch, graph): answer(*case),
            misread,
        )


def _misread_launches(durations: Sequence[int], launch: int, graph: bool) -> Misreadings:
    count, work = len(durations), sum(durations)
    ready = list(accumulate([launch] * count))
    one_by_one = int(predict_launches(durations, launch).end)
    return {
        "this pays for each launch although a graph is launched once": one_by_one if graph else None,
        "this lets the host wait for each operation; the host launches on while the device works": count * launch
        + work,
        "this takes the larger of two sums; the last operation cannot run before its own launch": max(
            launch if graph else count * launch, work
        ),
        "this starts operations during the one before; the device runs one at a time": max(
            (launch if graph else moment) + duration for moment, duration in zip(ready, durations)
        ),
        "this leaves the launch out": work,
        "this pays for one launch; one by one the host launches each operation": launch + work,
        "this runs only the last operation after the last launch; the device may have more work left": launch + work
        if graph
        else count * launch + durations[-1],
        "this lets the host wait after each launch; the host can be many operations ahead": launch
        + (work if graph else sum(max(launch, duration) for duration in durations)),
    }


# ---- a function that a graph can hold ----

SHAPE = (4, 3)
"""[T, H] in the exercise."""
_NO_TENSOR = "not a tensor but a "
_NAN = "NaN among the entries: 0 times inf is NaN, and torch.where chooses without multiplying"
_ZERO_NORM = "NaN among the entries: the norm is 0, and 0 / 0 and 0 times inf are NaN"
_REBOUND = "count 0: the caller's tensor never changed; `count = count + 1` makes another tensor"
_MISCOUNTED = {
    -1: "; `norm > limit` is False where the norm is NaN",
    1: "; a norm equal to the limit does not count, and an entry that is inf counts once",
}
"""Number of replays counted too often -> the likely misunderstanding."""
_ASKS = {
    ".item()": "`.item()` asks the host for a number",
    "float(": "`float` asks the host for a number",
    "if ": "an `if` on a tensor asks the host for a number, too",
}
"""Part of a line that a graph cannot hold -> the misunderstanding."""


@dataclass(frozen=True)
class _Call:
    """One call: its arguments, its expected result, and True where `count` grows."""

    words: str
    x: Tensor
    limit: float
    expected: Tensor
    counts: bool


def _calls() -> list[_Call]:
    """Return calls within the limit, above it, with another limit, not finite, with zeros, and exactly on the limit."""
    unit = torch.randn(SHAPE, generator=torch.Generator().manual_seed(14))
    unit /= unit.norm()
    bad = [unit.clone(), unit.clone()]
    bad[0][1, 2], bad[1][0, 0] = float("inf"), float("nan")
    zeros, exact = torch.zeros(SHAPE), torch.zeros(SHAPE)
    exact[0, 0], exact[3, 2] = 3.0, 4.0  # 25 and its root are exact, in whatever way the norm is computed
    return [
        _Call("norm 1, limit 2", unit, 2.0, unit, False),
        _Call("norm 8, limit 2", 8 * unit, 2.0, 2 * unit, True),
        _Call("norm 8, limit changed to 16", 8 * unit, 16.0, 8 * unit, False),
        _Call("an entry that is inf", bad[0], 16.0, zeros, True),
        _Call("an entry that is NaN", bad[1], 16.0, zeros, True),
        _Call("all entries 0", zeros, 2.0, zeros, False),
        _Call("norm 5, limit 5", exact, 5.0, exact, False),
        _Call("norm 100, limit 2", 100 * unit, 2.0, 2 * unit, True),
    ]


@exercise("16.clipped", "Write clipped(x, limit, count), a clip by norm that a CUDA graph can hold.")
def clipped(answer: Any) -> Iterator[Outcome]:
    """Judge two calls without a graph, one capture, eight replays and the count: twelve cases for every answer."""
    return (replace(outcome, reason=outcome.got.rpartition("; ")[2]) for outcome in _judged(answer))


def _judged(answer: Any) -> Iterator[Outcome]:
    calls = _calls()
    limit, count = torch.tensor(calls[0].limit), torch.tensor(0)
    for call in (calls[1], calls[3]):
        yield holds(f"{call.words}, without a graph", _claim(call), partial(_agrees, answer, call, limit, count))
    # The capture takes the first branch of any `if`, so that a frozen decision cannot look right by chance.
    limit.fill_(calls[0].limit)
    graphed: list[Callable[..., Tensor]] = []
    capture = holds("a capture", "a graph", lambda: _captured(answer, calls[0].x.clone(), limit, count, graphed))
    yield capture
    count.zero_()  # the warm-up counted as well
    for call in calls:
        given = f"{call.words}, replayed"
        if graphed:
            yield holds(given, _claim(call), partial(_agrees, graphed[0], call, limit, count, False))
        else:
            yield Outcome(given, _claim(call), capture.got, passed=False)
    counted = sum(call.counts for call in calls)
    given = f"those {len(calls)} replays, `count` set to 0 before"
    if graphed:
        yield holds(given, f"count {counted}", lambda: _counted(int(count), counted))
    else:
        yield Outcome(given, f"count {counted}", capture.got, passed=False)


def _counted(count: int, expected: int) -> bool | str:
    if count == expected:
        return True
    return _REBOUND if count == 0 else f"count {count}{_MISCOUNTED.get(count - expected, '')}"


def _captured(
    answer: Any, sample: Tensor, limit: Tensor, count: Tensor, graphed: list[Callable[..., Tensor]]
) -> bool | str:
    """Capture the answer into `graphed`; return True, or why it was refused: the line and the misunderstanding."""

    def body(x: Tensor) -> Any:
        return answer(x, limit, count)

    try:
        graphed.append(make_graphed_callables(body, (sample,), impl="emulated", num_warmup=2))
    except GraphCaptureError as error:
        seen = Refusal.of(error)
        reason = next((words for part, words in _ASKS.items() if part in seen.line), seen.reason)
        return f"a refusal of `{seen.line}`: {reason}" if seen.line else f"a refusal: {seen.reason}"
    return True


def _claim(call: _Call) -> str:
    norm = float(call.expected.norm())
    if call.expected.equal(call.x):
        return "x unchanged"
    return f"x scaled to the norm {norm:g}" if norm else "zeros"


def _agrees(
    function: Callable[..., Any], call: _Call, limit: Tensor, count: Tensor, pass_all: bool = True
) -> bool | str:
    """Return True, or a sentence about the returned value."""
    limit.fill_(call.limit)
    got = function(call.x.clone(), limit, count) if pass_all else function(call.x.clone())
    if not isinstance(got, Tensor):
        return f"{_NO_TENSOR}{type(got).__name__}"
    if got.shape != call.expected.shape:
        return f"a tensor of shape {list(got.shape)}"
    if torch.allclose(got, call.expected, rtol=1e-5, atol=1e-7):
        return True
    finite = call.x.isfinite().all()
    if got.isnan().any():
        return _ZERO_NORM if finite else _NAN
    norm = f"a tensor of norm {float(got.norm()):.4g}"
    return norm if finite else f"{norm}; one entry that is inf or NaN makes all entries zero"


# ---- the next block of a pool ----

Choice = Callable[[Sequence[Free], int], int]
"""(free ranges, bytes) -> where the block starts."""
Requests = tuple[int, ...]
"""n > 0 takes a block of n bytes, -i gives back block i, counted from 1 in the order in which they were taken."""

_REQUESTS: dict[str, Requests] = {
    "take 4 and 2, give the 4 back, take 2 and 2": (4, 2, -1, 2, 2),
    "holes of 4 and 2, take 2 and 4": (4, 1, 2, 1, -1, -3, 2, 4),
    "two neighbours given back, take 6": (4, 2, 1, -1, -2, 6),
    "holes of 3, 8 and 5, take 5, 8 and 3": (3, 1, 8, 1, 5, 1, -1, -3, -5, 5, 8, 3),
    "holes of 5 and 8, take 4 and 8": (5, 1, 8, 1, -1, -3, 4, 8),
    "nothing given back": (2, 3, 1),
    "the two graphs of section 2, in bytes": (
        8192, 8192, 4096, 8192, 8192, 128, -2, 8192, -1, -4, 4096, 8192, 256, -7,
    ),
}  # fmt: skip
_ENDLESS = 1 << 30


def _held_after(choose: Callable[..., Any], requests: Requests) -> list[Held]:
    """Let `choose` place each block; return all blocks. Raises ValueError for a place that is not free."""
    ranges, held = FreeRanges(_ENDLESS), []
    for time, request in enumerate(requests):
        if request > 0:
            start = choose(list(ranges.free), request)
            if isinstance(start, bool) or not isinstance(start, int):
                raise ValueError(f"{shown(start)} is not the start of a block, a whole number")
            ranges.take(start, request)
            held.append(Held(start, request, time, len(requests)))
        else:
            one = held[-request - 1]
            ranges.give_back(one.start, one.nbytes)
            held[-request - 1] = one._replace(until=time)
    return held


def _size(held: Sequence[Held]) -> int:
    return max(one.start + one.nbytes for one in held)


def _first_fit(free: Sequence[Free], nbytes: int) -> int:
    return next(start for start, length in free if length >= nbytes)


def _largest_hole(free: Sequence[Free], nbytes: int) -> int:
    holes = [each for each in free[:-1] if each[1] >= nbytes]
    return max(holes, key=lambda each: each[1])[0] if holes else free[-1][0]


def _exact_or_end(free: Sequence[Free], nbytes: int) -> int:
    return next((start for start, length in free if length == nbytes), free[-1][0])


_CHOICES: dict[str, Choice] = {
    "this puts every block behind all others; what was given back can be taken": lambda free, nbytes: free[-1][0],
    "this takes the first hole that is large enough; a later and larger block may need all of it": _first_fit,
    "this takes the largest hole; a later and larger block may need all of it": _largest_hole,
    "this takes only holes of the very size; the rest of a larger one stays free for others": _exact_or_end,
}
"""A misunderstanding -> what it chooses."""


def draw_pool(answer: Any) -> Figure | None:
    """Draw where the answer puts blocks, next to best fit, for the first requests for which its pool is too large.

    An answer that takes what is not free makes no pool.
    """
    from labkit.viz.graphs.pool_choices import pool_choices  # matplotlib, which a score does without

    pools = {words: _held_after(answer, requests) for words, requests in _REQUESTS.items()}
    aims = {words: _held_after(best_fit, requests) for words, requests in _REQUESTS.items()}
    wrong = [words for words in pools if _size(pools[words]) > _size(aims[words])]
    words = [*wrong, "holes of 4 and 2, take 2 and 4"][0]
    return pool_choices({"yours": pools[words], "as small as it can be": aims[words]}, what=words)


@exercise("16.pool", "Write choose(free, nbytes) -> the byte at which the next block of a pool starts.", draw=draw_pool)
def pool(answer: Any) -> Iterator[Outcome]:
    """Judge seven lists of requests by the size of the pool in the end."""
    meant = dict(_CHOICES)
    with suppress(Exception, SystemExit):  # a case that raises is judged below
        mine = [_held_after(answer, requests) for requests in _REQUESTS.values()]
        every = {w: [_held_after(each, r) for r in _REQUESTS.values()] for w, each in _CHOICES.items()}
        meant = {w: _CHOICES[w] for w, held in every.items() if held == mine} or meant
    for words, requests in _REQUESTS.items():
        aim = _size(_held_after(best_fit, requests))
        yield holds(words, f"a pool of {aim:,} bytes", lambda r=requests, aim=aim: _pool_of(answer, r, aim, meant))


def _pool_of(answer: Any, requests: Requests, aim: int, meant: Mapping[str, Choice]) -> Finding:
    try:
        held = _held_after(answer, requests)
    except ValueError as error:
        return "not free", str(error)
    if (size := _size(held)) <= aim:
        return True
    words = next((words for words, each in meant.items() if _held_after(each, requests) == held), "")
    return words, f"a pool of {size:,} bytes{': ' if words else ''}{words}"


# ---- bets ----

ask(
    "16.batch",
    "With one sample a graph shortens this forward by some percent. With eight samples at a time, what is left of "
    "that?",
    choices={
        "as much": "The launches cost as much as before. But the host has eight times as long for each of them.",
        "about half": "Eight samples make the kernels five to eight times as long, not twice.",
        "next to nothing": "The kernels are five to eight times as long and the launches are not, so after the first "
        "one the host is always ahead. A graph only removes waiting.",
    },
)
ask(
    "16.peak",
    "The sizes of the ten results are printed above. How much memory does a pool need for them, compared with all of "
    "them together?",
    choices={
        "nearly all": "A result that nobody reads any more gives its memory back, and a later one takes it.",
        "50 to 85 %": "The four gradients of weights and biases, dx and y leave the graphs, so they stay. Only what "
        "lies between can share.",
        "under 50 %": "Six of the ten results leave the graphs: y, dx and four gradients. They stay to the end.",
    },
)
ask(
    "16.replayed",
    "Nobody holds the result of the first graph, and the second one has taken its memory. Both are replayed, the first "
    "one last. What does `other`, the result of the second, hold?",
    choices={
        "x * 3": "That is what the second graph wrote. But the first one still knows the address, and it ran last.",
        "x * 2": "The first graph still knows the address, and nothing stops it from writing there.",
        "an error": "A graph is a list of addresses. Nobody checks at a replay whose tensor is there now.",
    },
)
ask(
    "16.grads",
    "Two microbatches, a forward and a backward each. g0 and g1 are their right gradients, and `.grad` should be g0 + "
    "g1. What is it?",
    choices={
        "2 g0": "Nobody wrote g0 a second time. The second replay wrote g1.",
        "g1": "The second replay wrote g1 over g0, which is half of it. Then autograd added g1 once more.",
        "2 g1": "Autograd kept the first gradient without a copy, so the second replay wrote g1 over it. Then autograd "
        "added g1 to what it took for g0.",
    },
)
ask(
    "16.silent",
    "Four functions, each broken for graphs. One of them is captured without a word. Which?",
    choices={
        "mean_of_positive": "How many entries are positive is a number that the host must have, to make a tensor of "
        "that size. So this asks.",
        "scaled": "Its `if` asks Python's own number, so the host waits for nobody. It is decided once, at the "
        "capture.",
        "clip_by_item": "`.item()` asks the device for a number while nothing has been computed.",
        "skip_if_huge": "An `if` on a tensor asks for its value, exactly as `.item()` does.",
    },
)
ask(
    "16.borders",
    "A GPT of two layers trains with two microbatches per step. Either each layer gets its graphs, or the whole step "
    "is one graph. What a graph takes from outside is copied into its static inputs. Which way needs more memory for "
    "them?",
    choices={
        "layers": "Each graph of a layer begins with a copy: of activations before a forward, of a gradient before a "
        "backward.",
        "the whole step": "It holds more operations, but inside a graph a result is handed on by its address. Only the "
        "tokens come from outside.",
        "the same": "What one layer hands to the next comes from outside for the graph of a layer, and from inside for "
        "a graph of the whole step.",
    },
)
