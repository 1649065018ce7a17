"""Chapter 17, exercise `17.held`: most_held(order) -> the most forwards in flight at once."""


def wrong_1(order):
    """Counts all forwards, as if no backward gave anything back."""
    return sum(step > 0 for step in order)


def wrong_2(order):
    """Stops at the first backward, though more forwards can be in flight later."""
    return next(place for place, step in enumerate(order) if step < 0)


def wrong_3(order):
    """Counts each chunk alone and takes the fullest, though they wait at the same time."""
    return max(solution([step for step in order if abs(step) == chunk]) for chunk in set(map(abs, order)))
