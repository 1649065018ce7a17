"""Solutions of chapter 17, Graphs in a pipeline: order, buffers, pool."""

from collections import deque

from labkit.check.solution_source import solves


@solves("17.held")
def most_held(order):
    """Forwards add one, backwards take one away, whatever the chunk."""
    most = now = 0
    for step in order:
        now += 1 if step > 0 else -1
        most = max(most, now)
    return most


def _walk(order, queue_of):
    """Forwards take, backwards give back. queue_of(chunk) says whose oldest microbatch
    a backward ends."""
    free = deque()
    held = {}
    taken = []
    count = 0
    for step in order:
        queue = held.setdefault(queue_of(abs(step)), deque())
        if step < 0:
            free.append(queue.popleft())
            continue
        if free:
            buffer = free.popleft()
        else:
            buffer, count = count, count + 1
        queue.append(buffer)
        taken.append(buffer)
    return taken


@solves("17.buffers")
def buffers(order):
    """A backward ends the oldest microbatch of its own chunk; its buffer joins the end
    of one queue for all chunks."""
    return _walk(order, lambda chunk: chunk)


def spans_of(order):
    """(position of its forward, position of its backward) for each forward."""
    spans, held = [], {}
    for position, step in enumerate(order):
        queue = held.setdefault(abs(step), deque())
        if step > 0:
            queue.append(len(spans))
            spans.append([position, len(order)])
        else:
            spans[queue.popleft()][1] = position
    return spans


@solves("17.unsafe")
def unsafe(order, buffers):
    """A forward must come after the backwards of all earlier users of its buffer."""
    spans = spans_of(order)
    for later, (forward, _) in enumerate(spans):
        for earlier, (_, backward) in enumerate(spans[:later]):
            if buffers[earlier] == buffers[later] and backward > forward:
                return forward, backward
    return None
