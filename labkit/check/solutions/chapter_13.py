"""Solutions of chapter 13, Training a GPT end to end."""

import math

import torch

from labkit.check.solution_source import solves


def _rounded(gradient):
    return torch.tensor(gradient, dtype=torch.float64).half().item()


@solves("13.lost")
def lost(gradients, scale):
    """Scale as the backward does, round to fp16, and look at what is left."""
    left = [_rounded(gradient * scale) for gradient in gradients]
    return [i for i, (g, h) in enumerate(zip(gradients, left)) if g != 0 and (h == 0 or abs(h) == float("inf"))]


def _overlaps(stored, offset, shape):
    """(key, stored offset, first element of the overlap, its shape) of each stored box
    that has such an element."""
    found = []
    for key, at, size in stored:
        first = tuple(map(max, at, offset))
        ends = tuple(min(a + n, b + m) for a, n, b, m in zip(at, size, offset, shape))
        common = tuple(end - start for end, start in zip(ends, first))
        if all(length > 0 for length in common):
            found.append((key, at, first, common))
    return found


def _minus(a, b):
    return tuple(x - y for x, y in zip(a, b))


@solves("13.reads")
def reads(stored, offset, shape):
    """Overlap of each pair of boxes, counted inside both of them."""
    overlaps = _overlaps(stored, offset, shape)
    return [(key, _minus(first, at), _minus(first, offset), size) for key, at, first, size in overlaps]


def _squares(grad):
    return sum(value * value for value in grad)


@solves("13.norm")
def global_norm(ranks):
    """Count a cut part where it is, a whole parameter on tp rank 0, one replica, and
    the tied weight once."""
    total = 0.0
    for rank in ranks:
        for parameter in rank["parameters"]:
            first_copy = parameter["cut"] or rank["tp"] == 0
            if rank["dp"] == 0 and first_copy and not parameter["shared"]:
                total += _squares(parameter["grad"])
    return math.sqrt(total)
