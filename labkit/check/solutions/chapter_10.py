"""Solutions of chapter 10, Point to point and 1F1B."""

import math

from labkit import schedules
from labkit.check.solution_source import solves


@solves("10.enough")
def enough(p, share):
    """The bubble is p - 1 of m + p - 1 equal parts of the step, so there must be (p - 1)/share parts."""
    return max(1, math.ceil((p - 1) / share) - (p - 1))


@solves("10.warm_up")
def warm_up(pp, rank, microbatches, latency):
    """For each stage after this one a forward, as in 1F1B, and the pairs that two messages take."""
    stages = pp - 1 - rank
    pairs = math.ceil(2 * latency / 3)  # whole ones
    return min(microbatches, stages + stages * pairs)


def one_by_one(pp, rank, microbatches):
    """The steps of a rank in 1F1B, each receive and each send by itself."""
    steps = []
    for action in schedules.one_f_one_b(pp, microbatches).actions(rank):
        name, to = f"{action.kind}{action.microbatch}", 1 if action.kind == "F" else -1
        steps += [f"recv {name}"] if 0 <= rank - to < pp else []
        steps += [name]
        steps += [f"send {name}"] if 0 <= rank + to < pp else []
    return steps


@solves("10.messages")
def program(pp, rank, microbatches):
    """A receive that follows a send starts together with it."""
    steps = []
    for step in one_by_one(pp, rank, microbatches):
        if step.startswith("recv") and steps and steps[-1].startswith("send"):
            steps[-1] += f" + {step}"
        else:
            steps.append(step)
    return steps
