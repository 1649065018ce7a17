"""Chapter 17, exercise `17.buffers`: buffers(order) -> the buffer of each forward, first in first out."""


def wrong_1(order):
    """Takes it that the oldest microbatch of all ends, whichever chunk the backward names."""
    return _walk(order, lambda chunk: 0)


def wrong_2(order):
    """Gives every forward a buffer of its own: right, and as much memory as there are microbatches."""
    return list(range(sum(step > 0 for step in order)))


def wrong_3(order):
    """Takes turns among as many buffers as the warm-up has forwards, and forgets the forward that runs beside them."""
    before = next(place for place, step in enumerate(order) if step < 0)
    return [place % max(1, before - 1) for place in range(sum(step > 0 for step in order))]
