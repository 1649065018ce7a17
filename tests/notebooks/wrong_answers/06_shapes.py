"""Chapter 06, exercise `06.shapes`: shapes(s, b, h, t, sequence_parallel) -> the shapes that a rank keeps, by name."""


def wrong_1(s, b, h, t, sequence_parallel):
    """Keeps the gathered input of fc1, as an ordinary product does: a tensor between the regions stays whole."""
    return solution(s, b, h, t, sequence_parallel) | {"fc1 input": [s, b, h]}


def wrong_2(s, b, h, t, sequence_parallel):
    """Cuts the width between the regions, but a norm needs the whole row of a position."""
    found = solution(s, b, h, t, False)
    narrow = {"norm input": [s, b, h // t], "fc1 input": [s, b, h // t], "dropout mask": [s, b, h // t]}
    return found | narrow if sequence_parallel else found


def wrong_3(s, b, h, t, sequence_parallel):
    """Cuts the positions inside the regions as well, where a rank has all of them and a part of the width."""
    found = solution(s, b, h, t, sequence_parallel)
    inside = [s // t, b, 4 * h // t]
    return found | {"gelu input": inside, "fc2 input": inside} if sequence_parallel else found
