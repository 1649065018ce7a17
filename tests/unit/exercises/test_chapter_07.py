"""Wrong answers to the exercises of chapter 07, with what each believes and words of its score."""

import numpy as np
import pytest

from labkit.check import score


def triangle(part):
    return part * (part + 1) // 2


def per_rank(pairs):
    """An answer to 07.work: pairs(part, rank) of each rank."""
    return lambda length, cp: [pairs(length // cp, rank) for rank in range(cp)]


WORK = {
    # Shares the pairs out evenly, as if every position saw the same number of keys.
    "even": (lambda length, cp: [triangle(length) // cp] * cp, "shared out evenly"),
    "no mask": (lambda length, cp: [length * (length // cp)] * cp, "there is no mask"),
    # Counts the rank's own keys alone, and forgets that late ranks see the keys of all earlier ones.
    "own": (per_rank(lambda part, rank: triangle(part)), "own keys alone count"),
    "strict": (per_rank(lambda part, rank: triangle(part) - part + rank * part**2), "sees itself, too"),
    # Takes the own block for a square, although a query sees no later key of its own rank.
    "square": (per_rank(lambda part, rank: (rank + 1) * part**2), "a triangle, not a square"),
    "half a square": (per_rank(lambda part, rank: part**2 // 2 + rank * part**2), "has its diagonal"),
    "no own": (per_rank(lambda part, rank: rank * part**2), "the rank's own block is left out"),
    "later": (
        lambda n, cp: [triangle(n // cp) + r * (n // cp) ** 2 for r in range(cp)][::-1],
        "later keys in place of",
    ),
    "up to": (lambda n, cp: [triangle((rank + 1) * n // cp) for rank in range(cp)], "all ranks up to this one"),
}

# ---- 07.ring ----


def scores_of(rows, kv, *, seen=np.greater_equal, root=True):
    (q, at), (k, _, columns) = rows, kv
    scores = q @ k.T / (np.sqrt(q.shape[1]) if root else 1)
    return np.where(seen(at[:, None], columns[None]), scores, -np.inf)


def ring(*, passes=lambda cp: cp - 1, send=lambda held, own: held, rescale=True, own=True, divide=True, **how):
    """One rank's ring; an argument that is not its default is a misunderstanding."""

    def answer(rows, kv, cp, pass_on):
        length, mine = len(rows[0]), kv
        top, total, out = np.full(length, -np.inf), np.zeros(length), np.zeros((length, kv[1].shape[1]))
        for step in range(passes(cp) + 1):
            kv = pass_on(send(kv, mine)) if step else kv
            if (step == 0 and not own) or step >= cp:
                continue
            scores = scores_of(rows, kv, **how)
            new = np.maximum(top, scores.max(axis=1))
            weights = np.nan_to_num(np.exp(scores - new[:, None])) if own else np.exp(scores - new[:, None])
            shrink = np.nan_to_num(np.exp(top - new)) if rescale and own else np.exp(top - new) if rescale else 1
            top, total = new, total * shrink + weights.sum(axis=1)
            out = out * (shrink[:, None] if rescale else 1) + weights @ kv[1]
        return out / total[:, None] if divide else out

    return answer


def averages(combine):
    """Attention to each rank's keys alone, then `combine` of the outputs; a row without keys adds nothing."""

    def answer(rows, kv, cp, pass_on):
        found = []
        for step in range(cp):
            kv = pass_on(kv) if step else kv
            scores = scores_of(rows, kv)
            weights = np.nan_to_num(np.exp(scores - scores.max(axis=1, keepdims=True)))
            found.append(weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-300) @ kv[1])
        return combine(found)

    return answer


def raw(rows, kv, cp, pass_on):
    total = out = 0
    for step in range(cp):
        kv = pass_on(kv) if step else kv
        weights = np.exp(scores_of(rows, kv))
        total, out = total + weights.sum(axis=1), out + weights @ kv[1]
    return out / total[:, None]


def nan_first(rows, kv, cp, pass_on):
    """Joins finished pieces as they come: a row that sees nothing of one is nan."""
    pieces = []
    for step in range(cp):
        kv = pass_on(kv) if step else kv
        scores = scores_of(rows, kv)
        top = scores.max(axis=1, keepdims=True)
        weights = np.exp(scores - top)
        pieces.append((top, weights.sum(axis=1, keepdims=True), weights @ kv[1]))
    top = np.max([piece[0] for piece in pieces], axis=0)
    total, out = (sum(np.exp(p[0] - top) * p[place] for p in pieces) for place in (1, 2))
    return out / total


def by_place(rows, kv, cp, pass_on):
    places = np.arange(len(rows[0]))
    return ring()((rows[0], places), (*kv[:2], places), cp, pass_on)


def gathered(rows, kv, cp, pass_on):
    """Passes on all that it has: right, and every message is longer than the one before."""
    held = kv
    for _ in range(cp - 1):
        arrived = pass_on(held)
        held = tuple(np.concatenate([mine, theirs]) for mine, theirs in zip(kv, arrived))
    return ring()(rows, held, 1, None)


def stalled(rows, kv, cp, pass_on):
    return ring()(rows, kv, cp if rows[1][0] == 0 else 1, pass_on)


def beside_the_messages():
    """An answer whose ranks read each other's keys in a common dict, and pass on only a sign that they have written."""
    common = {}

    def answer(rows, kv, cp, pass_on):
        common[tuple(kv[2])] = kv
        for _ in range(cp - 1):
            pass_on(0)
        every = [np.concatenate(parts) for parts in zip(*(v for k, v in common.items() if k[-1] < 4 * cp))]
        return ring()(rows, every, 1, None)

    return answer


RING = {
    "own": (ring(passes=lambda cp: 0), "only the rank's own keys count"),
    "no messages": (ring(passes=lambda cp: 0), "the keys of some rank never arrive"),
    "beside": (beside_the_messages(), "k and v do not travel"),
    # Believes that the average over all keys is the mean of the averages over each rank's keys.
    "means": (averages(lambda found: np.mean(found, axis=0)), "are averaged; weigh each"),
    "sums": (averages(lambda found: np.sum(found, axis=0)), "are added; weigh each"),
    # Forgets that rows have positions: masks each block by the place of its rows and columns in the block.
    "by place": (by_place, "compares places in a block"),
    "no mask": (ring(seen=lambda rows, columns: rows >= 0 * columns), "nothing is masked"),
    "strict": (ring(seen=np.greater), "its own key counts, too"),
    "no root": (ring(root=False), "divided by the root of D"),
    "own again": (ring(send=lambda held, own: own), "pass on what you hold"),
    "no rescaling": (ring(rescale=False), "multiply the older ones"),
    "no division": (ring(divide=False), "nothing is divided"),
    # Adds up exponentials as they are, without taking a maximum off: right until one of them is too large.
    "overflow": (raw, "overflows; subtract the largest score first"),
    "hidden": (nan_first, "and -inf - (-inf) is nan"),
    "apart": (
        lambda rows, kv, cp, pass_on: ring()(rows, kv, cp, lambda held: tuple(map(pass_on, held))),
        "k, v and positions travel together",
    ),
    "one too many": (ring(passes=lambda cp: cp), "brings a rank's own keys home, for nothing"),
    "gathered": (gathered, "more than one rank's keys travel at once"),
    "stall": (stalled, "they deadlock"),
    "form": (lambda rows, kv, cp, pass_on: kv[1][:2], "returns an array [2, 4], not [4, 4]"),
}


def each_less_its_largest(rows, kv, cp, pass_on):
    """Adds sums of exponentials that are taken off different maxima."""
    total = out = 0
    for step in range(cp):
        kv = pass_on(kv) if step else kv
        scores = scores_of(rows, kv)
        weights = np.nan_to_num(np.exp(scores - scores.max(axis=1, keepdims=True)))
        total, out = total + weights.sum(axis=1, keepdims=True), out + weights @ kv[1]
    return out / total


RING |= {"no common maximum": (each_less_its_largest, "multiply the older ones")}


# ---- 07.backward ----


def shares(rows, kv):
    (q, at, out, lse, grad), (k, v, columns) = rows, kv
    root = np.sqrt(q.shape[1])
    p = np.where(at[:, None] >= columns, np.exp(q @ k.T / root - lse[:, None]), 0)
    ds = p * (grad @ v.T - (grad * out).sum(axis=1, keepdims=True))
    return np.array([ds @ k / root, ds.T @ q / root, p.T @ grad])


def backward(*, hops=lambda cp: cp, dq_steps=lambda cp: range(cp), own=1, extra=0):
    """One rank's backward; an argument that is not its default is a misunderstanding."""

    def answer(rows, kv, cp, pass_on):
        dq, sums = 0 * rows[0], 0 * shares(rows, kv)[1:]
        for step in range(cp):
            share = shares(rows, kv)
            dq = dq + share[0] * (step in dq_steps(cp))
            sums = sums + share[1:] * (1 if step else own)
            if step < hops(cp):
                kv, sums = pass_on((kv, sums))
        for _ in range(extra):
            kv, sums = pass_on((kv, sums))
        return dq, *sums

    return answer


def local(kept):
    """dq is right; dk and dv are `kept` of this rank's shares, by step."""

    def answer(rows, kv, cp, pass_on):
        found = []
        for step in range(cp):
            kv = pass_on(kv) if step else kv
            found.append(shares(rows, kv))
        return sum(found)[0], *kept(found)[1:]

    return answer


def one_hop_short(rows, kv, cp, pass_on):
    """Keeps its own share, and returns with it the sums of the next rank's keys."""
    own = shares(rows, kv)
    dq, sums = own[0], 0 * own[1:]
    for _ in range(1, cp):
        kv, sums = pass_on((kv, sums))
        share = shares(rows, kv)
        dq, sums = dq + share[0], sums + share[1:]
    return dq, *(own[1:] + sums)


BACKWARD = {
    "own": (lambda rows, kv, cp, pass_on: tuple(shares(rows, kv)), "only the rank's own queries give a share"),
    "dq of own keys": (backward(dq_steps=lambda cp: (0,)), "only the rank's own keys give a share"),
    "dq of others": (backward(dq_steps=lambda cp: range(1, cp)), "step 0 counts, too"),
    "dq, last step": (backward(dq_steps=lambda cp: range(max(1, cp - 1))), "only the rank's own keys give a share"),
    # Adds up all shares of dk and dv that it computes, although they belong to the keys of different ranks.
    "kept": (local(sum), "the sum of a key travels on with the key"),
    # Believes that dk and dv need the rank's own queries alone, since only dq meets the keys of other ranks.
    "own queries": (local(lambda found: found[0]), "those of other ranks see its keys, too"),
    # Stops after cp - 1 hops, as the forward does: the sums that it returns belong to the keys of the next rank.
    "one hop short": (backward(hops=lambda cp: cp - 1), "these are the sums of the next rank's keys"),
    "and own share": (one_hop_short, "the other shares are those of the next rank's keys"),
    "no own share": (backward(own=0), "the share of the rank's own queries is missing"),
    "own share twice": (backward(own=2), "is added twice"),
    "round twice": (lambda *case: backward(extra=2 * case[2])(*case), "later messages are for nothing"),
    "apart": (
        lambda rows, kv, cp, pass_on: backward()(
            rows, kv, cp, lambda held: (tuple(map(pass_on, held[0])), pass_on(held[1]))
        ),
        "after cp hops of at most two messages",
    ),
    "no messages": (lambda rows, kv, cp, pass_on: tuple(shares(rows, kv)), "nothing arrives, and no sum leaves"),
    "form": (lambda rows, kv, cp, pass_on: kv[0], "rank 0 returns ndarray, not 3 arrays"),
}

TABLES = {"07.work": WORK, "07.ring": RING, "07.backward": BACKWARD}
RIGHT = {"07.ring": ring(), "07.backward": backward()}


@pytest.mark.parametrize(("name", "other"), [("hidden", "overflows"), ("no common maximum", "are averaged")])
def test_a_misunderstanding_is_not_taken_for_another_at_large_scores(name, other):
    assert other not in repr(score("07.ring", RING[name][0]))


def test_arrays_that_arrive_are_copies():
    """Who changes what arrives changes no other rank's keys."""

    def careless(rows, kv, cp, pass_on):
        found = ring()(rows, kv, cp, pass_on)
        kv[0][:] = kv[1][:] = 0
        return found

    assert score("07.ring", careless).ok
