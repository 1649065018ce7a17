"""Exercises of chapter 14: splits of an all-to-all, one rank's program of an MoE layer, places under a capacity.

Wrong answers are compared with those of known misunderstandings. The score names the first token or expert that
differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.check.rank_threads import RankThreads, Stalled
from labkit.check.rounding import ROUNDED, rounding
from labkit.check.scoring import ONLY_FIRST, Misreadings, Outcome, asked, exercise, holds, listed, plain, raised, shown

Array = NDArray[Any]

# ---- splits ----

Counts = Sequence[Sequence[int]]
_COUNTS: tuple[tuple[Counts, int], ...] = (
    ([[1, 2, 3, 4], [5, 6, 7, 8]], 0),
    ([[1, 2, 3, 4], [5, 6, 7, 8]], 1),
    ([[4]], 0),
    ([[3, 0, 2, 5, 1, 4], [0, 0, 0, 0, 0, 0], [2, 7, 0, 1, 6, 3]], 2),
    ([[5, 0, 1], [2, 4, 0], [0, 3, 6]], 1),
)
"""(rows of each expert by rank, the rank that is asked about)."""


@exercise("14.splits", "Write splits(counts, rank) -> (rows sent to each rank, rows received from each rank).")
def splits(answer: Any) -> Iterator[Outcome]:
    """Judge one to three ranks, one to four experts per rank, and a rank without rows."""
    return asked(
        _COUNTS,
        given="counts {} and rank {}".format,
        right=_splits,
        tried=lambda counts, rank: answer([list(row) for row in counts], rank),
        misread=_misread_splits,
    )


def _splits(counts: Counts, rank: int, *, in_turn: bool = False) -> tuple[list[int], list[int]]:
    """Return both lists; `in_turn` deals the experts out one by one."""
    ranks, local = len(counts), len(counts[0]) // len(counts)
    table = [[0] * ranks for _ in counts]
    for sender, row in enumerate(counts):
        for number, rows in enumerate(row):
            table[sender][number % ranks if in_turn else number // local] += rows
    return table[rank], [row[rank] for row in table]


def _misread_splits(counts: Counts, rank: int) -> Misreadings:
    sends, receives = _splits(counts, rank)
    local = len(counts[0]) // len(counts)
    loads = [sum(_splits(counts, other)[1]) for other in range(len(counts))]
    by_expert = [sum(row[number] for row in counts) for number in range(rank * local, (rank + 1) * local)]
    without = [[0 if other == rank else rows for other, rows in enumerate(each)] for each in (sends, receives)]
    return {
        "these are rows of each expert; the lists have one number for each rank": (counts[rank], counts[rank]),
        "the two lists are exchanged; a row of the table is what its rank sends": (receives, sends),
        "a rank does not receive what it sends; others decide what comes": (sends, sends),
        "the rank's own rows are missing; an all-to-all carries rows that stay, too": tuple(without),
        "experts are dealt out one by one; here neighbours are on one rank": _splits(counts, rank, in_turn=True),
        "the second list counts rows by expert; it has one number for each sender": (sends, by_expert),
        "the second list is the load of every rank; it has what each rank sends to this one": (sends, loads),
    }


# ---- one rank's program ----

Part = tuple[Array, Array, Array]
HIDDEN = 5
"""Numbers of a row."""


class _Problem:
    """Tokens, routing and experts of all ranks. It counts numbers that the answer sends, and calls of experts."""

    def __init__(self, words: str, parts: list[Part], matrices: Array) -> None:
        """parts: by rank x [T, H], weights [T, E], choice [T, E]. matrices [E, H, H]: expert e is tanh(row matrix)."""
        self.words, self.parts, self.matrices = words, parts, matrices
        self.local = len(matrices) // len(parts)
        self.crossed = [0] * len(parts)
        self.calls: list[int] = []

    def run(self, answer: Any) -> list[Any]:
        """Return what the answer returns on each rank. Raises its errors, and Stalled if ranks wait for each other."""
        ranks = RankThreads(len(self.parts))
        return ranks.run(lambda rank: self._program(answer, rank, ranks))

    def _program(self, answer: Any, rank: int, ranks: RankThreads) -> Any:
        size = len(self.parts)

        def exchange(outbox: Any) -> list[Array]:
            if len(outbox) != size:
                raise ValueError(f"exchange takes a list of {size} arrays, one for each rank; got {len(outbox)}")
            boxes = [np.array(box) for box in outbox]
            self.crossed[rank] += sum(box.size for other, box in enumerate(boxes) if other != rank)
            return [sent[rank] for sent in ranks.meet(rank, "exchange", boxes)]

        def expert(number: int, rows: Any) -> Array:
            if number // self.local != rank:
                raise ValueError(f"expert {number} lives on rank {number // self.local}; rank {rank} asked for it")
            self.calls.append(int(number))
            return np.tanh(np.asarray(rows, dtype=float).reshape(-1, HIDDEN) @ self.matrices[number])

        return answer(*(each.copy() for each in self.parts[rank]), rank, size, exchange, expert)

    def most_numbers(self) -> int:
        """Count each row that must travel, there and back, with one more number each way, and a table of counts."""
        size, experts = len(self.parts), len(self.matrices)
        away = sum(
            int(chosen.sum()) - int(chosen[:, rank * self.local : (rank + 1) * self.local].sum())
            for rank, (_, _, chosen) in enumerate(self.parts)
        )
        return 2 * away * (HIDDEN + 1) + size * (size - 1) * experts

    def outputs(self, **misread: bool) -> list[Array]:
        """Return the outputs of all tokens, right or with a misunderstanding (`_sums`)."""
        sender, token, number = self._arrivals()
        xs = np.array([self.parts[s][0][t] for s, t in zip(sender, token)]).reshape(-1, HIDDEN)
        assumed, place = number.copy(), np.arange(len(number))
        for rank in range(len(self.parts)):
            here = np.flatnonzero(number // self.local == rank)
            in_order = here[np.argsort(number[here], kind="stable")]
            if misread.get("arrive_sorted"):
                assumed[here] = number[in_order]
            if misread.get("return_sorted"):
                place[here] = in_order
        results = np.tanh(np.einsum("nh,nhk->nk", xs, self.matrices[assumed]))[place]
        return [
            _sums(part, token[sender == rank], number[sender == rank], results[sender == rank], rank, self, misread)
            for rank, part in enumerate(self.parts)
        ]

    def _arrivals(self) -> tuple[Array, Array, Array]:
        """Return sender, token and expert of every row, in the order in which rows leave their senders."""
        found = [(s, t, e) for s, (_, _, chosen) in enumerate(self.parts) for e, t in np.argwhere(chosen.T)]
        sender, token, number = np.array(found).reshape(-1, 3).T
        return sender, token, number


def _sums(
    part: Part, token: Array, number: Array, results: Array, rank: int, problem: _Problem, misread: dict[str, bool]
) -> Array:
    """Return the outputs of one rank from the results of its rows, in the order in which they left."""
    x, weights, chosen = part
    factor = weights[token, number]
    if misread.get("weights_by_token"):
        factor = weights[chosen]
    if misread.get("unweighted"):
        factor = np.ones(len(token))
    stays = number // problem.local == rank
    if misread.get("own_experts_only"):
        factor = factor * stays
    if misread.get("others_only"):
        factor = factor * ~stays
    out = np.zeros_like(x)
    if misread.get("overwritten"):
        out[token] = factor[:, None] * results
    else:
        np.add.at(out, token, factor[:, None] * results)
    return out


_MISREAD_OUTPUTS = {
    "own_experts_only": "only experts on the token's own rank are heard; send the other rows to their experts",
    "others_only": "rows whose expert is on their own rank are lost; put them into the outbox, too",
    "arrive_sorted": "arrived rows are taken as sorted by expert; they are sorted by sender, so other experts compute",
    "return_sorted": "results go home expert by expert; a sender takes them in the order in which its rows came",
    "overwritten": "a token's results overwrite each other; add them up (np.add.at)",
    "unweighted": "the weights are left out",
    "weights_by_token": "the weights are sorted by token, the rows by expert; a row has the weight of another",
}


def _problem(words: str, tokens: Sequence[int], experts: int, top_k: int, *, to: int | None = None) -> _Problem:
    """Make random tokens and choices; `to` makes every token choose that expert first."""
    numbers = np.random.default_rng(7 * experts + top_k)
    parts: list[Part] = []
    for count in tokens:
        scores = numbers.normal(size=(count, experts))
        if to is not None:
            scores[:, to] = 9.0
        chosen = _best(scores, top_k)
        weights = np.where(chosen, np.exp(scores), 0.0)
        weights /= np.maximum(weights.sum(axis=1, keepdims=True), 1e-9)
        parts.append((numbers.normal(size=(count, HIDDEN)), weights, chosen))
    return _Problem(words, parts, numbers.normal(size=(experts, HIDDEN, HIDDEN)))


def _best(scores: Array, k: int) -> Array:
    """Return True for the k largest scores of each token."""
    chosen = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(chosen, np.argsort(-scores, axis=1)[:, :k], True, axis=1)
    return chosen


_CASES: tuple[Callable[[], _Problem], ...] = (
    lambda: _problem("1 rank, 4 experts, top-1", (6,), 4, 1),
    lambda: _problem("2 ranks with one expert each, top-1", (3, 3), 2, 1),
    lambda: _problem("2 ranks with 2 experts each, top-2", (4, 4), 4, 2),
    lambda: _problem("4 ranks with 2 experts each, top-2", (6, 6, 6, 6), 8, 2),
    lambda: _problem("3 ranks, rank 1 without tokens", (4, 0, 3), 6, 2),
    lambda: _problem("4 ranks, all tokens to expert 5", (3, 3, 3, 3), 8, 1, to=5),
    lambda: _problem("2 ranks, every token to every expert", (3, 2), 4, 4),
)
_COUNTED = 3
"""The case whose calls and numbers are counted."""


@exercise("14.dispatch", "Write moe(x, weights, chosen, rank, ranks, exchange, expert) -> the outputs of one rank.")
def dispatch(answer: Any) -> Iterator[Outcome]:
    """Judge one rank, several, a rank without tokens, one expert for all, all experts for each; then calls and cost."""
    claim = "each token's weighted sum over its experts"
    problems = [make() for make in _CASES]
    outputs = [holds(f"{p.words}, the outputs", claim, lambda p=p: _output_problem(answer, p)) for p in problems]
    yield from outputs
    reason = "" if all(outcome.passed for outcome in outputs) else ONLY_FIRST
    problem = _CASES[_COUNTED]()
    error = _output_problem(answer, problem)[1]
    wrong = [f"{n} calls of expert {e}" for e in range(len(problem.matrices)) if (n := problem.calls.count(e)) != 1]
    claim = f"one call for each of the {len(problem.matrices)} experts, with all its rows"
    calls = holds(f"{problem.words}, the experts", claim, lambda: listed(wrong, most=3) if error or wrong else True)
    yield replace(calls, reason=reason)
    crossed, most = sum(problem.crossed), problem.most_numbers()
    claim = f"at most {most:,}: each row only to its expert's rank and back"
    said = "" if crossed <= most else f"{crossed:,}: the outputs are right, but rows go where no expert needs them"
    cost = holds(f"{problem.words}, the numbers that change ranks", claim, lambda: error or said or True)
    yield replace(cost, reason=reason)


def _output_problem(answer: Any, problem: _Problem) -> tuple[str, str]:
    """Return (reason, sentence) of the first wrong output; both empty for right outputs."""
    try:
        found = [np.asarray(plain(output), dtype=float) for output in problem.run(answer)]
    except Stalled as stalled:
        return "stalled", f"{stalled}; all ranks call exchange equally often, a rank without rows, too"
    except (Exception, SystemExit) as error:
        return raised(error), raised(error)
    rights = problem.outputs()
    for rank, (output, right) in enumerate(zip(found, rights, strict=True)):
        if output.shape != right.shape and output.size + right.size:
            return "shape", f"an array {list(output.shape)} on rank {rank}, which needs {list(right.shape)}"
    for rank, (output, right) in enumerate(zip(found, rights, strict=True)):
        wrong = [] if not right.size else np.flatnonzero(~np.isclose(output, right, rtol=0, atol=1e-9).all(axis=1))
        if len(wrong) and (why := rounding(output, right)):
            return ROUNDED, f"other digits on rank {rank}: {why}"
        if len(wrong):
            reason = next((words for name, words in _MISREAD_OUTPUTS.items() if _like(found, problem, name)), "")
            pair = [shown(rows[wrong[0], :3].round(3)) for rows in (output, right)]
            where = f"{pair[0]}.. instead of {pair[1]}.. for token {wrong[0]} of rank {rank}"
            return reason or "values", f"{where}: {reason}" if reason else where
    return "", ""


def _like(found: Sequence[Array], problem: _Problem, misreading: str) -> bool:
    return all(np.allclose(a, b) for a, b in zip(found, problem.outputs(**{misreading: True})) if b.size)


# ---- places under a capacity ----

_LIMITS = ((4, 2, 1, 1.0), (10, 8, 2, 1.25), (6, 4, 2, 1.0), (6, 3, 2, 2.0), (9, 4, 2, 0.5), (5, 4, 1, 1.5))
"""(tokens, experts, k, factor)."""


@exercise("14.places", "Write places(weights, chosen, k, factor) -> the tokens of each expert, -1 for an empty place.")
def places(answer: Any) -> Iterator[Outcome]:
    """Judge six routings with a capacity, tight and wide."""
    named: set[str] = set()
    for tokens, experts, k, factor in _LIMITS:
        scores = np.random.default_rng(tokens + experts).normal(size=(tokens, experts)) - np.arange(experts) / 2
        chosen = _best(scores, k)
        weights = np.where(chosen, np.exp(scores), 0.0)
        weights /= weights.sum(axis=1, keepdims=True) + np.arange(tokens)[:, None] / 100  # no two are equal
        reasons, said = _first_wrong_place(answer, weights, chosen, k, factor)
        capacity = _capacity(tokens, experts, k, factor)
        given = f"{tokens} tokens, {experts} experts, k {k} and factor {factor:g}"
        outcome = holds(given, f"the best of each expert in {capacity} places", lambda s=said: s or True)
        yield replace(outcome, reason="; ".join(reason for reason in reasons if reason not in named) or ONLY_FIRST)
        named.update(reasons)


def _capacity(tokens: int, experts: int, k: int, factor: float) -> int:
    return min(math.ceil(tokens * k / experts * factor), tokens)


Reasons = tuple[str, ...]
"""Words for each misunderstanding in an answer."""


def _first_wrong_place(answer: Any, weights: Array, chosen: Array, k: int, factor: float) -> tuple[Reasons, str]:
    """Return (reasons, sentence about the first expert that differs); both empty for a right table."""
    try:
        table = plain(answer(weights.copy(), chosen.copy(), k, factor))
    except (Exception, SystemExit) as error:
        return (raised(error),), raised(error)
    right = _places(weights, chosen, _capacity(len(chosen), chosen.shape[1], k, factor))
    if table == right:
        return (), ""
    if not isinstance(table, list) or len(table) != len(right) or not all(isinstance(row, list) for row in table):
        return ("form",), f"{shown(table)}: give one list of tokens for each of the {len(right)} experts"
    first = next(expert for expert, pair in enumerate(zip(table, right)) if pair[0] != pair[1])
    fitting = (words for words, other in _misread_places(weights, chosen, k, factor) if other == table)
    reasons = next(fitting, ())
    where = f"{shown(table[first])} instead of {shown(right[first])} for expert {first}"
    return reasons or ("values",), f"{where}: {'; '.join(reasons)}" if reasons else where


def _places(weights: Array, chosen: Array, capacity: int, *, key: str = "weight", padded: bool = True) -> Any:
    """Make the table: each expert takes tokens in the order of `key` and lists them by token (`listed`: as taken)."""
    table = []
    for weight, wanted in zip(weights.T, chosen.T):
        wishes = np.flatnonzero(wanted)
        if key in ("weight", "listed"):
            wishes = wishes[np.argsort(-weight[wishes])]
        elif key == "smallest":
            wishes = wishes[np.argsort(weight[wishes])]
        taken = wishes[:capacity].tolist()
        taken = taken if key == "listed" else sorted(taken)
        table.append(taken + [-1] * (capacity - len(taken)) * padded)
    return table


def _misread_places(weights: Array, chosen: Array, k: int, factor: float) -> Iterator[tuple[Reasons, Any]]:
    """Yield (words for a misunderstanding, or for two at once; the table that it gives)."""
    tokens, experts = chosen.shape
    right = _capacity(tokens, experts, k, factor)
    sizes = {
        "": right,
        "C is rounded up, not down": min(int(tokens * k / experts * factor), tokens),
        "C counts rows, and a token makes k of them; k is missing": _capacity(tokens, experts, 1, factor),
        "an expert never gets more than all T tokens, so C is at most T": math.ceil(tokens * k / experts * factor),
        "C is the mean load; the factor is missing": _capacity(tokens, experts, k, 1.0),
    }
    keys = {
        "": "weight",
        "a full expert keeps the first tokens, not those with the largest weights": "position",
        "a full expert keeps the smallest weights; it needs the largest": "smallest",
        "the right tokens in another order, so the layer's sums are the same; list them by number": "listed",
    }
    for order, key in keys.items():
        for size, capacity in sizes.items():
            yield tuple(filter(None, (size, order))), _places(weights, chosen, capacity, key=key)
    yield (
        ("empty places are missing; without them the shape depends on the routing",),
        _places(weights, chosen, right, padded=False),
    )
    kept = [[token for token in row if token >= 0] for row in _places(weights, chosen, right)]
    dropped = {t for row, wanted in zip(kept, chosen.T) for t in np.flatnonzero(wanted).tolist() if t not in row}
    alone = [[token for token in row if token not in dropped] for row in kept]
    others = [np.flatnonzero(~wanted).tolist() for wanted in chosen.T]
    yield (
        ("a token that one expert drops loses its other experts, too; it keeps them",),
        [row + [-1] * (right - len(row)) for row in alone],
    )
    filled = [sorted(row + other[: right - len(row)]) for row, other in zip(kept, others)]
    words = (
        "tokens that did not choose the expert fill its places; Megatron pads so, with weight 0, but here empty is -1"
    )
    yield (words,), filled
