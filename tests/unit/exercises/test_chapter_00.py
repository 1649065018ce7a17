"""Wrong answers to the exercises of chapter 00, with what each believes and words of its score."""

from math import ceil

import numpy as np


def part(width, rank):
    return slice(rank * width // 2, (rank + 1) * width // 2)


def columns(x, A, B, rank):
    mine = part(A.shape[1], rank)
    return np.maximum(x @ A[:, mine], 0) @ B[mine]


def rows_of_a(x, A, B, rank):
    mine = part(A.shape[0], rank)
    return np.maximum(x[:, mine] @ A[mine], 0) @ B


def swapped(x, A, B, rank):
    return np.maximum(x @ A[:, part(A.shape[1], rank)], 0) @ B[part(A.shape[1], 1 - rank)]


def relu_last(x, A, B, rank):
    mine = part(A.shape[1], rank)
    return np.maximum(x @ A[:, mine] @ B[mine], 0)


def no_relu(x, A, B, rank):
    mine = part(A.shape[1], rank)
    return x @ A[:, mine] @ B[mine]


def columns_of_b(x, A, B, rank):
    return np.maximum(x @ A, 0) @ B[:, : B.shape[1] // 2]


HALF = {
    # Leaves everything as it was on one process.
    "whole": (lambda x, A, B, rank: np.maximum(x @ A, 0) @ B, "both ranks did all of the work"),
    "same half": (lambda x, A, B, rank: columns(x, A, B, 0), "both ranks took the same half"),
    # Cuts the sum over x's features, as if relu of a sum were the sum of relus.
    "rows of A": (rows_of_a, "A can't be cut by its rows"),
    "swapped": (swapped, "these don't match"),
    "relu last": (relu_last, "it belongs between A and B"),
    "no relu": (no_relu, "the relu is missing"),
    # Wants to join the ranks' results side by side, not to add them up.
    "columns of B": (columns_of_b, "each term is as large as the sum"),
    # One rank does everything and the other one sends zeros.
    "lazy": (lambda x, A, B, rank: (1 - rank) * (np.maximum(x @ A, 0) @ B), "the work is not shared"),
}


def turns(ahead):
    """Rows with `ahead(stage, stages)` forwards first, then forward and backward in turn."""

    def order(stages, microbatches):
        rows = []
        for stage in range(stages):
            first = min(ahead(stage, stages), microbatches)
            row = [f"F{i}" for i in range(first)]
            for i in range(microbatches):
                row += [f"F{i + first}"] * (i + first < microbatches) + [f"B{i}"]
            rows.append(row)
        return rows

    return order


def all_forwards_first(stages, microbatches):
    return [[f"{kind}{i}" for kind in "FB" for i in range(microbatches)] for _ in range(stages)]


ORDER = {
    # Believes that a step has a forward half and a backward half: as short, but everything is kept.
    "all forwards first": (all_forwards_first, "run a backward as soon as it can"),
    # Believes that the last stage, which waits longest for its first microbatch, has to catch up.
    "last stage ahead": (turns(lambda stage, stages: stage), "two stages wait for each other"),
    "forward only": (lambda p, m: [[f"F{i}" for i in range(m)] for _ in range(p)], "each forward needs one"),
    "twice": (lambda p, m: [["F0", *row] for row in all_forwards_first(p, m)], "every F and every B exactly once"),
    "one row": (lambda p, m: [f"F{i}" for i in range(m)], "not one list of actions for each stage"),
    "no letters": (lambda p, m: [list(range(m)) for _ in range(p)], "an action is an F or a B"),
}

FIT = {
    # Knows pipelines only, so a large model gets dozens of stages.
    "stages alone": (lambda gb, room: (1, ceil(gb / room)), "every stage more makes all of them wait"),
    # Cuts layers only, over as many GPUs as it takes, whatever lies between them.
    "tp alone": (lambda gb, room: (2 ** max(0, ceil(np.log2(gb / room))), 1), "a machine has eight GPUs"),
    "always 8": (lambda gb, room: (8, ceil(gb / room / 8)), "a smaller tp fits"),
    "rounded down": (lambda gb, room: (8, max(1, int(gb / room / 8))), "round the number of stages up"),
    "one number": (lambda gb, room: ceil(gb / room), "not a pair"),
}

TABLES = {"00.fit": FIT, "00.half": HALF, "00.order": ORDER}
