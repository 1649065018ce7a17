"""Solutions of chapter 09, The distributed optimizer (ZeRO)."""

from labkit.check.solution_source import solves


@solves("09.shards")
def shards(buckets, dp):
    """The r-th part of every bucket, as pieces of its parameters."""
    owned = [[] for _ in range(dp)]
    for start, end, placed in buckets:
        share = (end - start) // dp
        for rank in range(dp):
            low = start + rank * share
            for parameter, first, last in placed:
                a, b = max(first, low), min(last, low + share)  # where the two overlap
                if a < b:
                    owned[rank].append((parameter, a - first, b - first))
    return owned


@solves("09.order")
def order(layers, room):
    """One gather ahead in forward. The last `room` layers stay whole for the backward, and
    as each of them is freed, the layer that is `room` below it is gathered."""
    steps = [("gather", 0)]
    for i in range(layers):
        if i + 1 < layers:
            steps.append(("gather", i + 1))  # travels while layer i computes
        steps.append(("forward", i))
        if i < layers - room:
            steps.append(("free", i))
    for i in reversed(range(layers)):
        steps += [("backward", i), ("free", i)]
        if i >= room:
            steps.append(("gather", i - room))  # due sooner than the gradient's sum
        steps.append(("scatter", i))
    return steps


@solves("09.stage")
def stage_for(parameters, d, room, microbatches):
    """Keep 18, 6 + 12/d, 2 + 16/d or 18/d; send gradients in 4 bytes and weights in 2."""
    m = microbatches
    kept = [18, 6 + 12 / d, 2 + 16 / d, 18 / d]
    sent = [4 + 4, 4 + 2, 4 * m + 2, (2 + 2 + 4) * m]
    fitting = [stage for stage in range(4) if kept[stage] * parameters <= room]
    options = [(sent[stage] * (d - 1) / d * parameters, stage) for stage in fitting]
    return min(options)[::-1]
