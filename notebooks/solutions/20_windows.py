"""Chapter 20, exercise `20.windows`: windows(tokens, length, stride) -> (start, first label, label behind the last)."""

Window = tuple[int, int, int]


def solution(tokens: int, length: int, stride: int) -> list[Window]:
    """The first window scores all its labels; each later one those that the window before has not reached."""
    found, scored = [], 1
    while scored < tokens or not found:
        start = stride * len(found)
        end = min(start + length + 1, tokens)
        found.append((start, scored, end))
        scored = end
    return found


def wrong_1(tokens: int, length: int, stride: int) -> list[Window]:
    """Scores all labels of every window: tokens in the overlap then count many times, mostly with little context."""
    return [(start, start + 1, end) for start, _, end in solution(tokens, length, stride)]


def wrong_2(tokens: int, length: int, stride: int) -> list[Window]:
    """Drops the last window where it does not fit, as a training loader does, and leaves its tokens unscored."""
    return [window for window in solution(tokens, length, stride) if window[0] + length < tokens]


def wrong_3(tokens: int, length: int, stride: int) -> list[Window]:
    """Takes the tokens that a window reads for the labels that it scores, which stand one place behind."""
    return [(start, first - 1, end - 1) for start, first, end in solution(tokens, length, stride)]
