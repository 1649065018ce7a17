"""Chapter 12, exercise `12.crossed`: crossed(rows) -> (sender, receiver) of each message that meets a wrong receive."""


def wrong_1(rows):
    """Believes that forwards and gradients travel apart: between two ranks one order pairs all messages."""
    return [pair for kinds in ("F", "BI") for pair in _met(rows, lambda a, b: a != b, kinds)]


def wrong_2(rows):
    """Believes that the turn of a V is a message, too: it stays on its rank, and no order pairs it."""
    return _met(rows, lambda a, b: True)


def wrong_3(rows):
    """Names the receiver first, and so blames the action that is the victim."""
    return [(used, made) for made, used in solution(rows)]
