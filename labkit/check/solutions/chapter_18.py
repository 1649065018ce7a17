"""Solutions of chapter 18, Partial graphs for MoE."""

from labkit.check.solution_source import solves


@solves("18.step")
def decorated(step, last, graph):
    """A stored result is returned; otherwise the step computes, and may end the forward."""

    def wrapped(*args):
        if step.__name__ in graph.store:  # replay: the graph has computed this
            return graph.store[step.__name__]
        result = step(*args)
        if last and graph.capturing:  # capture: the graph ends here
            graph.stop(result)
        return result

    return wrapped


def _inside(steps):
    """What captured steps read and have not written, and what they write, in the order
    of the last time."""
    inputs = []
    written = []
    for _, reads, writes in steps:
        inputs += [name for name in reads if name not in written and name not in inputs]
        written = [name for name in written if name not in writes] + list(writes)
    return inputs, written


@solves("18.boundary")
def boundary(steps, captured):
    """A value comes out if somebody after the graph reads it before it is written
    again, or if it is the result."""
    inputs, written = _inside(steps[:captured])
    wanted = set(steps[-1][2])
    for _, reads, writes in reversed(steps[captured:]):
        wanted = wanted - set(writes) | set(reads)
    return inputs, [name for name in written if name in wanted]


@solves("18.clock")
def finish(program, launch):
    """The host launches and waits, the device runs one operation after the other."""
    host = device = 0
    for entry in program:
        if entry == "wait":
            host = max(host, device)
            continue
        host += launch
        work = sum(entry) if isinstance(entry, list) else entry
        device = max(device, host) + work
    return device
