"""Wrong answers to the exercises of chapter 14, with what each believes and words of its score."""

import math

import numpy as np
import torch

from labkit.check import score
from labkit.moe import apply_capacity

# ---- 14.splits ----


def lists(counts, rank, owner=lambda number, local, ranks: number // local):
    ranks, local = len(counts), len(counts[0]) // len(counts)
    table = np.zeros((ranks, ranks), dtype=int)
    for sender, row in enumerate(counts):
        for number, rows in enumerate(row):
            table[sender, owner(number, local, ranks)] += rows
    return table[rank].tolist(), table[:, rank].tolist(), table


def experts_of(counts, rank):
    local = len(counts[0]) // len(counts)
    return np.sum(counts, axis=0)[rank * local : (rank + 1) * local].tolist()


SPLITS = {
    "uncut": (lambda c, r: (list(c[r]), list(c[r])), "these are rows of each expert"),
    # Takes what the others send for what this rank sends: the two lists are exchanged.
    "exchanged": (lambda c, r: lists(c, r)[1::-1], "the two lists are exchanged"),
    "alike": (lambda c, r: (lists(c, r)[0],) * 2, "does not receive what it sends"),
    # Leaves out the rows that stay on their rank, because these need no network.
    "own": (
        lambda c, r: tuple([n * (s != r) for s, n in enumerate(each)] for each in lists(c, r)[:2]),
        "the rank's own rows are missing",
    ),
    # Deals the experts out one by one, so that expert e is on rank e % ranks; neighbours lie on one rank.
    "in turn": (lambda c, r: lists(c, r, lambda e, _, ranks: e % ranks)[:2], "dealt out one by one"),
    "by expert": (lambda c, r: (lists(c, r)[0], experts_of(c, r)), "the second list counts rows by expert"),
    "loads": (lambda c, r: (lists(c, r)[0], lists(c, r)[2].sum(0).tolist()), "is the load of every rank"),
}

# ---- 14.dispatch ----


def program(*, sort=True, restore=True, add=True, weigh="row", near=True, far=True, leave=False, once=True):
    """One rank's program; an argument that is not its default is a misunderstanding."""

    def moe(x, weights, chosen, rank, ranks, exchange, expert):
        number, token = np.nonzero(chosen.T)
        local, out = chosen.shape[1] // ranks, np.zeros_like(x)
        if leave and not len(x):
            return out
        rows = np.concatenate(exchange([x[token[number // local == other]] for other in range(ranks)]))
        table = np.array(exchange(np.split(chosen.sum(axis=0), ranks)))
        kinds = np.repeat(np.tile(np.arange(local), ranks), table.ravel())
        order = np.argsort(kinds, kind="stable") if sort else np.arange(len(kinds))
        cuts = np.cumsum(table.sum(axis=0))[:-1]
        done = [expert(rank * local + i, part) for i, part in enumerate(np.split(rows[order], cuts))]
        if not once:
            done = [expert(rank * local + i, part) for i, part in enumerate(np.split(rows[order], cuts))]
        results = np.concatenate(done)
        results = results[np.argsort(order)] if restore else results
        home = np.concatenate(exchange(np.split(results, np.cumsum(table.sum(axis=1))[:-1])))
        factor = {"row": weights[token, number], "token": weights[chosen], "none": np.ones(len(token))}[weigh]
        stays = number // local == rank
        home = home * (factor * (near * stays + far * ~stays))[:, None]
        if add:
            np.add.at(out, token, home)
        else:
            out[token] = home
        return out

    return moe


def to_all(x, weights, chosen, rank, ranks, exchange, expert):
    """Right, and every token goes to every rank."""
    local = chosen.shape[1] // ranks
    parts = exchange([np.hstack([x, weights * chosen])] * ranks)
    rows, wanted = np.split(np.concatenate(parts), [x.shape[1]], axis=1)
    total = np.zeros_like(rows)
    for e in range(rank * local, (rank + 1) * local):
        token = np.flatnonzero(wanted[:, e])
        total[token] += wanted[token, e][:, None] * expert(e, rows[token])
    return sum(exchange(np.split(total, np.cumsum([len(part) for part in parts])[:-1])))


DISPATCH = {
    "own": (program(far=False), "only experts on the token's own rank are heard"),
    "others": (program(near=False), "rows whose expert is on their own rank are lost"),
    # Believes that arrived rows lie in the order of its experts: they lie in the order of the senders.
    "arrive": (program(sort=False), "they are sorted by sender, so other experts compute"),
    "return": (program(restore=False), "results go home expert by expert"),
    # Writes each result to its token instead of adding it: of a token's experts only the last one is heard.
    "overwritten": (program(add=False), "overwrite each other"),
    "unweighted": (program(weigh="none"), "the weights are left out"),
    "by token": (program(weigh="token"), "the weights are sorted by token"),
    "leaves": (program(leave=True), "rank 0 is in exchange and rank 1 in return: they deadlock"),
    "twice": (program(once=False), "2 calls of expert 0, 2 calls of expert 1"),
    # Sends every token to every rank and picks there: right, and it moves far more than the routing needs.
    "to all": (to_all, "rows go where no expert needs them"),
    "foreign": (lambda *case: case[-1](5, case[0]), "expert 5 lives on rank 2; rank 0 asked for it"),
    "outbox": (lambda *case: case[-2]([case[0]])[0], "a list of 2 arrays, one for each rank; got 1"),
    "form": (lambda x, *case: x[:, :2], "which needs"),
}

# ---- 14.places ----


def table(*, ceil=math.ceil, k_counts=True, factor_counts=True, most=True, key="weight", pad=True, alone=False,
          fill=False):  # fmt: skip
    def places(weights, chosen, k, factor):
        tokens, experts = chosen.shape
        capacity = ceil((k if k_counts else 1) * tokens / experts * (factor if factor_counts else 1.0))
        capacity = min(capacity, tokens) if most else capacity
        kept = []
        for weight, wanted in zip(weights.T, chosen.T):
            wishes = sorted(np.flatnonzero(wanted).tolist(), key=lambda t: KEYS[key](t, weight[t]))[:capacity]
            kept.append(wishes if key == "listed" else sorted(wishes))
        dropped = {t for row, w in zip(kept, chosen.T) for t in np.flatnonzero(w) if t not in row}
        if alone:
            kept = [[t for t in row if t not in dropped] for row in kept]
        if fill:
            free = [[t for t in range(tokens) if not wanted[t]] for wanted in chosen.T]
            return [sorted(row + other[: capacity - len(row)]) for row, other in zip(kept, free)]
        return [row + [-1] * (capacity - len(row)) * pad for row in kept]

    return places


KEYS = {
    "weight": lambda token, weight: -weight,
    "listed": lambda token, weight: -weight,
    "position": lambda token, weight: token,
    "smallest": lambda token, weight: weight,
}
PLACES = {
    # Rounds the capacity down: with fewer places than rows on average, even an even load drops some.
    "down": (table(ceil=int), "C is rounded up, not down"),
    "no k": (table(k_counts=False), "k is missing"),
    "no factor": (table(factor_counts=False), "the factor is missing"),
    "more than T": (table(most=False), "C is at most T"),
    # Gives places to whoever comes first, and asks no weight.
    "position": (table(key="position"), "a full expert keeps the first tokens"),
    "smallest": (table(key="smallest"), "it needs the largest"),
    "other order": (table(key="listed"), "the layer's sums are the same"),
    "no padding": (table(pad=False), "the shape depends on the routing"),
    # Believes that a token which one expert drops loses all its experts; it keeps the others.
    "alone": (table(alone=True), "loses its other experts, too"),
    "filled": (table(fill=True), "Megatron pads so, with weight 0"),
    "both": (table(ceil=int, key="position"), "C is rounded up, not down; a full expert keeps the first tokens"),
    "form": (lambda weights, chosen, k, factor: [0], "one list of tokens for each of the 2 experts"),
}

TABLES = {"14.splits": SPLITS, "14.dispatch": DISPATCH, "14.places": PLACES}
RIGHT = {"14.dispatch": program(), "14.places": table()}


def test_a_rank_that_asks_for_too_much_computes_right_and_is_told_so_alone():
    found = score("14.dispatch", to_all)
    assert found.total - found.passed == 1 and len(repr(found).splitlines()) == 2, repr(found)


def test_the_places_are_those_of_the_library():
    """Tokens that `apply_capacity` keeps, for random weights."""
    probs = torch.rand(12, 4, generator=torch.Generator().manual_seed(1)).softmax(-1)
    chosen = torch.zeros(12, 4).scatter(1, probs.topk(2).indices, 1).bool()
    probs = probs * chosen
    kept = apply_capacity(probs, chosen, top_k=2, capacity_factor=0.75)[1].T
    mine = table()(probs.numpy(), chosen.numpy(), 2, 0.75)
    assert [[t for t in row if t >= 0] for row in mine] == [row.nonzero().flatten().tolist() for row in kept]
