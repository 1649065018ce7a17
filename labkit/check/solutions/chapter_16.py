"""Solutions of chapter 16, CUDA graphs: capture and replay."""

import torch

from labkit.check.solution_source import solves


@solves("16.launches")
def end(durations, launch, graph):
    """An operation starts when it has been launched and the one before has ended."""
    time = 0
    for number, duration in enumerate(durations, start=1):
        ready = launch if graph else number * launch
        time = max(time, ready) + duration
    return time


@solves("16.clipped")
def clipped(x, limit, count):
    """Everything is computed, `where` chooses, and the counter is changed in place."""
    finite = x.isfinite().all()
    kept = torch.where(finite, x, 0.0)
    norm = kept.norm()
    too_large = norm > limit
    count.add_((~finite | too_large).to(count.dtype))
    return torch.where(too_large, kept * (limit / norm), kept)


def seen_by(captures, names):
    """For each graph in turn: address that it reads -> the graph that wrote there last."""
    last, found = {}, []
    for name in names:
        reads, writes = captures[name]
        found.append({place: last.get(place) for place in reads})
        last |= dict.fromkeys(writes, name)
    return found


@solves("16.stale")
def stale(captures, replays):
    """A replay is right if the same graph as at capture wrote last at each address."""
    right = dict(zip(captures, seen_by(captures, captures)))
    found = seen_by(captures, replays)
    return [i for i, (name, seen) in enumerate(zip(replays, found)) if seen != right[name]]
