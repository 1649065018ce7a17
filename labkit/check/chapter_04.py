"""Exercises and bets of chapter 04 on a cut vocabulary: the lookup, the loss, the gradient of the tied embedding.

Wrong answers are compared with those of known misunderstandings, and the score names the one that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from labkit.check.bets import ask
from labkit.check.rank_threads import RankThreads, Stalled
from labkit.check.scoring import ONLY_FIRST, Diagnosis, Finding, Misreadings, Outcome, asked, exercise, holds, plain

if TYPE_CHECKING:
    from labkit.viz.figure import Figure

Array = NDArray[np.float64]


# ---- the lookup ----

_LOOKUPS = (
    ([2, 5, 0, 7], 4, 0),
    ([2, 5, 0, 7], 4, 1),
    ([3, 4, 3, 4], 4, 1),
    ([1, 2, 2], 4, 1),
    ([0, 3, 4, 8, 11], 4, 1),
    ([0, 3, 4, 8, 11], 4, 2),
)
"""(ids, rows of each part, rank)."""


def _part(rows: int, rank: int) -> NDArray[np.int64]:
    """Return a rank's part of a table whose row i is [10 i + 1, 10 i + 2], so no row is zero and each shows its id."""
    ids = np.arange(rank * rows, (rank + 1) * rows)
    return np.stack([10 * ids + 1, 10 * ids + 2], axis=1)


def _looked_up(ids: Sequence[int], rows: int, rank: int, local: Callable[[int], int | None]) -> list[list[int]]:
    """Return the rows of this rank's part at the places `local(id)`; zeros for a place that is None."""
    part = _part(rows, rank).tolist()
    return [[0, 0] if (place := local(each)) is None else part[place] for each in ids]


def draw_lookup(answer: Any) -> Figure | None:
    """Draw which rows the answer adds on three ranks; an answer of another form has no drawing."""
    from labkit.viz.vocabulary import added_rows  # matplotlib, which a score does without

    ids, rows, ranks = [0, 5, 11, 4, 7], 4, 3
    found = [np.asarray(plain(answer(np.array(ids), _part(rows, rank), rank))) for rank in range(ranks)]
    if any(each.shape != (len(ids), 2) for each in found):
        return None
    return added_rows([[(value - 1) // 10 for value in each[:, 0].tolist()] for each in found], ids, rows)


@exercise(
    "04.lookup",
    "Write own_rows(ids, part, rank) -> the rows that this rank adds to the all-reduce, [ids, width].",
    draw=draw_lookup,
)
def lookup(answer: Any) -> Iterator[Outcome]:
    """Judge two or three ranks, ids of this rank and of others, and ids at both ends of a part."""
    return asked(
        _LOOKUPS,
        given="ids {}, parts of {} rows, and rank {}".format,
        right=lambda ids, rows, rank: _looked_up(ids, rows, rank, _place(rows, rank)),
        tried=lambda ids, rows, rank: answer(np.array(ids), _part(rows, rank), rank),
        misread=_misread_lookups,
    )


def _place(rows: int, rank: int) -> Callable[[int], int | None]:
    return lambda each: each - rank * rows if 0 <= each - rank * rows < rows else None


def _misread_lookups(ids: Sequence[int], rows: int, rank: int) -> Misreadings:
    first = rank * rows
    wrong: dict[str, Callable[[int], int | None]] = {
        "a foreign id reads row 0 of this part, and the sum counts this row; foreign ids need zeros": (
            lambda each: each - first if 0 <= each - first < rows else 0
        ),
        "an id beyond the part reads its nearest row; foreign ids need zeros": (
            lambda each: min(max(each - first, 0), rows - 1)
        ),
        "an id of an earlier rank gives a negative place, which counts from the end of the part": (
            lambda each: each - first if -rows <= each - first < rows else None
        ),
        "every rank answers every id, modulo its rows; only the owner of an id answers": lambda each: each % rows,
        "the part begins at id rank x rows; subtract this number from the id": (
            lambda each: each if each < rows else None
        ),
        "row 0 of the part is a real row: the id rank x rows is its own": (
            lambda each: each - first if 0 < each - first < rows else None
        ),
    }
    answers: dict[str, Any] = {words: _looked_up(ids, rows, rank, local) for words, local in wrong.items()}
    own = [each for each in ids if _place(rows, rank)(each) is not None]
    answers["rows of foreign ids are left out; the sum needs a row for each id, of zeros where the id is foreign"] = (
        _looked_up(own, rows, rank, _place(rows, rank))
    )
    return answers


# ---- the loss ----


@dataclass
class _Loss:
    """Logits of some tokens, cut over ranks."""

    words: str
    parts: list[Array]
    """Logits of each rank, [tokens, columns with padding]. Those of padding are 0, as from a row of zeros."""
    columns: list[int]
    """Columns of each rank without padding, 1 or more."""
    labels: NDArray[np.int64]

    @property
    def real(self) -> list[Array]:
        return [part[:, :count] for part, count in zip(self.parts, self.columns)]

    def tried(self, answer: Any) -> tuple[list[Any], int, int]:
        """Return what the answer returns on each rank, the numbers that rank 0 gave, and its calls."""
        ranks, given = RankThreads(len(self.parts)), list[int]()

        def program(rank: int) -> Any:
            def all_reduce(array: Any, op: str) -> Array:
                assert op in ("max", "sum"), f"all_reduce knows 'max' and 'sum', not {op!r}"
                if rank == 0:
                    given.append(np.size(array))
                each = ranks.meet(rank, f"all_reduce {op}", np.array(array, dtype=float))
                shapes = {part.shape for part in each}
                assert len(shapes) == 1, f"all_reduce got arrays of {len(shapes)} shapes"
                return np.max(each, axis=0) if op == "max" else np.sum(each, axis=0)

            part, first = self.parts[rank].copy(), rank * self.parts[rank].shape[1]
            with np.errstate(all="ignore"):
                found = answer(part, self.labels.copy(), first, self.columns[rank], all_reduce)
            pair = isinstance(found, tuple | list) and len(found) == 2
            assert pair, f"rank {rank} returns {type(found).__name__}, not the two arrays loss and log_sum"
            return _rounded(found)

        return ranks.run(program), sum(given), len(given)


def _rounded(arrays: Any) -> list[list[float]]:
    return [np.round(np.asarray(plain(each), dtype=float), 3).tolist() for each in arrays]


def _loss(words: str, columns: Sequence[int], width: int, *, scale: float = 1.0, shift: float = 0.0) -> _Loss:
    """Return a problem with labels on several ranks, among them the first and the last real column."""
    numbers = np.random.default_rng(40 + len(columns))
    parts = [np.zeros((4, width)) for _ in columns]
    for part, count in zip(parts, columns):
        part[:, :count] = scale * numbers.normal(size=(4, count)) + shift
    total = sum(columns)
    return _Loss(words, parts, list(columns), np.array([0, total - 1, total // 2, width % total]))


_LOSSES: tuple[Callable[[], _Loss], ...] = (
    lambda: _loss("1 rank with 6 columns", (6,), 6),
    lambda: _loss("2 ranks with 4 columns each", (4, 4), 4),
    lambda: _loss("2 ranks with 4 columns each, 3 of them padding", (4, 1), 4),
    lambda: _loss("4 ranks with 3 columns each", (3, 3, 3, 3), 3),
    lambda: _loss("2 ranks with 4 columns each, and logits beyond 1,000", (4, 4), 4, scale=1500.0),
    lambda: _loss("2 ranks with 4 columns each, and logits around -1,000", (4, 4), 4, shift=-1000.0),
)


@exercise(
    "04.loss",
    "Write token_loss(logits, labels, first, real, all_reduce) -> (loss, log_sum) of each token; all ranks run it.",
)
def loss(answer: Any) -> Iterator[Outcome]:
    """Judge one rank, several, padding, logits that overflow or vanish; then log_sum, and what travels."""
    diagnosis = Diagnosis(_close)
    for make in _LOSSES:
        problem = make()
        with np.errstate(all="ignore"):
            right, misreadings = _losses(problem), _misread_losses(problem)

        def losses(problem: _Loss = problem) -> list[Any]:
            try:
                return [mine for mine, _ in problem.tried(answer)[0]]
            except Stalled as stalled:
                raise RuntimeError(str(stalled)) from None

        yield diagnosis.outcome(problem.words, _rounded(right), losses, misreadings)
    problem = _LOSSES[3]()
    right_sum = _rounded([_losses(problem)[0] + _of_label(problem)])[0]
    most = 3 * len(problem.labels)

    def log_sums() -> Finding:
        return all(_close(each[1], right_sum) for each in problem.tried(answer)[0])

    def numbers() -> Finding:
        found = problem.tried(answer)[1]
        return found <= most or f"{found}"

    def calls() -> Finding:
        found = problem.tried(answer)[2]
        return found <= 2 or f"{found}: two sums of one shape can travel in one array"

    for what, claim, test in (
        ("log_sum", "log of the sum of exp(logit) over all words, on every rank", log_sums),
        ("the numbers that a rank gives to all_reduce", f"at most {most}, three for each of 4 tokens", numbers),
        ("its calls of all_reduce", "at most 2", calls),
    ):
        yield replace(holds(f"{problem.words}, {what}", claim, test), reason=ONLY_FIRST)


def _close(value: Any, other: Any) -> bool:
    """Return True for values that are equal up to rounding; all numbers that are not finite count as equal."""
    mine, theirs = (np.asarray(each, dtype=float) for each in (value, other))
    if mine.shape != theirs.shape:
        return False
    finite = np.isfinite(mine)
    return bool((finite == np.isfinite(theirs)).all() and np.allclose(mine[finite], theirs[finite], 0, 2e-3))


def _losses(problem: _Loss) -> list[Array]:
    whole = np.concatenate(problem.real, axis=1)
    top = whole.max(axis=1)
    total = np.exp(whole - top[:, None]).sum(axis=1)
    return [np.log(total) + top - _of_label(problem)] * len(problem.parts)


def _of_label(problem: _Loss) -> Array:
    whole = np.concatenate(problem.parts, axis=1)  # only the last parts have padding, and no label is in its columns
    return whole[np.arange(len(whole)), problem.labels]


def _misread_losses(problem: _Loss) -> Misreadings:
    real, ranks = problem.real, len(problem.parts)
    right, target = _losses(problem)[0], _of_label(problem)
    log_sum = right + target
    own_top = [part.max(axis=1) for part in real]
    top = np.max(own_top, axis=0)
    own_sums = [np.exp(part - most[:, None]).sum(axis=1) for part, most in zip(real, own_top)]
    width = problem.parts[0].shape[1]
    local = [problem.labels - rank * width for rank in range(ranks)]
    own = [(each >= 0) & (each < width) for each in local]
    rows = np.arange(len(right))
    zeroth = [part[rows, np.where(mine, each, 0)] for part, each, mine in zip(problem.parts, local, own)]
    padding = np.exp(np.concatenate(problem.parts, axis=1) - top[:, None]).sum(axis=1)
    plain_sum = np.log(sum(np.exp(part).sum(axis=1) for part in real))
    return {
        "exp of a large logit is infinite, and of a very small one 0; subtract the largest logit of all ranks first": [
            plain_sum - target
        ]
        * ranks,
        "one number is subtracted for all tokens; each token needs the largest of its own logits": [
            np.log(np.exp(np.concatenate(real, axis=1) - max(top)).sum(axis=1)) + max(top) - target
        ]
        * ranks,
        "each rank has subtracted its own maximum, so the sums that are added have different scales": [
            np.log(sum(own_sums)) + top - target
        ]
        * ranks,
        "each rank subtracts and adds its own maximum; all ranks need the same one, by an all-reduce": [
            np.log(sum(own_sums)) + most - target for most in own_top
        ],
        "the ranks' logarithms are added; add their sums of exponentials, and take one logarithm": [
            sum(np.log(part) + most for part, most in zip(own_sums, own_top)) - target
        ]
        * ranks,
        "each rank takes the softmax over its own columns; its sum must go over the columns of all ranks": [
            np.log(part) + most - target for part, most in zip(own_sums, own_top)
        ],
        "the maximum is subtracted inside the sum alone; subtract it from the label's logit, too": [
            log_sum - top - target
        ]
        * ranks,
        "padding columns count in the sum; only the first columns[rank] of a part are real": [
            np.log(padding) + top - target
        ]
        * ranks,
        "a rank without the label subtracts 0; the owner's logit must reach all ranks": [
            log_sum - np.where(mine, value, 0.0) for mine, value in zip(own, zeroth)
        ],
        "the largest of the label's logit and zeros is taken, so a negative logit is lost; add them": [
            log_sum - np.max([np.where(mine, value, 0.0) for mine, value in zip(own, zeroth)], axis=0)
        ]
        * ranks,
        "a rank without the label adds the logit of one of its own columns; it must add 0": [log_sum - sum(zeroth)]
        * ranks,
        "this is the logarithm of the probability; the loss is its negative": [-right] * ranks,
    }


# ---- the tied embedding ----

_LAYOUTS = ((1, 2, 1), (2, 2, 1), (1, 4, 1), (1, 2, 2), (2, 3, 2), (1, 1, 1))
"""(tp, pp, dp)."""
Place = tuple[int, int, int]
Gradients = dict[Place, Any]
_MIDDLE = "a middle stage holds no copy of the table: it returns None and calls nothing"


class _Waits(BaseException):
    """Ends a run of the answer at a call whose result is not known yet."""


def _gradients(tp: int, pp: int, dp: int) -> Gradients:
    """Return by (t, d, p) the gradient of a rank's copy before the sum over the embedding group, after that over d."""
    found: Gradients = {}
    for t, d, p in product(range(tp), range(dp), range(pp)):
        uses = [[1.0 + t, 20.0 + t]] * (p == 0) + [[300.0 + t, 4000.0 + t]] * (p == pp - 1)
        found[t, d, p] = np.sum(uses, axis=0) if uses else None
    return found


Waiting = dict[Place, tuple[frozenset[Place], Array]]
"""Rank -> the ranks over which it waits for a sum, and what it gives."""


def _all_reduce_of(here: Place, given: Gradients, results: Iterator[Array], waiting: Waiting) -> Callable[..., Array]:
    """Return the `all_reduce` of a rank: it gives the results that are known, and then writes down who waits."""

    def all_reduce(array: Any, places: Any) -> Array:
        group = frozenset(tuple(each) for each in plain(places))
        if outside := [each for each in group if each not in given]:
            raise ValueError(f"there is no rank at {min(outside)}")
        if here not in group:
            raise ValueError(f"the rank at {here} calls all_reduce over ranks of which it is none")
        if array is None:
            raise ValueError(_MIDDLE)
        for result in results:
            return result.copy()
        waiting[here] = group, np.array(array, dtype=float)
        raise _Waits

    return all_reduce


def _completed(answer: Any, given: Gradients, pp: int) -> tuple[Gradients, dict[Place, int]]:
    """Run the answer on every rank, again from its start whenever a call has got its result.

    Returns its results and its numbers of calls. Raises Stalled if ranks wait for each other.
    """
    known: dict[Place, list[Array]] = {place: [] for place in given}
    while True:
        done: Gradients = {}
        waiting: Waiting = {}
        for place, grad in given.items():
            all_reduce = _all_reduce_of(place, given, iter(known[place]), waiting)
            with suppress(_Waits):
                done[place] = answer(None if grad is None else grad.copy(), place, pp, all_reduce)
        if not waiting:
            return done, {place: len(results) for place, results in known.items()}
        met = [p for p, (group, _) in waiting.items() if all(waiting.get(q, ((),))[0] == group for q in group)]
        if not met:
            place, (group, _) = min(waiting.items())
            other = min(q for q in group if waiting.get(q, ((),))[0] != group)
            does = "calls it for other ranks" if other in waiting else "doesn't call it"
            raise Stalled(f"the rank at {place} waits in all_reduce for the one at {other}, which {does}: a deadlock")
        for place in met:
            known[place].append(np.sum([waiting[q][1] for q in waiting[place][0]], axis=0))


@exercise(
    "04.tied",
    "Write complete(grad, place, pp, all_reduce) -> the complete gradient of this rank's copy, None where it has none.",
)
def tied(answer: Any) -> Iterator[Outcome]:
    """Judge two stages, stages in the middle, pipelines next to each other, and one stage; then the calls."""
    for tp, pp, dp in _LAYOUTS:
        given = f"tp {tp}, pp {pp}, dp {dp}"
        yield holds(given, "both gradients in each copy", lambda case=(tp, pp, dp): _judged(answer, *case))
    counted = _gradients(2, 3, 2)

    def calls() -> Finding:
        found = _completed(answer, counted, 3)[1]
        wrong = [place for place, count in found.items() if count != (counted[place] is not None)]
        return not wrong or f"{found[wrong[0]]} on the rank at {wrong[0]}"

    outcome = holds("tp 2, pp 3, dp 2, calls of all_reduce", "one on each rank with a copy, no others", calls)
    yield replace(outcome, reason=ONLY_FIRST)


def _judged(answer: Any, tp: int, pp: int, dp: int) -> Finding:
    """Return True, or the first rank whose gradient differs with the misunderstanding behind it."""
    given = _gradients(tp, pp, dp)
    try:
        found, _ = _completed(answer, given, pp)
    except Stalled as stalled:
        return "a deadlock", str(stalled)

    right = _summed(given, 0, 1)
    values = {place: None if each is None else np.asarray(plain(each), dtype=float) for place, each in found.items()}
    wrong = [place for place in given if not _alike(values[place], right[place])]
    if not wrong:
        return True
    place = wrong[0]
    if right[place] is None:
        return _MIDDLE, f"on the rank at {place} {plain(values[place])}: {_MIDDLE}"
    kept = f"the {'last' if place[2] else 'first'} stage keeps its own gradient, and the other one has the sum"
    if all(_alike(values[place], given[place]) for place in given):
        kept = "nothing is added; each copy follows its own gradient"
    misread = {kept: given, **_misread_sums(given, right)}
    reason = next((words for words, other in misread.items() if _alike(values[place], other[place])), "")
    return (
        reason,
        f"on the rank at {place} {plain(values[place])} instead of {plain(right[place])}: {reason or 'wrong'}",
    )


def _summed(given: Gradients, *kept: int) -> Gradients:
    """Return for each copy the sum over the copies that agree with it in these coordinates."""
    return {
        place: None if own is None else np.sum(
            [g for q, g in given.items() if g is not None and all(q[i] == place[i] for i in kept)], axis=0
        )
        for place, own in given.items()
    }  # fmt: skip


def _misread_sums(given: Gradients, right: Gradients) -> dict[str, Gradients]:
    return {
        "this is the mean; lookup and logits are two uses of one weight, so their gradients add up": {
            place: None if each is None else each / 2 for place, each in right.items()
        },
        "ranks of one tp group hold other rows of the table": _summed(given, 1),
        "replicas are added once more; the data-parallel sum is done already": _summed(given, 0),
        "all ranks are added; only the copies of the same rows belong together": _summed(given),
    }


def _alike(value: Any, other: Any) -> bool:
    if value is None or other is None:
        return value is other
    return value.shape == other.shape and bool(np.allclose(value, other))


# ---- bets ----

ask(
    "04.padding",
    "Padding rows of the table are zeros, so their logits are 0. If they count as words, how high is the loss then?",
    choices={
        "the same": "Zeros add nothing to a sum of logits, but the softmax adds up exp(logit), and exp(0) is 1.",
        "lower": "The label keeps its logit, and the sum below it gets more terms: its probability can only fall.",
        "higher": "exp(0) is 1. So each padding row takes its share of the probability, like a word.",
    },
)
ask(
    "04.peak",
    "A rank gathers the logits [n, V] and calls F.cross_entropy. How many tensors of that size are in memory at the "
    "worst moment of forward and backward? A whole number.",
    misread=lambda: {
        "Those are the logits alone, and they aren't even needed any more when backward comes.": 1,
        "One is kept for backward, and there is a gradient. But the backward of log-softmax reads one gradient and "
        "makes another.": 2,
        "The gathered logits themselves are free by then: log-softmax keeps its result and not its input.": 4,
    },
    unit="tensors",
    because="cross_entropy is a log-softmax and a choice of the label. Backward has the kept result of the first, the "
    "gradient of the second, and the gradient of the logits that it makes of both.",
)
ask(
    "04.apart",
    "Adam's learning rate is 0.003, and both copies begin equal. How far apart are they after ONE step, as a share of "
    "the table's norm?",
    choices={
        "under 1 %": "0.003 sounds like 0.3 %, but Adam moves a weight by 0.003 whatever its size, and these weights "
        "are about 0.02.",
        "1 to 50 %": "Adam's first step moves a weight by about the learning rate, whatever the size of weight or "
        "gradient. 0.003 of 0.02 is 15 %, and nearly every row of one copy moves, while few rows of the other do.",
        "over 50 %": "A first step moves a weight by about the learning rate: 0.003, and weights are about 0.02.",
    },
)
ask(
    "04.file",
    "The checkpoint of the run without the sum stores the table once. One process loads it and goes on. What does its "
    "first loss look like?",
    choices={
        "as before": "The loss was measured with two tables: one that reads words and one that scores them. The file "
        "has one of them.",
        "a small step up": "How large it is depends on how far the two tables have drifted, in this run further than "
        "the table is long.",
        "as if untrained": "What the logits had learned was in the other copy. The file has a table that was trained "
        "to read words, and never to score them.",
    },
)
