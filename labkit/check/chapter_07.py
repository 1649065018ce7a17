"""Exercises of chapter 07: the pairs of each rank, ring attention as the program of one rank, and its backward.

Simulated ranks run the programs of the ring and of its backward at once, and each sees only its own data. The forward's
values are the rows of an identity matrix, so each output row has the weights that the answer gave to the keys. Wrong
weights and wrong gradients are compared with those of known misunderstandings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.check.rank_threads import RankThreads, Stalled
from labkit.check.scoring import (
    Diagnosis,
    Misreadings,
    Outcome,
    asked,
    close,
    exercise,
    holds,
    plain,
    raised,
    reason_of,
)
from labkit.parallel.context.ring_plan import Layout, chunks_of_rank, ring_load

Array = NDArray[Any]

# ---- pairs of each rank ----

_LENGTHS = ((8, 2), (16, 4), (12, 3), (64, 4), (10, 1))
"""(positions, ranks)."""


@exercise("07.work", "Write work(seq_length, cp) -> the pairs that each rank computes under the plain cut.")
def work(answer: Any) -> Iterator[Outcome]:
    """Judge one to four ranks."""
    return asked(
        _LENGTHS,
        given="{} positions over cp {}".format,
        right=lambda length, cp: [sum(steps) for steps in ring_load(length, cp, layout="contiguous")],
        tried=answer,
        misread=_misread_work,
    )


def _misread_work(length: int, cp: int) -> Misreadings:
    part, ranks = length // cp, range(cp)
    own, even = part * (part + 1) // 2, length * (length + 1) // 2 // cp
    right = [own + rank * part**2 for rank in ranks]
    return {
        "the pairs are shared out evenly; late positions see more keys than early ones": [even] * cp,
        "there is no mask; a position sees no later key": [part * length] * cp,
        "a rank's own keys alone count; it sees all keys of earlier ranks, too": [own] * cp,
        "a position sees itself, too": [pairs - part for pairs in right],
        "the rank's own block has no mask; it is a triangle, not a square": [(rank + 1) * part**2 for rank in ranks],
        "a rank sees later keys in place of earlier ones": right[::-1],
        "the triangle has its diagonal, L (L + 1) / 2 pairs and not L²/2": [
            part**2 // 2 + rank * part**2 for rank in ranks
        ],
        "the rank's own block is left out": [rank * part**2 for rank in ranks],
        "each number counts the pairs of all ranks up to this one": np.cumsum(right).tolist(),
    }


# ---- programs of one rank ----


_alike = close(atol=1e-6)


class _Case(NamedTuple):
    """A sequence over cp ranks, with its arrays in the order of positions; `at` has the positions of each rank."""

    name: str
    q: Array
    k: Array
    v: Array
    at: list[NDArray[np.int64]]

    @property
    def scores(self) -> Array:
        return self.q @ self.k.T / np.sqrt(self.q.shape[1])

    @property
    def causal(self) -> NDArray[np.bool_]:
        return np.tri(len(self.q), dtype=bool)

    def by_position(self, values: Sequence[Any]) -> Array:
        """Return values[rank][row] as an array in the order of positions."""
        whole = np.empty((len(self.q), *np.shape(values[0])[1:]))
        for rows, part in zip(self.at, values, strict=True):
            whole[rows] = part
        return whole

    @property
    def steps(self) -> NDArray[np.int64]:
        """Return [S, S]: the ring step in which the query's rank has the key."""
        holder = self.by_position([np.full(len(rows), rank) for rank, rows in enumerate(self.at)]).astype(int)
        return (holder[:, None] - holder[None]) % len(self.at)

    @property
    def places(self) -> Array:
        """Return [S]: the row of each position on its rank."""
        return self.by_position([np.arange(len(rows)) for rows in self.at])


_CASES: tuple[tuple[int, Layout, float], ...] = (
    (1, "zigzag", 1.0),
    (2, "contiguous", 1.0),
    (2, "zigzag", 1.0),
    (4, "zigzag", 1.0),
    (4, "zigzag", 800.0),
)
"""(cp, way to cut the sequence, factor of the queries, because scores of several hundred overflow exp)."""


def _case(cp: int, layout: Layout, factor: float, width: int = 0) -> _Case:
    """Return 4 cp positions in chunks of 2; [S, width], or [S, S] with values that show the weights."""
    numbers = np.random.default_rng(cp)
    length = 4 * cp
    q, k, v = numbers.normal(size=(3, length, width or length))
    chunks = [chunks_of_rank(cp, rank, layout) for rank in range(cp)]
    at = [np.concatenate([np.arange(2 * chunk, 2 * chunk + 2) for chunk in pair]) for pair in chunks]
    cut = "plain cut" if layout == "contiguous" else "zigzag"
    name = f"cp {cp}, {cut}{', scores of hundreds' if factor > 1 else ''}"
    return _Case(name, factor * q, k, v if width else np.eye(length), at)


class _Run(NamedTuple):
    """Results of all ranks in the order of positions (no array after an error); a rank's messages, the largest one."""

    arrays: list[Array]
    error: str
    messages: int
    largest: int


def _size(held: Any) -> int:
    """Count the numbers in whatever was passed on."""
    if isinstance(held, dict):
        return sum(map(_size, held.values()))
    return sum(map(_size, held)) if isinstance(held, (list, tuple)) else int(np.size(held))


def _run(answer: Any, case: _Case, rows: Sequence[Array], shapes: Sequence[Array]) -> _Run:
    """Run the answer on every rank, with its parts of `rows`, k and v; its arrays have the rows of `shapes`."""
    cp = len(case.at)
    threads, sizes = RankThreads(cp), [0]

    def program(rank: int) -> list[Array]:
        at = case.at[rank]

        def pass_on(held: Any) -> Any:
            sizes.append(_size(held))
            return deepcopy(threads.meet(rank, "pass_on", deepcopy(held))[(rank - 1) % cp])

        mine = tuple(part[at].copy() for part in rows)
        with np.errstate(all="ignore"):
            found = answer(mine, (case.k[at].copy(), case.v[at].copy(), at.copy()), cp, pass_on)
        parts = [found] if len(shapes) == 1 else found
        if not isinstance(parts, (list, tuple)) or len(parts) != len(shapes):
            raise ValueError(f"rank {rank} returns {type(found).__name__}, not {len(shapes)} arrays")
        arrays = [np.asarray(plain(part), dtype=float) for part in parts]
        for array, like in zip(arrays, shapes):
            if array.shape != like[at].shape:
                raise ValueError(f"rank {rank} returns an array {list(array.shape)}, not {list(like[at].shape)}")
        return arrays

    try:
        found = threads.run(program)
    except Stalled as stalled:
        return _Run([], str(stalled), 0, 0)
    except (Exception, SystemExit) as error:
        return _Run([], raised(error), 0, 0)
    return _Run([case.by_position(parts) for parts in zip(*found)], "", threads.calls["pass_on"], max(sizes))


def _rank_of(case: _Case, position: int) -> int:
    return next(rank for rank, rows in enumerate(case.at) if position in rows)


def _place(case: _Case, position: int) -> str:
    return f"position {position} (rank {_rank_of(case, position)}, row {case.places[position]:.0f})"


# ---- the ring ----


@exercise("07.ring", "Write ring(rows, kv, cp, pass_on) -> the output of one rank's rows; all ranks run it at once.")
def ring(answer: Any) -> Iterator[Outcome]:
    """Judge the weights of every row on one, two and four ranks, both cuts, large scores; the messages of a rank."""
    diagnosis = Diagnosis()
    for cp, layout, factor in _CASES:
        case = _case(cp, layout, factor)
        rows = (case.q, np.arange(len(case.q)))
        found = _run(answer, case, rows, [case.v])
        claim = "the weights of one softmax over all keys up to each position"
        said = found.error or _wrong_weights(case, *found.arrays, diagnosis=diagnosis)
        yield _said(f"{case.name}, the outputs", claim, said)
        if cp > 1 and factor == 1.0:
            most = case.at[0].size * (2 * case.q.shape[1] + 1)
            claim = f"{cp - 1} with one rank's k, v and positions, at most {most} numbers"
            said = found.error or _wrong_messages(found, cp, most, 2 * case.at[0].size * case.q.shape[1])
            yield _said(f"{case.name}, the messages of a rank", claim, said)


def _said(given: str, claim: str, said: str) -> Outcome:
    """Return the outcome for a sentence about a fault; the sentence is empty for a right result."""
    return holds(given, claim, lambda: (reason_of(said), said))


def _wrong_messages(found: _Run, cp: int, most: int, least: int) -> str:
    if found.largest > most:
        return f"one of {found.largest} numbers: more than one rank's keys travel at once, or queries travel, too"
    if found.messages >= cp:
        apart, late = "k, v and positions travel together, in cp - 1 messages", "the last brings a rank's own keys home"
        return f"{found.messages}: {apart if found.largest < most else f'{late}, for nothing'}"
    if found.messages < cp - 1:
        return f"{found.messages}: with fewer than cp - 1 messages the keys of some rank never arrive"
    if found.largest < least:
        return f"one of {found.largest} numbers at most: k and v do not travel"
    return ""


def _wrong_weights(case: _Case, found: Array, *, diagnosis: Diagnosis) -> str:
    """Name the first weight that differs, and the misunderstanding; empty for right weights.

    At scores of hundreds several misunderstandings give the same weights, so one that was named before has precedence.
    """
    right = _softmax(case.scores, case.causal)
    if _alike(found, right):
        return ""
    row = next(row for row in range(len(right)) if not _alike(found[row], right[row]))
    key = next(key for key in range(len(right)) if not _alike(found[row, key], right[row, key]))
    finite: Array = np.asarray(np.isfinite(found).all(axis=1))
    if not _alike(found[finite], right[finite]):  # other rows that are nan must not hide a misunderstanding
        reasons = [words for words, other in _misread_weights(case) if _alike(found[finite], other[finite])]
        reason = diagnosis.meant(reasons)
    else:
        reason = _nan_reason(case, finite)
    if not reason and np.nan_to_num(found[row, row + 1 :]).any():
        reason = "later keys have a weight, too"
    elif not reason and not found[row, key]:
        reason = f"this key of rank {(_rank_of(case, row) - case.steps[row, key]) % len(case.at)} never counts"
    seen = f"weight {found[row, key]:.3g} of key {key} instead of {right[row, key]:.3g} at {_place(case, row)}"
    return f"{seen}: {reason}" if reason else seen


def _nan_reason(case: _Case, finite: Array) -> str:
    blocks = [case.causal & (case.steps == step) for step in range(len(case.at))]
    if all(any(not block[row].any() for block in blocks) for row in np.flatnonzero(~finite)):
        return "this row sees no key of a block; its maximum there is -inf, and -inf - (-inf) is nan"
    if abs(case.scores).max() > 700:
        return "exp of several hundred overflows; subtract the largest score first, each row its own, or its sum is 0"
    return ""


def _exps(scores: Array, seen: Any) -> Array:
    """Return exp(score - largest of the row), and 0 where nothing is seen."""
    masked = np.where(seen, scores, -np.inf)
    with np.errstate(all="ignore"):
        return np.nan_to_num(np.exp(masked - masked.max(axis=1, keepdims=True)))


def _softmax(scores: Array, seen: Any) -> Array:
    """Return the weights of each row, and 0 in a row that sees nothing."""
    exps = _exps(scores, seen)
    return exps / np.maximum(exps.sum(axis=1, keepdims=True), 1e-300)


def _misread_weights(case: _Case) -> Iterator[tuple[str, Array]]:
    """Yield (words for a misunderstanding, its weights)."""
    scores, seen, steps, cp = case.scores, case.causal, case.steps, len(case.at)
    blocks = [_softmax(scores, seen & (steps == step)) for step in range(cp)]
    uniform = [np.where(b.any(axis=1, keepdims=True), b, (steps == i) * cp / len(b)) for i, b in enumerate(blocks)]
    again = (steps == 0) + (cp - 1) * (steps == 1)
    counted = _exps(scores, seen & (again > 0)) * again
    unmatched = [_without_rescaling(scores, seen, steps, running=running) for running in (False, True)]
    means = "the averages over each rank's keys are averaged; weigh each with its sum of exponentials"
    sums = "the averages over each rank's keys are added; weigh each with its sum of exponentials"
    places = "the mask compares places in a block; rows have positions, and those of keys travel with them"
    scale = "sums relative to different maxima are added; multiply the older ones by exp(old maximum - new maximum)"
    own = "only the rank's own keys count; pass_on brings those of the other ranks"
    neighbour = "the neighbour's keys count in every step; pass on what you hold, not your own keys"
    yield own, _softmax(scores, seen & (steps == 0))
    yield from ((means, np.mean(blocks, axis=0)), (means, np.mean(uniform, axis=0)), (sums, np.sum(blocks, axis=0)))
    yield places, _softmax(scores, case.places[:, None] >= case.places[None])
    yield "nothing is masked; a query sees the keys up to its own position", _softmax(scores, True)
    yield "a position does not see itself; its own key counts, too", _softmax(scores, np.tri(len(scores), k=-1) > 0)
    yield "scores are not divided by the root of D", _softmax(scores * np.sqrt(case.q.shape[1]), seen)
    yield neighbour, counted / counted.sum(axis=1, keepdims=True)
    yield from ((scale, wrong / wrong.sum(axis=1, keepdims=True)) for wrong in unmatched)
    yield "nothing is divided by the sum of exponentials", _exps(scores, seen)


def _without_rescaling(scores: Array, seen: Array, steps: Array, *, running: bool) -> Array:
    """Return exponentials, each less the largest score of its block, or of the blocks up to its own."""
    found = np.zeros_like(scores)
    for step in range(steps.max() + 1):
        upto = steps <= step if running else steps == step
        top = np.where(seen & upto, scores, -np.inf).max(axis=1, keepdims=True)
        with np.errstate(all="ignore"):
            exps = np.nan_to_num(np.exp(np.where(seen & (steps == step), scores, -np.inf) - top))
        found += exps
    return found


# ---- backward ----


@exercise("07.backward", "Write backward(rows, kv, cp, pass_on) -> (dq, dk, dv) of one rank; all ranks run it at once.")
def backward(answer: Any) -> Iterator[Outcome]:
    """Judge dq, then dk and dv, on one, two and four ranks, and the messages of a rank."""
    for cp, layout, _ in _CASES[:-1]:
        case = _case(cp, layout, 1.0, width=3)
        grad = np.random.default_rng(10 + cp).normal(size=case.v.shape)
        rows, from_ranks = _saved(case, grad)
        dq, dkv = from_ranks.sum(axis=0)[0], from_ranks.sum(axis=0)[1:]
        found = _run(answer, case, rows, [case.q, case.k, case.v])
        said = found.error or _wrong_gradient(case, "dq", found.arrays[:1], dq[None], _misread_dq(case, grad))
        yield _said(f"{case.name}, dq", "the sum over all keys", said)
        said = found.error or _wrong_gradient(case, "dk, dv", found.arrays[1:], dkv, _misread_dkv(case, from_ranks))
        yield _said(f"{case.name}, dk and dv", "the sum over the queries of all ranks", said)
        if cp > 1:
            most = case.at[0].size * (4 * case.q.shape[1] + 1)
            claim = f"1 to {2 * cp}, each with one rank's k, v, positions and sums at most, {most} numbers"
            said = found.error or _wrong_transport(found, cp, most)
            yield _said(f"{case.name}, the messages of a rank", claim, said)


def _wrong_transport(found: _Run, cp: int, most: int) -> str:
    if found.largest > most:
        several = "more than one rank's keys and sums travel at once, or queries or dq travel, too"
        return f"one of {found.largest} numbers: {several}"
    if found.messages > 2 * cp:
        home = "the sums are home after cp hops of at most two messages (kv, and dk with dv)"
        return f"{found.messages}: {home}; later messages are for nothing"
    return "" if found.messages else "0: nothing arrives, and no sum leaves"


def _saved(case: _Case, grad: Array, only: Any = True) -> tuple[tuple[Array, ...], Array]:
    """Return (q, positions, out, lse, grad), and each query rank's shares [cp, 3, S, D] of dq, dk and dv.

    `only` is a mask over pairs: the shares are left out where it is false.
    """
    scores, root = case.scores, np.sqrt(case.q.shape[1])
    p = _softmax(scores, case.causal)
    lse = np.log(np.exp(np.where(case.causal, scores, -np.inf)).sum(axis=1))
    out = p @ case.v
    p = p * only
    ds = p * (grad @ case.v.T - (grad * out).sum(axis=1, keepdims=True)) / root
    shares = []
    for rows in case.at:
        mine = np.isin(np.arange(len(p)), rows)[:, None]
        shares.append([(ds * mine) @ case.k, (ds * mine).T @ case.q, (p * mine).T @ grad])
    return (case.q, np.arange(len(p)), out, lse, grad), np.array(shares)


def _wrong_gradient(
    case: _Case, name: str, found: Sequence[Array], right: Array, misread: Iterator[tuple[str, Array]]
) -> str:
    """Name the first position that differs, and the misunderstanding; empty for right gradients."""
    mine = np.array(found)
    if _alike(mine, right):
        return ""
    place = next(row for row in range(right.shape[1]) if not _alike(mine[:, row], right[:, row]))
    reason = next((words for words, other in misread if _alike(mine, other)), "")
    got, wanted = mine[:, place].ravel().round(3).tolist(), right[:, place].ravel().round(3).tolist()
    seen = f"{name} {got} instead of {wanted} at {_place(case, place)}"
    return f"{seen}: {reason}" if reason else seen


def _misread_dq(case: _Case, grad: Array) -> Iterator[tuple[str, Array]]:
    for words, pairs in (
        ("only the rank's own keys give a share; add that of every step", case.steps == 0),
        ("the rank's own keys give no share; step 0 counts, too", case.steps > 0),
        ("the last step's keys give no share", case.steps < len(case.at) - 1),
    ):
        yield words, _saved(case, grad, pairs)[1].sum(axis=0)[:1]


def _misread_dkv(case: _Case, from_ranks: Array) -> Iterator[tuple[str, Array]]:
    """Yield (words for a misunderstanding, its dk and dv). from_ranks [cp, 3, S, D]."""
    cp = len(case.at)
    shares = from_ranks[:, 1:]
    total = shares.sum(axis=0)
    own, turned, kept, mixed = (np.zeros_like(total) for _ in range(4))
    for rank, rows in enumerate(case.at):
        after, mine = (rank + 1) % cp, shares[rank][:, rows]
        own[:, rows], turned[:, rows] = mine, total[:, case.at[after]]
        mixed[:, rows] = mine + turned[:, rows] - shares[after][:, case.at[after]]
        kept[:, rows] = sum(shares[rank][:, others] for others in case.at)
    yield "only the rank's own queries give a share; those of other ranks see its keys, too", own
    yield "these are the sums of the next rank's keys; one more hop brings them home", turned
    yield "the other shares are those of the next rank's keys; one more hop brings them home", mixed
    yield "shares of all ranks' keys are added up; the sum of a key travels on with the key", kept
    yield "the share of the rank's own queries is missing", total - own
    yield "the share of the rank's own queries is added twice", total + own
