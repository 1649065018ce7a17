"""Solutions of chapter 10, Point to point and 1F1B."""

import math

from labkit import schedules
from labkit.check.solution_source import solves


@solves("10.enough")
def enough(p, share):
    """The bubble is p - 1 of m + p - 1 equal parts of the step, so there must be (p - 1)/share parts."""
    return max(1, math.ceil((p - 1) / share) - (p - 1))


def _row(rank, warmup, microbatches):
    pairs = [f"{rank}{kind}{m}" for i in range(microbatches - warmup) for kind, m in (("F", warmup + i), ("B", i))]
    first = [f"{rank}F{m}" for m in range(warmup)]
    return first + pairs + [f"{rank}B{m}" for m in range(microbatches - warmup, microbatches)]


@solves("10.one_f_one_b")
def row(pp, rank, microbatches):
    """Warm up with as many forwards as there are stages after this one, or all there are;
    then pairs; then what is left."""
    return _row(rank, min(pp - rank - 1, microbatches), microbatches)


def one_by_one(pp, rank, microbatches):
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
