"""Wrong answers to the exercises of chapter 07, with what each believes and words of its score."""

from itertools import pairwise

import numpy as np
import pytest

from labkit.check import score

# ---- 07.ring ----


def scores_of(q, k, seen, *, root=True):
    return np.where(seen, q @ k.T / (np.sqrt(q.shape[1]) if root else 1), -np.inf)


def source(cp, step):
    return (cp.rank - step) % cp.size


def ring(
    *, passes=lambda cp: cp.size - 1, send=lambda held, own: held, rescale=True, own=True, divide=True, root=True,
    seen=np.greater_equal, whose=source, last_lse=False,
):  # fmt: skip
    """One rank's ring; an argument that is not its default is a misunderstanding."""

    def answer(q, kv, cut, cp):
        length, mine, at = len(q), kv, cut[cp.rank]
        top, total, out = np.full(length, -np.inf), np.zeros(length), np.zeros_like(kv[1])
        for step in range(passes(cp) + 1):
            kv = cp.pass_on(send(kv, mine)) if step else kv
            if (step == 0 and not own) or step >= cp.size:
                continue
            scores = scores_of(q, kv[0], seen(at[:, None], cut[whose(cp, step)][None]), root=root)
            new = np.maximum(top, scores.max(axis=1))
            weights = np.nan_to_num(np.exp(scores - new[:, None]))
            shrink = np.nan_to_num(np.exp(top - new)) if rescale else 1
            top, total = new, total * shrink + weights.sum(axis=1)
            out = out * (shrink[:, None] if rescale else 1) + weights @ kv[1]
            last = np.logaddexp.reduce(scores, axis=1)
        return out / total[:, None] if divide else out, last if last_lse else top + np.log(total)

    return answer


def averages(combine):
    """Attention to each rank's keys alone, then `combine` of the outputs; a row without keys adds nothing."""

    def answer(q, kv, cut, cp):
        found = []
        for step in range(cp.size):
            kv = cp.pass_on(kv) if step else kv
            scores = scores_of(q, kv[0], cut[cp.rank][:, None] >= cut[source(cp, step)])
            weights = np.nan_to_num(np.exp(scores - scores.max(axis=1, keepdims=True)))
            found.append(weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-300) @ kv[1])
        return combine(found), scores.max(axis=1)

    return answer


def raw(q, kv, cut, cp):
    total = out = 0
    for step in range(cp.size):
        kv = cp.pass_on(kv) if step else kv
        weights = np.exp(scores_of(q, kv[0], cut[cp.rank][:, None] >= cut[source(cp, step)]))
        total, out = total + weights.sum(axis=1), out + weights @ kv[1]
    return out / total[:, None], np.log(total)


def nan_first(q, kv, cut, cp):
    """Joins every block to every row: a row that sees nothing of one is nan."""
    out = lse = None
    for step in range(cp.size):
        kv = cp.pass_on(kv) if step else kv
        scores = scores_of(q, kv[0], cut[cp.rank][:, None] >= cut[source(cp, step)])
        more_lse = np.logaddexp.reduce(scores, axis=1)
        more = np.exp(scores - more_lse[:, None]) @ kv[1]
        total = more_lse if lse is None else np.logaddexp(lse, more_lse)
        old = 0 if lse is None else np.exp(lse - total)[:, None] * out
        out, lse = old + np.exp(more_lse - total)[:, None] * more, total
    return out, lse


def by_place(q, kv, cut, cp):
    return ring()(q, kv, [np.arange(len(q))] * cp.size, cp)


def gathered(q, kv, cut, cp):
    """Passes on all that it has: right, and every message is longer than the one before."""
    held = kv
    for _ in range(cp.size - 1):
        held = np.concatenate([kv, cp.pass_on(held)])
    parts = list(zip(held[::2], held[1::2]))
    keys = np.concatenate([k for k, _ in parts]), np.concatenate([v for _, v in parts])
    at = np.concatenate([cut[source(cp, step)] for step in range(cp.size)])
    scores = scores_of(q, keys[0], cut[cp.rank][:, None] >= at)
    lse = np.logaddexp.reduce(scores, axis=1)
    return np.exp(scores - lse[:, None]) @ keys[1], lse


def stalled(q, kv, cut, cp):
    return ring(passes=lambda cp: cp.size - 1 if cp.rank == 0 else 0)(q, kv, cut, cp)


def beside_the_messages():
    """An answer whose ranks read each other's keys in a common dict, and pass on only a sign that they have written."""
    common = {}

    class Beside:
        def __init__(self, cp, at):
            self.rank, self.size, self.cp, self.at = cp.rank, cp.size, cp, at
            self.step = 0

        def pass_on(self, held):
            self.step += 1
            self.cp.pass_on(np.zeros(1))
            return common[self.size, self.at, (self.rank - self.step) % self.size]

    def answer(q, kv, cut, cp):
        at = str(cut)
        common[cp.size, at, cp.rank] = kv
        return ring()(q, kv, cut, Beside(cp, at))

    return answer


class Apart:
    """Passes k and v on one by one."""

    def __init__(self, cp):
        self.rank, self.size, self.cp = cp.rank, cp.size, cp

    def pass_on(self, held):
        return np.stack([self.cp.pass_on(each) for each in held])


RING = {
    "own": (ring(passes=lambda cp: 0), "only the rank's own keys count"),
    "no messages": (ring(passes=lambda cp: 0), "the keys of some rank never arrive"),
    "beside": (beside_the_messages(), "k and v don't travel"),
    # Believes that the average over all keys is the mean of the averages over each rank's keys.
    "means": (averages(lambda found: np.mean(found, axis=0)), "are averaged; weigh each"),
    "sums": (averages(lambda found: np.sum(found, axis=0)), "are added; weigh each"),
    # Forgets that rows have positions: masks each block by the place of its rows and columns in the block.
    "by place": (by_place, "compares places in a block"),
    # Turns the ring the wrong way round when it looks up whose keys came.
    "other source": (ring(whose=lambda cp, step: (cp.rank + step) % cp.size), "has the positions of rank + step"),
    "no mask": (ring(seen=lambda rows, columns: rows >= 0 * columns), "nothing is masked"),
    "strict": (ring(seen=np.greater), "its own key counts, too"),
    "no root": (ring(root=False), "divided by the root of D"),
    "own again": (ring(send=lambda held, own: own), "pass on what you hold"),
    "no rescaling": (ring(rescale=False), "multiply the older ones"),
    "no division": (ring(divide=False), "nothing is divided"),
    # Adds up exponentials as they are, without taking a maximum off: right until one of them is too large.
    "overflow": (raw, "overflows; subtract the largest score first"),
    "hidden": (nan_first, "and -inf - (-inf) is nan"),
    "apart": (lambda q, kv, cut, cp: ring()(q, kv, cut, Apart(cp)), "k and v travel together"),
    "one too many": (ring(passes=lambda cp: cp.size), "brings a rank's own keys home, for nothing"),
    "gathered": (gathered, "more than one rank's keys travel at once"),
    "stall": (stalled, "they deadlock"),
    "form": (lambda q, kv, cut, cp: (kv[1][:2], q[:, 0]), "returns an array [2, 4], not [4, 4]"),
    "one array": (lambda q, kv, cut, cp: kv[1], "returns ndarray, not 2 arrays"),
    # Returns the lse of the block that came last.
    "last lse": (ring(last_lse=True), "not over those of one block"),
}


def each_less_its_largest(q, kv, cut, cp):
    """Adds sums of exponentials that are taken off different maxima."""
    total = out = 0
    for step in range(cp.size):
        kv = cp.pass_on(kv) if step else kv
        scores = scores_of(q, kv[0], cut[cp.rank][:, None] >= cut[source(cp, step)])
        weights = np.nan_to_num(np.exp(scores - scores.max(axis=1, keepdims=True)))
        total, out = total + weights.sum(axis=1, keepdims=True), out + weights @ kv[1]
    return out / total, total[:, 0]


RING |= {"no common maximum": (each_less_its_largest, "multiply the older ones")}


# ---- 07.cut ----


def chunks(length, count):
    return np.arange(length).reshape(count, -1).tolist()


def zigzag(length, cp):
    parts = chunks(length, 2 * cp)
    return [parts[rank] + parts[2 * cp - 1 - rank] for rank in range(cp)]


def equal_areas(length, cp):
    """As many pairs on each rank, by parts that get shorter."""
    ends = [round(length * (rank / cp) ** 0.5) for rank in range(cp + 1)]
    return [list(range(start, end)) for start, end in pairwise(ends)]


def uneven_steps(length, cp):
    """An early and a late quarter, then the middle, by ranks in pairs: the same work in all, but not in each step."""
    parts = chunks(length, 4 * cp)
    held = [[] for _ in range(cp)]
    for place, part in enumerate(parts):
        turn, rank = divmod(place, cp)
        held[rank if bin(turn).count("1") % 2 == 0 else cp - 1 - rank] += part
    return held


CUT = {
    "plain": (lambda n, cp: chunks(n, cp), "this is the plain cut"),
    "backwards": (lambda n, cp: chunks(n, cp)[::-1], "now all wait for rank 0"),
    "early and late halves": (
        lambda n, cp: [a + b for a, b in zip(chunks(n, 2 * cp)[:cp], chunks(n, 2 * cp)[cp:])],
        "still sees the most keys",
    ),
    # Gives each rank the same work by giving late ranks fewer tokens.
    "equal areas": (equal_areas, "need as many on every rank"),
    "coarse stripes": (
        lambda n, cp: [[p for part in chunks(n, 4 * cp)[rank::cp] for p in part] for rank in range(cp)],
        "who has an early position needs a late one",
    ),
    "twice": (lambda n, cp: [list(range(n // cp))] * cp, "every position is on one rank only"),
    "gap": (lambda n, cp: [[each + 1 for each in part] for part in zigzag(n, cp)], "each of them is on some rank"),
    "one list": (lambda n, cp: list(range(n)), "a list of positions for each rank"),
    "too few": (lambda n, cp: [list(range(n))], "every rank has a list of its own"),
}

# ---- 07.backward ----


def shares(q, kv, seen, lse, do, delta):
    (k, v), root = kv, np.sqrt(q.shape[1])
    p = np.where(seen, np.exp(q @ k.T / root - lse[:, None]), 0)
    ds = p * (do @ v.T - delta[:, None]) / root
    return ds @ k, np.stack([ds.T @ q, p.T @ do])


def backward(*, hops=lambda cp: cp.size, dq_steps=lambda cp: range(cp.size), own=1, extra=0):
    """One rank's backward; an argument that is not its default is a misunderstanding."""

    def answer(q, kv, cut, cp, *saved):
        dq, sums = 0 * q, 0 * kv
        for step in range(cp.size):
            more, share = shares(q, kv, cut[cp.rank][:, None] >= cut[source(cp, step)], *saved)
            dq = dq + more * (step in dq_steps(cp))
            sums = sums + share * (1 if step else own)
            if step < hops(cp):
                kv, sums = cp.pass_on(kv, sums)
        for _ in range(extra * cp.size):
            kv, sums = cp.pass_on(kv, sums)
        return dq, sums

    return answer


def local(kept):
    """dq is right; dkv is `kept` of this rank's shares, by step."""

    def answer(q, kv, cut, cp, *saved):
        found = []
        for step in range(cp.size):
            kv = cp.pass_on(kv) if step else kv
            found.append(shares(q, kv, cut[cp.rank][:, None] >= cut[source(cp, step)], *saved))
        return sum(dq for dq, _ in found), kept([share for _, share in found])

    return answer


def one_hop_short(q, kv, cut, cp, *saved):
    """Keeps its own share, and returns with it the sums of the next rank's keys."""
    dq, own = shares(q, kv, cut[cp.rank][:, None] >= cut[cp.rank], *saved)
    sums = 0 * own
    for step in range(1, cp.size):
        kv, sums = cp.pass_on(kv, sums)
        more, share = shares(q, kv, cut[cp.rank][:, None] >= cut[source(cp, step)], *saved)
        dq, sums = dq + more, sums + share
    return dq, own + sums


def own_only(q, kv, cut, cp, *saved):
    return shares(q, kv, cut[cp.rank][:, None] >= cut[cp.rank], *saved)


BACKWARD = {
    "own": (own_only, "only the rank's own queries give a share"),
    "dq of own keys": (backward(dq_steps=lambda cp: (0,)), "only the rank's own keys give a share"),
    "dq of others": (backward(dq_steps=lambda cp: range(1, cp.size)), "step 0 counts, too"),
    "dq, last step": (
        backward(dq_steps=lambda cp: range(max(1, cp.size - 1))),
        "only the rank's own keys give a share",
    ),
    # Adds up all shares of dk and dv that it computes, although they belong to the keys of different ranks.
    "kept": (local(sum), "the sum of a key travels on with the key"),
    # Believes that dk and dv need the rank's own queries alone, since only dq meets the keys of other ranks.
    "own queries": (local(lambda found: found[0]), "those of other ranks see its keys, too"),
    # Stops after cp - 1 hops, as the forward does: the sums that it returns belong to the keys of the next rank.
    "one hop short": (backward(hops=lambda cp: cp.size - 1), "these are the sums of the next rank's keys"),
    "and own share": (one_hop_short, "the other shares are those of the next rank's keys"),
    "no own share": (backward(own=0), "the share of the rank's own queries is missing"),
    "own share twice": (backward(own=2), "is added twice"),
    "round twice": (backward(extra=2), "later messages are for nothing"),
    "together": (
        lambda q, kv, cut, cp, *saved: backward()(q, kv, cut, Together(cp), *saved),
        "more than one rank's keys or sums travel in it",
    ),
    "no messages": (own_only, "nothing arrives, and no sum leaves"),
    "form": (lambda q, kv, cut, cp, *saved: kv[0], "rank 0 returns ndarray, not 2 arrays"),
}


class Together:
    """Passes kv and the sums on in one message."""

    def __init__(self, cp):
        self.rank, self.size, self.cp = cp.rank, cp.size, cp

    def pass_on(self, *arrays):
        return np.split(self.cp.pass_on(np.concatenate(arrays)), len(arrays))


TABLES = {"07.ring": RING, "07.cut": CUT, "07.backward": BACKWARD}
RIGHT = {"07.ring": ring(), "07.cut": zigzag, "07.backward": backward()}


@pytest.mark.parametrize(("name", "other"), [("hidden", "overflows"), ("no common maximum", "are averaged")])
def test_a_misunderstanding_is_not_taken_for_another_at_large_scores(name, other):
    assert other not in repr(score("07.ring", RING[name][0]))


def test_arrays_that_arrive_are_copies():
    """Who changes what arrives changes no other rank's keys."""

    def careless(q, kv, cut, cp):
        found = ring()(q, kv, cut, cp)
        kv[:] = 0
        return found

    assert score("07.ring", careless).ok


def test_other_good_cuts_are_right():
    """Striped attention's cut (arXiv 2311.09431), and zigzag with its ranks in another order or in finer chunks."""
    for answer in (
        lambda n, cp: [list(range(rank, n, cp)) for rank in range(cp)],
        lambda n, cp: zigzag(n, cp)[::-1],
        uneven_steps,
    ):
        found = score("07.cut", answer)
        assert found.ok, found
