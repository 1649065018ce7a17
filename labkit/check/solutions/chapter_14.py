"""Solutions of chapter 14, The MoE layer."""

import math

import numpy as np

from labkit.check.solution_source import solves


@solves("14.splits")
def splits(counts, rank):
    """Sums of my row, cut into ranks; from every row the sum of my experts."""
    ranks, local = len(counts), len(counts[0]) // len(counts)

    def rows(sender, receiver):
        return sum(counts[sender][receiver * local : (receiver + 1) * local])

    sends = [rows(rank, other) for other in range(ranks)]
    return sends, [rows(other, rank) for other in range(ranks)]


def chunks(rows, lengths):
    """Rows cut into pieces of these lengths."""
    return np.split(rows, np.cumsum(lengths)[:-1])


def at_experts(first, rows, table, expert):
    """Sort chunks [sender][expert] by expert, compute, and sort results by sender again."""
    pieces = [chunks(each, lengths) for each, lengths in zip(rows, table)]
    back = []
    for i, lengths in enumerate(np.array(table).T):
        done = expert(first + i, np.concatenate([piece[i] for piece in pieces]))
        back.append(chunks(done, lengths))
    return [np.concatenate([done[sender] for done in back]) for sender in range(len(rows))]


@solves("14.dispatch")
def moe(x, weights, chosen, rank, ranks, exchange, expert):
    """Send rows and numbers, compute, send results home, and add each to its token."""
    number, token = np.nonzero(chosen.T)  # all rows of expert 0 first
    local = chosen.shape[1] // ranks
    rows = exchange([x[token[number // local == other]] for other in range(ranks)])
    table = exchange(np.split(chosen.sum(axis=0), ranks))
    home = exchange(at_experts(rank * local, rows, table, expert))
    out = np.zeros_like(x)
    np.add.at(out, token, weights[token, number][:, None] * np.concatenate(home))
    return out


@solves("14.places")
def places(weights, chosen, k, factor):
    """The C largest weights of each expert, in the order of tokens, then empty places."""
    tokens, experts = chosen.shape
    capacity = min(math.ceil(factor * k * tokens / experts), tokens)
    table = []
    for weight, wanted in zip(weights.T, chosen.T):
        candidates = np.flatnonzero(wanted)
        best = candidates[np.argsort(-weight[candidates])[:capacity]]
        table.append(sorted(best.tolist()) + [-1] * (capacity - len(best)))
    return table
