"""Chapter 17, exercise `17.unsafe`: unsafe(order, buffers) -> the first forward that overwrites, and the backward."""


def wrong_1(order, buffers):
    """Ends the oldest microbatch of all, whichever chunk the backward names."""
    return solution([1 if step > 0 else -1 for step in order], buffers)


def wrong_2(order, buffers):
    """Refuses each second use of a buffer, even after its backward."""
    spans = spans_of(order)
    for later, number in enumerate(buffers):
        if number in buffers[:later]:
            return spans[later][0], spans[buffers.index(number)][1]
    return None


def wrong_3(order, buffers):
    """Believes that a plan that runs without an error is a safe one."""
