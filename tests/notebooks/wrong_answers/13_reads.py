"""Chapter 13, exercise `13.reads`: reads(stored, offset, shape) -> (key, start there, start here, shape) by read."""


def wrong_1(stored, offset, shape):
    """Forgets that a file holds a box, not the whole tensor: its first element is not element 0."""
    return [(key, first, _minus(first, offset), size) for key, _, first, size in _overlaps(stored, offset, shape)]


def wrong_2(stored, offset, shape):
    """Gives columns before rows, as a picture's x and y, where a tensor's shape begins with its rows."""
    return [(key, a[::-1], b[::-1], size[::-1]) for key, a, b, size in solution(stored, offset, shape)]


def wrong_3(stored, offset, shape):
    """Reads boxes that only touch its own: an overlap of no element is none."""
    found = []
    for key, at, size in stored:
        first = tuple(map(max, at, offset))
        ends = tuple(min(a + n, b + m) for a, n, b, m in zip(at, size, offset, shape))
        if all(end >= start for end, start in zip(ends, first)):
            found.append((key, _minus(first, at), _minus(first, offset), _minus(ends, first)))
    return found
