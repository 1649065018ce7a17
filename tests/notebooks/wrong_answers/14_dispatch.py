"""Chapter 14: an MoE layer over ranks that are entries of a list, rows sent to their experts and back."""

import numpy as np


def wrong_1(parts, exchange, expert):
    """Believes that what a rank receives lies in the order of its experts: it lies in the order of the senders."""
    rows, counts = sent(parts, exchange)
    done = []
    for rank, (own, by_sender) in enumerate(zip(rows, counts)):
        table = np.array(by_sender)
        by_expert = chunks(np.concatenate(own), table.sum(axis=0))
        results = [expert(rank, rank * len(by_expert) + i, each) for i, each in enumerate(by_expert)]
        done.append(chunks(np.concatenate(results), table.sum(axis=1)))
    outputs = [np.zeros_like(x) for x, _, _ in parts]
    for output, part, home in zip(outputs, parts, exchange(done)):
        np.add.at(output, *weighted(part, home))
    return outputs


def wrong_2(parts, exchange, expert):
    """Writes each result to its token instead of adding it: of a token's experts only the last one is heard."""
    rows, counts = sent(parts, exchange)
    done = [at_experts(r, rows[r], counts[r], expert) for r in range(len(parts))]
    outputs = [np.zeros_like(x) for x, _, _ in parts]
    for output, part, home in zip(outputs, parts, exchange(done)):
        token, rows_home = weighted(part, home)
        output[token] = rows_home
    return outputs


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
