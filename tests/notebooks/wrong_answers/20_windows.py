"""Chapter 20, exercise `20.windows`: windows(tokens, length, stride) -> (start, first label, label behind the last)."""


def wrong_1(tokens, length, stride):
    """Scores all labels of every window: tokens in the overlap then count many times, mostly with little context."""
    return [(start, start + 1, end) for start, _, end in solution(tokens, length, stride)]


def wrong_2(tokens, length, stride):
    """Drops the last window where it does not fit, as a training loader does, and leaves its tokens unscored."""
    return [window for window in solution(tokens, length, stride) if window[0] + length < tokens]


def wrong_3(tokens, length, stride):
    """Takes the tokens that a window reads for the labels that it scores, which stand one place behind."""
    return [(start, first - 1, end - 1) for start, first, end in solution(tokens, length, stride)]
