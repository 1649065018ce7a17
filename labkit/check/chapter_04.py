"""Exercises of chapter 04 on a cut vocabulary: the lookup, the loss, the gradient of the tied embedding.

Wrong answers are compared with those of known misunderstandings, and the score names the one that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.check.scoring import ONLY_FIRST, Diagnosis, Misreadings, Outcome, asked, exercise, holds, plain, shown

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


@exercise("04.lookup", "Write lookup(ids, part, rank) -> the rows that this rank adds to the all-reduce, [ids, width].")
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
    """Logits of some tokens, cut over ranks. It counts the numbers that a rank gives to all-reduces."""

    words: str
    parts: list[Array]
    """Logits of each rank, [tokens, columns with padding]. Those of padding are 0, as from a row of zeros."""
    columns: list[int]
    """Columns of each rank without padding, 1 or more."""
    labels: NDArray[np.int64]
    sent: list[int] = field(default_factory=list)

    @property
    def real(self) -> list[Array]:
        return [part[:, :count] for part, count in zip(self.parts, self.columns)]

    def all_reduce(self, parts: Any, op: str) -> list[Array]:
        """Return the element-wise maximum or sum of one array for each rank, as one array for each rank."""
        assert op in ("max", "sum"), f"all_reduce knows 'max' and 'sum', not {op!r}"
        wanted = len(self.parts)
        assert len(parts) == wanted, f"all_reduce takes {wanted} arrays, one per rank; got {len(parts)}"
        stacked = np.stack([np.asarray(part, dtype=float) for part in parts])
        self.sent.append(stacked[0].size)
        total = stacked.max(axis=0) if op == "max" else stacked.sum(axis=0)
        return [total.copy() for _ in self.parts]

    def tried(self, answer: Any) -> list[list[float]]:
        """Return the answer's losses by rank, rounded for a sentence."""
        with np.errstate(all="ignore"):
            found = answer([part.copy() for part in self.parts], self.labels.copy(), [*self.columns], self.all_reduce)
        assert len(found) == len(self.parts), f"{len(found)} arrays for {len(self.parts)} ranks"
        return _rounded(found)


def _rounded(by_rank: Any) -> list[list[float]]:
    return [np.round(np.asarray(part, dtype=float), 3).tolist() for part in by_rank]


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
    "04.loss", "Write loss(logits, labels, columns, all_reduce) -> the loss of each token, one array of them per rank."
)
def loss(answer: Any) -> Iterator[Outcome]:
    """Judge one rank, several, padding, logits that overflow or vanish; then the numbers that travel."""
    diagnosis = Diagnosis(_close)
    for make in _LOSSES:
        problem = make()
        with np.errstate(all="ignore"):
            right, misreadings = _losses(problem), _misread_losses(problem)
        yield diagnosis.outcome(problem.words, _rounded(right), lambda p=problem: p.tried(answer), misreadings)
    problem = _LOSSES[3]()
    most = 3 * len(problem.labels)
    outcome = holds(
        f"{problem.words}, the numbers that a rank gives to all-reduces",
        f"at most {most}: three for each of {len(problem.labels)} tokens",
        lambda: (problem.tried(answer), sum(problem.sent) <= most or f"{sum(problem.sent)}")[1],
    )
    yield replace(outcome, reason=ONLY_FIRST)  # after a failed case this number means nothing


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

_LAYOUTS = ((1, 1, 1), (1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 3, 2))
"""(tp, pp, dp)."""
Gradients = list[list[int] | None]


def _tied_ranks(tp: int, pp: int, dp: int) -> list[dict[str, Any]]:
    """Return gradients of the tied table before the sum over the embedding group; replicas are summed already."""
    made = []
    for p in range(pp):
        for d in range(dp):
            for t in range(tp):
                uses = [[1 + t, 20 + t]] * (p == 0) + [[300 + t, 4000 + t]] * (p == pp - 1)
                grad = [sum(column) for column in zip(*uses)] if uses else None
                made.append({"tp": t, "pp": p, "dp": d, "grad": grad})
    return made


Counts = Callable[[dict[str, Any], dict[str, Any]], bool]


def _summed(ranks: Sequence[dict[str, Any]], adds: Counts) -> Gradients:
    """Give each rank with a gradient the sum over the ranks for which `adds(itself, other)` is true."""
    found: Gradients = []
    for rank in ranks:
        parts = [other["grad"] for other in ranks if other["grad"] is not None and adds(rank, other)]
        found.append(None if rank["grad"] is None else [sum(column) for column in zip(*parts)])
    return found


def _same_column(rank: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True for ranks of one pipeline (equal tp and dp); those with a gradient are its embedding group."""
    return (rank["tp"], rank["dp"]) == (other["tp"], other["dp"])


@exercise("04.tied", "Write tied(ranks) -> the final gradient of the tied table by rank, None where a rank has none.")
def tied(answer: Any) -> Iterator[Outcome]:
    """Judge one stage, two, four with two in the middle, and pipelines next to each other over tp and dp.

    If there are many ranks, the score shows the first one whose gradient differs.
    """
    diagnosis = Diagnosis()
    for tp, pp, dp in _LAYOUTS:
        ranks = _tied_ranks(tp, pp, dp)
        right, given = _summed(ranks, _same_column), list[Any]()

        def tried(sizes: tuple[int, int, int] = (tp, pp, dp), kept: list[Any] = given) -> list[Any]:
            kept.append(list(answer(_tied_ranks(*sizes))))
            return kept[0]

        outcome = diagnosis.outcome(f"tp {tp}, pp {pp}, dp {dp}", right, tried, _misread_tied(ranks))
        yield outcome if outcome.passed or not given else _at_first_rank(outcome, ranks, right, plain(given[0]))


def _at_first_rank(outcome: Outcome, ranks: list[dict[str, Any]], right: Gradients, value: list[Any]) -> Outcome:
    """Return the outcome with only the first rank that differs."""
    if len(value) != len(right):
        return outcome
    at, rank = next((i, each) for i, each in enumerate(ranks) if right[i] != value[i])
    reason = outcome.got[len(shown(value)) :]
    where = ", ".join(f"{axis} {rank[axis]}" for axis in ("tp", "pp", "dp"))
    return replace(outcome, expected=f"{right[at]} on the rank with {where}", got=f"{shown(value[at])}{reason}")


def _misread_tied(ranks: Sequence[dict[str, Any]]) -> Misreadings:
    right, last = _summed(ranks, _same_column), max(rank["pp"] for rank in ranks)
    alone = [rank["grad"] for rank in ranks]
    ends = [sum(column) for column in zip(alone[0], alone[-1])] if last else alone[0]  # of the list, in its own order

    def on(kept: Callable[[int], bool]) -> Gradients:
        return [total if kept(rank["pp"]) else own for rank, total, own in zip(ranks, right, alone)]

    filled = [
        next(total for total, other in zip(right, ranks) if total is not None and _same_column(rank, other))
        for rank in ranks
    ]
    return {
        "this adds the neighbouring stage; the partner of the first stage is the last": _summed(
            ranks, lambda rank, other: _same_column(rank, other) and abs(rank["pp"] - other["pp"]) <= 1
        ),
        "nothing is added: first and last stage have a gradient of one use each": alone,
        "this is the mean; the gradient of a weight with two uses is the sum": [
            None if total is None else [value / (2 if last else 1) for value in total] for total in right
        ],
        "the last stage keeps its own gradient, so its copy moves away from the first stage's": on(lambda p: p == 0),
        "the first stage keeps its own gradient, so its copy moves away from the last stage's": on(lambda p: p == last),
        "gradients of other tp ranks are added, which belong to other rows of the table": _summed(
            ranks, lambda rank, other: rank["dp"] == other["dp"]
        ),
        "the first rank of the list and the last get each other's gradient; partners are equal in tp and dp": [
            ends if i in (0, len(alone) - 1) else own for i, own in enumerate(alone)
        ],
        "every rank gets the sum of the first rank of the list and the last; partners are equal in tp and dp": [
            None if own is None else ends for own in alone
        ],
        "replicas are added once more; the data-parallel sum is done already": _summed(
            ranks, lambda rank, other: rank["tp"] == other["tp"]
        ),
        "all gradients of all ranks are added; only the copies of the same rows belong together": _summed(
            ranks, lambda rank, other: True
        ),
        "the middle stages get a gradient, but they hold no copy of the table": filled,
        "one stage has both uses in one weight, whose gradient autograd has added already": [
            None if total is None else [2 * value for value in total] for total in right
        ]
        if last == 0
        else right,
    }
