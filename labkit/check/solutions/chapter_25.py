"""Solutions of chapter 25, overlap."""

from labkit.check.chapter_25 import AWAITS, STARTS
from labkit.check.solution_source import solves


@solves("25.when")
def when(order, times, message):
    """Two lanes: a part waits for its own side's message, a message for those before it."""
    now = free = 0  # when the lane of parts is free, and that of messages
    arrives = {}
    for part in order:
        if part in AWAITS:
            now = max(now, arrives[AWAITS[part]])
        now += times[part]
        if part in STARTS:
            free = max(now, free) + message
            arrives[STARTS[part]] = free
    return now


@solves("25.order")
def order(layers):
    """The sides take turns. Between two layers the backward goes first: its part is the one
    that starts a message, and a forward's combine starts none.
    """
    words = ["c'", "a", "e'", "e", "a'"]
    for _ in range(layers - 1):
        words += ["c'", "c", "a", "e'", "e", "a'"]
    return [*words, "c"]


@solves("25.weights")
def with_weights(layers):
    """A weight gradient reads what is there and nobody reads it, so it goes where a rank
    would wait: We before e, Wa before the last c.
    """
    words = ["c'", "a", "e'", "We", "e", "a'"]
    for _ in range(layers - 1):
        words += ["c'", "c", "a", "e'", "We", "e", "a'"]
    return [*words, *["Wa"] * layers, "c"]


@solves("25.warmup")
def warmup(rank, pp):
    """A result takes a pair longer per hop, there and back, and one forward more makes sure
    that a pair never needs itself.
    """
    return 2 * (pp - 1 - rank) + 1
