"""Solutions of chapter 08, Data parallel: buckets and overlap."""

from itertools import product

from labkit.check.solution_source import solves


@solves("08.tokens")
def mean_gradient(gradients, tokens):
    """A mean times its tokens is a sum; sums add up, and all tokens divide them once."""
    sums = [sum(n * g for n, g in zip(tokens, column)) for column in zip(*gradients)]
    return [total / sum(tokens) for total in sums]


def exposed_by(counts, ready, sizes, latency, bandwidth):
    """The seconds from the last gradient to the end of the last message, with buckets of `counts` gradients."""
    leaves = arrives = 0.0
    first = 0
    for count in counts:
        leaves = max(leaves, *ready[first : first + count])
        takes = latency + sum(sizes[first : first + count]) / bandwidth
        arrives = max(leaves, arrives) + takes
        first += count
    return arrives - ready[-1]


@solves("08.cuts")
def cuts(ready, sizes, latency, bandwidth):
    """Try all ways to cut; ten gradients have 512 of them."""
    tries = []
    for marks in product((False, True), repeat=len(sizes) - 1):
        counts = [1]
        for cut_here in marks:
            counts = [*counts, 1] if cut_here else [*counts[:-1], counts[-1] + 1]
        tries.append(counts)
    return min(tries, key=lambda each: exposed_by(each, ready, sizes, latency, bandwidth))


@solves("08.start")
def start(missing, started):
    """Walk up from bucket 0, and stop at the first one that still lacks a gradient."""
    now = []
    for number, lacks in enumerate(missing):
        if lacks:
            break
        if not started[number]:
            now.append(number)
    return now
