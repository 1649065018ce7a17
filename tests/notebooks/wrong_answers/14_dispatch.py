"""Chapter 14, exercise `14.dispatch`: one rank's program of an MoE layer; rows travel to their experts and back."""

import numpy as np


def wrong_1(x, weights, chosen, rank, ranks, exchange, expert):
    """Believes that arrived rows lie in the order of its experts: they lie in the order of the senders."""

    def at_own_experts(rows, table):
        lengths = np.array(table)
        parts = chunks(np.concatenate(rows), lengths.sum(axis=0))
        first = rank * len(parts)
        done = [expert(first + i, part) for i, part in enumerate(parts)]
        return chunks(np.concatenate(done), lengths.sum(axis=1))

    number, token = np.nonzero(chosen.T)
    home = number // (chosen.shape[1] // ranks)
    rows = exchange([x[token[home == other]] for other in range(ranks)])
    results = exchange(at_own_experts(rows, exchange(np.split(chosen.sum(axis=0), ranks))))
    out = np.zeros_like(x)
    np.add.at(out, token, weights[token, number][:, None] * np.concatenate(results))
    return out


def wrong_2(x, weights, chosen, rank, ranks, exchange, expert):
    """Writes each result to its token instead of adding it: of a token's experts only the last one is heard."""
    number, token = np.nonzero(chosen.T)
    local = chosen.shape[1] // ranks
    rows = exchange([x[token[number // local == other]] for other in range(ranks)])
    table = exchange(np.split(chosen.sum(axis=0), ranks))
    home = exchange(at_experts(rank * local, rows, table, expert))
    out = np.zeros_like(x)
    out[token] = weights[token, number][:, None] * np.concatenate(home)
    return out


def wrong_3(x, weights, chosen, rank, ranks, exchange, expert):
    """Sends every token to every rank and picks there: right, and it moves far more than the routing needs."""
    local = chosen.shape[1] // ranks
    everything = exchange([np.hstack([x, weights * chosen])] * ranks)
    rows, wanted = np.split(np.concatenate(everything), [x.shape[1]], axis=1)
    total = np.zeros_like(rows)
    for number in range(rank * local, (rank + 1) * local):
        token = np.flatnonzero(wanted[:, number])
        total[token] += wanted[token, number][:, None] * expert(number, rows[token])
    return sum(exchange(chunks(total, [len(each) for each in everything])))
