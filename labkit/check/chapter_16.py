"""Exercises of chapter 16: the time that launches cost, a function that a graph can hold, replays in another order.

Wrong answers are compared with those of known misunderstandings, and the score names the one that gives the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from labkit.check.scoring import Diagnosis, Misreadings, Outcome, exercise, fitting, holds
from labkit.comm.capturing import GraphCaptureError
from labkit.graphs.capture import make_graphed_callables
from labkit.graphs.study.launches import predict_launches
from labkit.graphs.study.refusal import Refusal

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


# ---- replays in another order ----

Places = tuple[int, ...]
"""Addresses in the pool."""
Captures = Mapping[str, tuple[Places, Places]]
"""Name of a graph, in the order of the captures -> the addresses that it reads and writes."""

_PIPELINE: Captures = {
    "F0": ((), (0,)), "F1": ((), (1,)), "B0": ((0,), (2,)),
    "F2": ((), (0,)), "B1": ((1,), (2,)), "B2": ((0,), (2,)),
}  # fmt: skip
_CHAIN: Captures = {"a": ((), (0, 1)), "b": ((0,), (2,)), "c": ((2,), (0,)), "d": ((0, 1), (3,))}
_REPLAYS: tuple[tuple[str, Captures, str], ...] = (
    ("the order of the captures", _PIPELINE, "F0 F1 B0 F2 B1 B2"),
    ("B0 before F0", _PIPELINE, "F1 B0 F0 F2 B1 B2"),
    ("all forwards first", _PIPELINE, "F0 F1 F2 B0 B1 B2"),
    ("F1 before F0, harmless", _PIPELINE, "F1 F0 B0 F2 B1 B2"),
    ("two steps", _PIPELINE, "F0 F1 B0 F2 B1 B2 F0 F1 B0 F2 B1 B2"),
    ("F0 left out in the second step", _PIPELINE, "F0 F1 B0 F2 B1 B2 F1 B0"),
    ("a chain in its order", _CHAIN, "a b c d"),
    ("c left out", _CHAIN, "a b d"),
    ("d before c and again", _CHAIN, "a b d c d"),
)
"""(words, captures, replays)."""


@exercise("16.stale", "Write stale(captures, replays) -> the positions of replays that read another graph's value.")
def stale(answer: Any) -> Iterator[Outcome]:
    """Judge two lists of captures, replayed in nine ways, some of which overwrite."""
    diagnosis = Diagnosis()
    for words, captures, text in _REPLAYS:
        replays = text.split()
        given = f"captures {_words(captures)}; replays {text} ({words})"
        outcome = diagnosis.outcome(
            given,
            _stale(captures, replays),
            lambda c=captures, r=replays: answer({name: tuple(each) for name, each in c.items()}, list(r)),
            _misread_replays(captures, replays),
        )
        yield outcome if outcome.passed else replace(outcome, got=f"{outcome.got}{_consequence(captures, replays)}")


def _words(captures: Captures) -> str:
    def places(verb: str, numbers: Places) -> list[str]:
        return [f"{verb} {' and '.join(map(str, numbers))}"] if numbers else []

    return ", ".join(
        f"{name} ({', '.join(places('reads', reads) + places('writes', writes))})"
        for name, (reads, writes) in captures.items()
    )


def _writers(captures: Captures) -> dict[tuple[str, int], str | None]:
    """Return (graph, address that it reads) -> the graph that wrote there last before its capture."""
    last: dict[int, str] = {}
    found: dict[tuple[str, int], str | None] = {}
    for name, (reads, writes) in captures.items():
        found |= {(name, place): last.get(place) for place in reads}
        last |= dict.fromkeys(writes, name)
    return found


def _foreign(captures: Captures, replays: Sequence[str]) -> list[tuple[int, int, str | None]]:
    """Return (position, address, last writer) of every read that finds another writer than at capture."""
    expected, last, found = _writers(captures), dict[int, str](), list[tuple[int, int, str | None]]()
    for position, name in enumerate(replays):
        reads, writes = captures[name]
        found += [(position, p, last.get(p)) for p in reads if last.get(p) != expected[name, p]]
        last |= dict.fromkeys(writes, name)
    return found


def _stale(captures: Captures, replays: Sequence[str]) -> list[int]:
    return sorted({position for position, _, _ in _foreign(captures, replays)})


def _consequence(captures: Captures, replays: Sequence[str]) -> str:
    """Describe the first stale read; empty if nothing is stale."""
    found = _foreign(captures, replays)
    if not found:
        return " (every read finds its own writer here)"
    position, place, writer = found[0]
    wanted = _writers(captures)[replays[position], place]
    return f" (position {position}: {replays[position]} reads address {place}, wants {wanted}, finds {writer})"


def _misread_replays(captures: Captures, replays: Sequence[str]) -> Misreadings:
    names = list(captures)
    moved = [i for i, name in enumerate(replays) if name != names[i % len(names)]]
    written, once, tainted = set[int](), list[int](), list[int]()
    for position, name in enumerate(replays):
        reads, writes = captures[name]
        if any(place not in written for place in reads):
            once.append(position)
        written |= set(writes)
    bad = set(_stale(captures, replays))
    for position, name in enumerate(replays):
        if position in bad or any(replays[p] == name and p < position for p in bad):
            tainted.append(position)
    return {
        "this reports every place that differs from the captures; another order can be harmless": moved,
        "this only asks whether somebody wrote there; it must be the same graph as at capture": once,
        "this finds nothing; two graphs of a pool may write one address": [],
        "this condemns later replays of a graph that was wrong once; the next step can be right": tainted,
    }
