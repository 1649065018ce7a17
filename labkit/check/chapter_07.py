"""Exercises and bets of chapter 07: ring attention as the program of one rank, a cut of the sequence, the backward.

Simulated ranks run the programs of the ring and of its backward at once (`ring_ranks.py`). The forward's values are the
rows of an identity matrix, so each output row has the weights that the answer gave to the keys. Wrong weights and wrong
gradients are compared with those of known misunderstandings. A cut is judged by the pairs that its ranks compute at
each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from labkit.check.bets import ask
from labkit.check.ring_ranks import CASES, RingCase, RingRun, ring_case, run_on_ring
from labkit.check.scoring import Diagnosis, Outcome, close, exercise, holds, plain, reason_of
from labkit.parallel.context.ring_plan import cut_load, ring_time

if TYPE_CHECKING:
    from labkit.viz.figure import Figure

Array = NDArray[Any]

# ---- bets ----

ask(
    "07.slowest",
    "Eight GPUs share a causal text in equal parts, and GPU 7 computes 15 times as many pairs (a query and a key that "
    "it may see) as GPU 0. Somebody finds a cut that gives all of them the same work. How many times faster is "
    "attention then?",
    choices={
        "15 times": "That is GPU 7 against GPU 0. But what counts is GPU 7 against the mean of all eight.",
        "about 4 times": "GPU 7 computes 7.5 squares of L x L pairs. What do all eight compute on average?",
        "about 2 times": "GPU 7 computes 7.5 squares of L x L pairs, and the mean of all eight is 4: 1.875 times. With "
        "more GPUs it tends to 2, because a triangle is half of its square.",
        "no faster": "All of them wait for GPU 7, in every step of the ring.",
    },
)
ask(
    "07.bytes",
    "Forward passes kv on. Let backward pass the same keys and values on again, so that queries stay where they are. "
    "The gradients dk and dv have to get back to their owners. How many bytes must a rank send in backward at least, "
    "compared with forward? (All numbers have 64 bits, and no rank has room for all keys.)",
    choices={
        "as many": "Keys and values go round again, since no rank has kept those of others. The gradients come on top.",
        "twice as many": "kv goes round once more, and dkv, which is as large, follows it. With kv in 16 bits it "
        "depends on the type of dkv: Transformer Engine sends 16 bits too. labkit sends 32, so that the sums don't "
        "lose digits at each hop, and that makes three times.",
        "cp times as many": "Each gradient would be sent on its own then. But what all ranks owe to one key is a sum, "
        "and a sum can grow on its way.",
    },
)
ask(
    "07.double",
    "A text gets twice as long, and gets twice as many GPUs, on links as fast as before. On each GPU the part has the "
    "same length as before. Is it harder now to hide the ring's messages behind computing?",
    choices={
        "harder": "There are twice as many hops. But each has its own block to hide behind, as large as before.",
        "the same": "A hop carries the kv of one part, and a block is one part against one part. Neither knows how "
        "many parts there are. A ring that leaves the node is another matter: its link is slower.",
        "easier": "The work of a GPU doubles, that's true. But so does the number of its hops.",
    },
)
ask(
    "07.fits",
    "Llama 3 with 8 billion parameters, texts of 131,072 tokens, eight H100s with 77.9 GB each. In all the runs every "
    "layer is recomputed and the optimizer is spread over the eight. At which cp does it fit, by labkit's planner?",
    choices={
        "2": "Half of what depends on the tokens is still there, next to what doesn't depend on them.",
        "4": "Nearly. What depends on the tokens shrinks by the factor cp, the weights and gradients don't.",
        "8": "What depends on the tokens, 137 GB, is divided by cp. Weights, gradients and the optimizer's share, "
        "60 GB, are not, so even at cp 8 there is hardly any room left.",
        "never": "What depends on the tokens becomes an eighth. It's close, though.",
    },
)


# ---- the ring ----

_alike = close(atol=1e-6)


@exercise("07.ring", "Write ring(q, kv, cut, cp) -> output and lse of one rank's queries; all ranks run it at once.")
def ring(answer: Any) -> Iterator[Outcome]:
    """Judge the weights and lse of every row on one, two and four ranks, two cuts, large scores; a rank's messages."""
    diagnosis = Diagnosis()
    for cp, layout, factor in CASES:
        case = ring_case(cp, layout, factor)
        right = _lse(case)
        found = run_on_ring(answer, case, [], [case.v, right])
        claim = "the weights of one softmax over all keys up to each position"
        said = found.error or _wrong_weights(case, found.arrays[0], diagnosis=diagnosis)
        yield _said(f"{case.name}, the outputs", claim, said)
        if cp > 1 and factor == 1.0:
            most = 2 * case.at[0].size * case.q.shape[1]
            claim = f"{cp - 1} with one rank's kv, {most} numbers"
            wrong = found.error or _wrong_messages(found, cp, most)
            yield _said(f"{case.name}, the messages of a rank", claim, wrong)
        wrong = said or _wrong_lse(case, found.arrays[1], right)
        yield _said(f"{case.name}, the lse", "the log of the sum over all keys up to each position", wrong)


def _lse(case: RingCase) -> Array:
    return np.logaddexp.reduce(np.where(case.causal, case.scores, -np.inf), axis=1)


def _wrong_lse(case: RingCase, found: Array, right: Array) -> str:
    if _alike(found, right):
        return ""
    row = next(row for row in range(len(right)) if not _alike(found[row], right[row]))
    return (
        f"{found[row]:.3g} instead of {right[row]:.3g} at {case.place_of(row)}: backward needs the log of the sum over "
        f"all keys, not over those of one block"
    )


def _said(given: str, claim: str, said: str) -> Outcome:
    """Return the outcome for a sentence about a fault; the sentence is empty for a right result."""
    return holds(given, claim, lambda: (reason_of(said), said))


def _wrong_messages(found: RingRun, cp: int, most: int) -> str:
    if found.largest > most:
        return f"one of {found.largest} numbers: more than one rank's keys travel at once, or queries travel, too"
    if found.messages >= cp:
        apart, late = "k and v travel together, in cp - 1 messages", "the last brings a rank's own keys home"
        return f"{found.messages}: {apart if found.largest < most else f'{late}, for nothing'}"
    if found.messages < cp - 1:
        return f"{found.messages}: with fewer than cp - 1 messages the keys of some rank never arrive"
    if found.largest < most:
        return f"one of {found.largest} numbers at most: k and v don't travel"
    return ""


def _wrong_weights(case: RingCase, found: Array, *, diagnosis: Diagnosis) -> str:
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
        reason = f"this key of rank {(case.holder[row] - case.steps[row, key]) % len(case.at)} never counts"
    seen = f"weight {found[row, key]:.3g} of key {key} instead of {right[row, key]:.3g} at {case.place_of(row)}"
    return f"{seen}: {reason}" if reason else seen


def _nan_reason(case: RingCase, finite: Array) -> str:
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


def _misread_weights(case: RingCase) -> Iterator[tuple[str, Array]]:
    """Yield (words for a misunderstanding, its weights)."""
    scores, seen, steps, cp = case.scores, case.causal, case.steps, len(case.at)
    blocks = [_softmax(scores, seen & (steps == step)) for step in range(cp)]
    uniform = [np.where(b.any(axis=1, keepdims=True), b, (steps == i) * cp / len(b)) for i, b in enumerate(blocks)]
    again = (seen & (steps == 0)) + sum((steps == 1) & _seen_as(case, step) for step in range(1, cp))
    counted = _exps(scores, again > 0) * again
    unmatched = [_without_rescaling(scores, seen, steps, running=running) for running in (False, True)]
    means = "the averages over each rank's keys are averaged; weigh each with its sum of exponentials"
    sums = "the averages over each rank's keys are added; weigh each with its sum of exponentials"
    places = "the mask compares places in a block; cut has the positions of queries and keys"
    source = "the keys that came are those of rank - step; your mask has the positions of rank + step"
    scale = "sums relative to different maxima are added; multiply the older ones by exp(old maximum - new maximum)"
    own = "only the rank's own keys count; pass_on brings those of the other ranks"
    neighbour = "the neighbour's keys count in every step; pass on what you hold, not your own keys"
    yield own, _softmax(scores, seen & (steps == 0))
    yield from ((means, np.mean(blocks, axis=0)), (means, np.mean(uniform, axis=0)), (sums, np.sum(blocks, axis=0)))
    yield places, _softmax(scores, case.places[:, None] >= case.places[None])
    yield source, _softmax(scores, _seen_as(case, -steps))
    yield "nothing is masked; a query sees the keys up to its own position", _softmax(scores, True)
    yield "a position does not see itself; its own key counts, too", _softmax(scores, np.tri(len(scores), k=-1) > 0)
    yield "scores are not divided by the root of D", _softmax(scores * np.sqrt(case.q.shape[1]), seen)
    yield neighbour, counted / counted.sum(axis=1, keepdims=True)
    yield from ((scale, wrong / wrong.sum(axis=1, keepdims=True)) for wrong in unmatched)
    yield "nothing is divided by the sum of exponentials", _exps(scores, seen)


def _seen_as(case: RingCase, back: Any) -> NDArray[np.bool_]:
    """Return [S, S]: which keys a row sees for who takes a key's place in the cut of rank - back for its position."""
    taken = (case.holder[:, None] - back) % len(case.at)
    places = np.broadcast_to(case.places.astype(int), case.causal.shape)
    return np.arange(len(places))[:, None] >= np.array(case.at)[taken, places]


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


# ---- a cut of the sequence ----

_BUSY = 0.95
"""Least share of the ring's time in which an average rank computes."""
_LENGTHS = ((64, 2), (128, 4), (96, 3), (256, 8))
"""(positions, ranks)."""
Cut = list[list[int]]


def draw_cut(answer: Any) -> Figure | None:
    """Draw the ring of the plain cut, and that of the answer's cut of 64 positions over four ranks."""
    from labkit.viz.attention_ring import ring_timeline  # matplotlib, which a score does without

    found = _parts(answer(64, 4))
    return None if _no_cut(found, 64, 4) else ring_timeline({"plain cut": _plain_cut(64, 4), "your cut": found})


@exercise("07.cut", "Write cut(seq_length, cp) -> for each rank the positions that it holds.", draw=draw_cut)
def cut(answer: Any) -> Iterator[Outcome]:
    """Judge two to eight ranks: is it a cut, and are the ranks busy in every step?"""
    for length, cp in _LENGTHS:
        given = f"{length} positions over cp {cp}"

        def is_cut(length: int = length, cp: int = cp) -> tuple[str, str]:
            said = _no_cut(_parts(answer(length, cp)), length, cp)
            return reason_of(said), said

        def is_busy(length: int = length, cp: int = cp) -> tuple[str, str]:
            found = _parts(answer(length, cp))
            said = _no_cut(found, length, cp) or _waits(found, length, cp)
            return reason_of(said), said

        yield holds(given, f"each position on one rank, {length // cp} on each", is_cut)
        yield holds(f"{given}, the ring", f"ranks busy in {_BUSY:.0%} of the time or more", is_busy)


def _parts(found: Any) -> Cut:
    """Return the answer as lists of whole numbers. Raises TypeError if it is something else."""
    parts = plain([plain(part) for part in found])
    if not all(isinstance(part, list) for part in parts):
        raise TypeError("a cut is a list with a list of positions for each rank")
    if any(not isinstance(each, int) or isinstance(each, bool) for part in parts for each in part):
        raise TypeError("positions are whole numbers")
    return parts


def _no_cut(found: Cut, length: int, cp: int) -> str:
    """Say why this isn't a cut into equal parts; empty if it is one."""
    held = sorted(position for part in found for position in part)
    if len(found) != cp:
        return f"{len(found)} lists: every rank has a list of its own"
    if held != list(range(length)):
        twice = next((p for p, after in pairwise(held) if p == after), None)
        missing = next((p for p in range(length) if p not in held), None)
        if twice is not None:
            return f"position {twice} twice: every position is on one rank only"
        where = f"position {missing} is nowhere" if missing is not None else f"position {held[-1]}"
        return f"{where}: the positions are 0 to S - 1, and each of them is on some rank"
    if len({len(part) for part in found}) > 1:
        return f"{[len(part) for part in found]} positions: norms, MLPs and messages need as many on every rank"
    return ""


def _plain_cut(length: int, cp: int) -> Cut:
    part = length // cp
    return [list(range(rank * part, (rank + 1) * part)) for rank in range(cp)]


def _waits(found: Cut, length: int, cp: int) -> str:
    """Say how busy the ranks are, and why not more; empty if they are busy enough."""
    load = cut_load(found)
    busy = sum(map(sum, load)) / (cp * ring_time(load))
    if busy >= _BUSY:
        return ""
    half, plain_cut = length // (2 * cp), _plain_cut(length, cp)
    chunks = [list(range(i * half, (i + 1) * half)) for i in range(2 * cp)]
    ordered = [sorted(part) for part in found]
    totals = [sum(steps) for steps in load]
    if ordered == plain_cut:
        why = "this is the plain cut; its last rank sees all keys that come by, and all others wait for it"
    elif ordered == plain_cut[::-1]:
        why = "the plain cut backwards; now all wait for rank 0"
    elif ordered == [chunks[rank] + chunks[cp + rank] for rank in range(cp)]:
        why = "the last rank has the later one of every two chunks, so it still sees the most keys"
    elif max(totals) <= 1.02 * min(totals):
        why = "in all the ranks have the same work, but not in each step, and a step lasts as long as its largest block"
    elif totals == sorted(totals):
        why = "a higher rank has later positions, so it computes more; who has an early position needs a late one, too"
    else:
        most, times = totals.index(max(totals)), max(totals) / min(totals)
        why = f"rank {most} computes {times:.1f} times as many pairs as the least busy rank"
    return f"{busy:.0%}: {why}"


# ---- backward ----


@exercise(
    "07.backward",
    "Write ring_backward(q, kv, cut, cp, lse, do, delta) -> dq and dkv of one rank; all ranks run it at once.",
)
def backward(answer: Any) -> Iterator[Outcome]:
    """Judge dq, then dk and dv, on one, two and four ranks, and the messages of a rank."""
    for cp, layout, _ in CASES[:-1]:
        case = ring_case(cp, layout, 1.0, width=3)
        do = np.random.default_rng(10 + cp).normal(size=case.v.shape)
        out, from_ranks = _shares_of_ranks(case, do)
        dq, dkv = from_ranks.sum(axis=0)[0], from_ranks.sum(axis=0)[1:]
        found = run_on_ring(answer, case, [_lse(case), do, (do * out).sum(axis=1)], [case.q, dkv.swapaxes(0, 1)])
        mine = [found.arrays[0], *found.arrays[1].swapaxes(0, 1)] if found.arrays else []
        said = found.error or _wrong_gradient(case, "dq", mine[:1], dq[None], _misread_dq(case, do))
        yield _said(f"{case.name}, dq", "the sum over all keys", said)
        said = found.error or _wrong_gradient(case, "dk, dv", mine[1:], dkv, _misread_dkv(case, from_ranks))
        yield _said(f"{case.name}, dkv", "the sum over the queries of all ranks", said)
        if cp > 1:
            most = 2 * case.at[0].size * case.q.shape[1]
            claim = f"1 to {2 * cp}, each with one rank's kv or dkv, {most} numbers at most"
            said = found.error or _wrong_transport(found, cp, most)
            yield _said(f"{case.name}, the messages of a rank", claim, said)


def _wrong_transport(found: RingRun, cp: int, most: int) -> str:
    if found.largest > most:
        several = "more than one rank's keys or sums travel in it, or queries or dq travel, too"
        return f"one of {found.largest} numbers: {several}"
    if found.messages > 2 * cp:
        home = "the sums are home after cp hops of at most two messages (kv and dkv)"
        return f"{found.messages}: {home}; later messages are for nothing"
    return "" if found.messages else "0: nothing arrives, and no sum leaves"


def _shares_of_ranks(case: RingCase, do: Array, only: Any = True) -> tuple[Array, Array]:
    """Return the output, and each query rank's shares [cp, 3, S, D] of dq, dk and dv.

    `only` is a mask over pairs: the shares are left out where it is false.
    """
    root, p = np.sqrt(case.q.shape[1]), _softmax(case.scores, case.causal)
    out = p @ case.v
    p = p * only
    ds = p * (do @ case.v.T - (do * out).sum(axis=1, keepdims=True)) / root
    shares = []
    for rows in case.at:
        mine = np.isin(np.arange(len(p)), rows)[:, None]
        shares.append([(ds * mine) @ case.k, (ds * mine).T @ case.q, (p * mine).T @ do])
    return out, np.array(shares)


def _wrong_gradient(
    case: RingCase, name: str, found: Sequence[Array], right: Array, misread: Iterator[tuple[str, Array]]
) -> str:
    """Name the first position that differs, and the misunderstanding; empty for right gradients."""
    mine = np.array(found)
    if _alike(mine, right):
        return ""
    place = next(row for row in range(right.shape[1]) if not _alike(mine[:, row], right[:, row]))
    reason = next((words for words, other in misread if _alike(mine, other)), "")
    got, wanted = mine[:, place].ravel().round(3).tolist(), right[:, place].ravel().round(3).tolist()
    seen = f"{name} {got} instead of {wanted} at {case.place_of(place)}"
    return f"{seen}: {reason}" if reason else seen


def _misread_dq(case: RingCase, do: Array) -> Iterator[tuple[str, Array]]:
    for words, pairs in (
        ("only the rank's own keys give a share; add that of every step", case.steps == 0),
        ("the rank's own keys give no share; step 0 counts, too", case.steps > 0),
        ("the last step's keys give no share", case.steps < len(case.at) - 1),
    ):
        yield words, _shares_of_ranks(case, do, pairs)[1].sum(axis=0)[:1]


def _misread_dkv(case: RingCase, from_ranks: Array) -> Iterator[tuple[str, Array]]:
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
