"""Chapter 17, exercise `17.buffers`: buffers(order) -> the buffer of each forward, first in first out."""

from collections import deque
from collections.abc import Callable


def _walk(order: list[int], queue_of: Callable[[int], int]) -> list[int]:
    """Forwards take, backwards give back. queue_of(chunk) says whose oldest microbatch a backward ends."""
    free: deque[int] = deque()
    held: dict[int, deque[int]] = {}
    taken: list[int] = []
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


def solution(order: list[int]) -> list[int]:
    """A backward ends the oldest microbatch of its own chunk; its buffer joins the end of one queue for all chunks."""
    return _walk(order, lambda chunk: chunk)


def wrong_1(order: list[int]) -> list[int]:
    """Takes it that the oldest microbatch of all ends, whichever chunk the backward names."""
    return _walk(order, lambda chunk: 0)


def wrong_2(order: list[int]) -> list[int]:
    """Gives every forward a buffer of its own: right, and as much memory as there are microbatches."""
    return list(range(sum(step > 0 for step in order)))


def wrong_3(order: list[int]) -> list[int]:
    """Takes turns among as many buffers as the warm-up has forwards, and forgets the forward that runs beside them."""
    before = next(place for place, step in enumerate(order) if step < 0)
    return [place % max(1, before - 1) for place in range(sum(step > 0 for step in order))]
