"""Exercise of chapter 14: an MoE layer over simulated ranks, from the routing to the summed results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.check.scoring import Outcome, exercise, holds, listed, plain, shown

Array = NDArray[np.float64]
Part = tuple[Array, Array, NDArray[np.bool_]]
HIDDEN = 5
"""Numbers of a row."""


@dataclass
class _Problem:
    """Tokens, routing and experts; counts the rows that the answer sends and computes."""

    words: str
    local: int
    parts: list[Part]
    """By rank: x [T, H], weights [T, E], choice [T, E]."""
    matrices: Array
    """[E, H, H]: expert e makes tanh(row times matrices[e])."""
    crossed: int = 0
    """Numbers that went from one rank to another."""
    calls: list[tuple[int, int]] = field(default_factory=list)
    """(rank, expert), in order."""

    def exchange(self, outboxes: Any) -> list[list[Array]]:
        """Rank r sends outboxes[r][s] to rank s; the returned inboxes[r][s] came from rank s to rank r."""
        ep = len(self.parts)
        lengths = [len(each) for each in outboxes]
        assert lengths == [ep] * ep, f"exchange takes {ep} lists of {ep} arrays, one list a rank; got lengths {lengths}"
        boxes = [[np.array(box) for box in each] for each in outboxes]
        self.crossed += sum(boxes[r][s].size for r in range(ep) for s in range(ep) if r != s)
        return [[boxes[s][r] for s in range(ep)] for r in range(ep)]

    def expert(self, rank: int, number: int, rows: Any) -> Array:
        """Rows [n, H] through one expert, on the rank that holds it."""
        holder = number // self.local
        assert holder == rank, f"expert {number} lives on rank {holder}, and was asked on rank {rank}"
        self.calls.append((rank, number))
        return np.tanh(np.asarray(rows, dtype=float).reshape(-1, HIDDEN) @ self.matrices[number])

    def expected(self) -> list[Array]:
        """Outputs of all tokens, computed expert by expert without ranks."""
        return [
            sum((weights[:, e : e + 1] * chosen[:, e : e + 1] * np.tanh(x @ self.matrices[e])
                 for e in range(len(self.matrices))), np.zeros_like(x))
            for x, weights, chosen in self.parts
        ]  # fmt: skip

    def most_numbers(self) -> int:
        """Count each row that must travel, there and back, with one number more each way, and a table of counts."""
        ep, experts = len(self.parts), len(self.matrices)
        away = sum(
            int(chosen.sum()) - int(chosen[:, rank * self.local : (rank + 1) * self.local].sum())
            for rank, (_, _, chosen) in enumerate(self.parts)
        )
        return 2 * away * (HIDDEN + 1) + ep * (ep - 1) * experts


def _problem(words: str, tokens: Sequence[int], experts: int, top_k: int, *, to: int | None = None) -> _Problem:
    """Random tokens and choices; `to` makes every token choose that expert first."""
    numbers = np.random.default_rng(7 * experts + top_k)
    parts: list[Part] = []
    for count in tokens:
        scores = numbers.normal(size=(count, experts))
        if to is not None:
            scores[:, to] = 9.0
        chosen = np.zeros((count, experts), dtype=bool)
        np.put_along_axis(chosen, np.argsort(-scores, axis=1)[:, :top_k], True, axis=1)
        weights = np.where(chosen, np.exp(scores), 0.0)
        weights /= np.maximum(weights.sum(axis=1, keepdims=True), 1e-9)
        parts.append((numbers.normal(size=(count, HIDDEN)), weights, chosen))
    matrices = numbers.normal(size=(experts, HIDDEN, HIDDEN))
    return _Problem(words, experts // len(tokens), parts, matrices)


_CASES: tuple[Callable[[], _Problem], ...] = (
    lambda: _problem("1 rank, 4 experts, top-1", (6,), 4, 1),
    lambda: _problem("2 ranks with one expert each, top-1", (3, 3), 2, 1),
    lambda: _problem("2 ranks with 2 experts each, top-2", (4, 4), 4, 2),
    lambda: _problem("4 ranks with 2 experts each, top-2", (6, 6, 6, 6), 8, 2),
    lambda: _problem("3 ranks, one of them without tokens", (4, 0, 3), 6, 2),
    lambda: _problem("4 ranks, all tokens to expert 5", (3, 3, 3, 3), 8, 1, to=5),
    lambda: _problem("2 ranks, every token to every expert", (3, 2), 4, 4),
)


@exercise("14.dispatch", "Write moe(parts, exchange, expert) -> the outputs of an MoE layer, one array per rank.")
def dispatch(answer: Any) -> Iterator[Outcome]:
    """Judge one rank, several, a rank without tokens, one expert for all, all experts for each; then the cost.

    An answer in another form gets one sentence and no further case.
    """
    for make in _CASES:
        problem = make()
        words = f"{problem.words}, the outputs"
        outcome = holds(words, "each token's weighted sum over its experts", lambda p=problem: _first_wrong(answer, p))
        yield outcome
        if make is _CASES[0] and not outcome.passed:
            return
    problem = _CASES[3]()
    yield holds(
        f"{problem.words}, the experts",
        "one call for each of the 8 experts, with all its rows",
        lambda: _called_once(answer, problem),
    )
    again = _CASES[3]()
    yield holds(
        f"{again.words}, the numbers that change ranks",
        f"at most {again.most_numbers():,}: each row only to its expert's rank and back",
        lambda: _few_numbers(answer, again),
    )


def _first_wrong(answer: Any, problem: _Problem) -> bool | str:
    """Return True, or words for the first token with a wrong output."""
    copies = [(x.copy(), weights.copy(), chosen.copy()) for x, weights, chosen in problem.parts]
    outputs = answer(copies, problem.exchange, problem.expert)
    if not hasattr(outputs, "__len__") or len(outputs) != len(problem.parts):
        return f"{shown(outputs)}, which is not a list with one array for each of {len(problem.parts)} ranks"
    for rank, (output, right) in enumerate(zip(outputs, problem.expected(), strict=True)):
        got = np.asarray(plain(output), dtype=float).reshape(-1, HIDDEN) if np.size(output) == 0 else np.asarray(output)
        if got.shape != right.shape:
            return f"an array {list(got.shape)} on rank {rank}, which holds {len(right)} tokens of {HIDDEN} numbers"
        for token, (found, expected) in enumerate(zip(got, right, strict=True)):
            if not np.allclose(found, expected, rtol=0, atol=1e-9):
                pair = [shown(row[:3].round(3)) for row in (found, expected)]
                return f"{pair[0]}.. instead of {pair[1]}.. for token {token} of rank {rank}"
    return True


def _called_once(answer: Any, problem: _Problem) -> bool | str:
    answer(list(problem.parts), problem.exchange, problem.expert)
    experts = range(len(problem.matrices))
    counts = {e: sum(number == e for _, number in problem.calls) for e in experts}
    wrong = [f"{count} calls of expert {e}" for e, count in counts.items() if count != 1]
    return not wrong or listed(wrong, most=3)


def _few_numbers(answer: Any, problem: _Problem) -> bool | str:
    outputs = answer(list(problem.parts), problem.exchange, problem.expert)
    if _wrong(outputs, problem.expected()):
        return "another result, so that nothing can be said about its cost"
    return problem.crossed <= problem.most_numbers() or f"{problem.crossed:,}"


def _wrong(outputs: Any, expected: Sequence[Array]) -> bool:
    return any(
        np.shape(output) != right.shape or not np.allclose(output, right, rtol=0, atol=1e-9)
        for output, right in zip(outputs, expected, strict=True)
    )
