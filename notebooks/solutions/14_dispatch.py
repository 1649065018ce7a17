"""Chapter 14: an MoE layer over ranks that are entries of a list, rows sent to their experts and back."""

import numpy as np


def sorted_by_expert(chosen):
    """Expert and token of every row, all rows of expert 0 first."""
    return np.nonzero(chosen.T)


def chunks(rows, counts):
    """Rows cut into pieces of these lengths."""
    return np.split(rows, np.cumsum(counts)[:-1])


def solution(parts, exchange, expert, *, in_chunks=True, overwrite=False):
    """Sort, exchange numbers and rows, sort chunks by expert, compute, and everything back in reverse."""
    ep, experts = len(parts), parts[0][1].shape[1]
    local = experts // ep
    rows_to, counts_to = [], []
    for x, _, chosen in parts:
        number, token = sorted_by_expert(chosen)
        rows_to.append([x[token[number // local == rank]] for rank in range(ep)])
        counts_to.append(np.split(chosen.sum(axis=0), ep))
    rows, counts = exchange(rows_to), exchange(counts_to)

    results_to = []
    for rank in range(ep):
        table = np.array(counts[rank]).reshape(ep, local)  # rows from each rank for each local expert
        pieces = [chunks(rows[rank][sender], table[sender]) for sender in range(ep)]
        if not in_chunks:  # as if all rows of the first expert came first, whoever sent them
            by_expert = chunks(np.concatenate(rows[rank]), table.sum(axis=0))
        else:
            by_expert = [np.concatenate([pieces[sender][i] for sender in range(ep)]) for i in range(local)]
        done = [expert(rank, rank * local + i, by_expert[i]) for i in range(local)]
        if not in_chunks:
            results_to.append(chunks(np.concatenate(done), table.sum(axis=1)))
        else:
            back = [chunks(done[i], table[:, i]) for i in range(local)]
            results_to.append([np.concatenate([back[i][sender] for i in range(local)]) for sender in range(ep)])
    results = exchange(results_to)

    outputs = []
    for (x, weights, chosen), home in zip(parts, results):
        number, token = sorted_by_expert(chosen)
        weighted = weights[token, number][:, None] * np.concatenate(home)
        output = np.zeros_like(x)
        if overwrite:
            output[token] = weighted
        else:
            np.add.at(output, token, weighted)
        outputs.append(output)
    return outputs


def wrong_1(parts, exchange, expert):
    """Believes that what a rank receives lies in the order of its experts: it lies in the order of the senders."""
    return solution(parts, exchange, expert, in_chunks=False)


def wrong_2(parts, exchange, expert):
    """Writes each result to its token instead of adding it: of a token's experts only the last one is heard."""
    return solution(parts, exchange, expert, overwrite=True)


def wrong_3(parts, exchange, expert):
    """Sends every token to every rank and picks there: right, and it moves far more than the routing needs."""
    ep, experts = len(parts), parts[0][1].shape[1]
    local = experts // ep
    everything = exchange([[np.hstack([x, weights * chosen])] * ep for x, weights, chosen in parts])
    sums_to = []
    for rank in range(ep):
        x, weights = np.split(np.concatenate(everything[rank]), [parts[0][0].shape[1]], axis=1)
        total = np.zeros_like(x)
        for number in range(rank * local, (rank + 1) * local):
            token = np.flatnonzero(weights[:, number])
            total[token] += weights[token, number][:, None] * expert(rank, number, x[token])
        sums_to.append(chunks(total, [len(part[0]) for part in parts]))
    return [sum(each) for each in exchange(sums_to)]
