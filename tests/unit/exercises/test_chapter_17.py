"""Wrong answers to the exercises of chapter 17, with what each believes and words of its score."""

from labkit.check import score
from labkit.check.chapter_17 import _ends, _first_fault, _held, _taken, _walked


def forwards(order):
    return sum(step > 0 for step in order)


def first_backward(order):
    return next(place for place, step in enumerate(order) if step < 0)


HELD = {
    # Counts all forwards, as if no backward gave anything back.
    "all": (forwards, "a backward gives one back"),
    # Stops at the first backward, though more forwards can be in flight later.
    "first backward": (first_backward, "later more can be in flight"),
    # Counts each chunk alone and takes the fullest, though they wait at the same time.
    "fullest chunk": (
        lambda order: max(_held([step for step in order if abs(step) == chunk]) for chunk in set(map(abs, order))),
        "the chunks of a rank wait together",
    ),
}
BUFFERS = {
    # Assumes that the oldest microbatch of all ends, whichever chunk the backward names.
    "oldest of all": (lambda order: _walked(order, lambda step: 0), "a backward names its chunk"),
    # Gives every forward a buffer of its own: right, and as much memory as there are microbatches.
    "own": (lambda order: list(range(forwards(order))), "can be taken"),
    # Takes turns among as many buffers as the warm-up has forwards, and forgets the one forward more that runs with
    # them.
    "turns": (
        lambda order: [place % max(1, first_backward(order) - 1) for place in range(forwards(order))],
        "right after the warm-up",
    ),
}


def second_use(order, buffers):
    spans = _ends(order)
    for later, number in enumerate(buffers):
        if number in buffers[:later]:
            return spans[later][0], spans[buffers.index(number)][1]
    return None


UNSAFE = {
    # Assumes that the oldest microbatch of all ends, whichever chunk the backward names.
    "oldest of all": (
        lambda order, buffers: _first_fault(order, buffers, lambda step: 0),
        "a backward names its chunk",
    ),
    # Rejects each second use of a buffer, even after its backward.
    "second use": (second_use, "after the backward a second use is safe"),
    # Believes that a plan that runs without an error is a safe one.
    "nothing": (lambda order, buffers: None, "the plan overwrites an input"),
}

TABLES = {"17.held": HELD, "17.buffers": BUFFERS, "17.unsafe": UNSAFE}


def test_a_safe_plan_is_told_from_one_that_overwrites() -> None:
    own = repr(score("17.buffers", lambda order: list(range(sum(step > 0 for step in order)))))
    assert "safe, but forward 2 takes buffer 2 instead of 0, and takes 1 more buffer" in own
    assert "overwritten" not in own
    one = repr(score("17.buffers", lambda order: [0 for step in order if step > 0]))
    assert "buffer 0 is overwritten by the forward at position 1, and the backward at position 2" in one
    assert "safe, but" not in one


def test_buffers_may_be_yielded() -> None:
    found = score("17.buffers", lambda order: (buffer for buffer in _taken(order)))
    assert found.ok, repr(found)
    wrong = score("17.buffers", lambda order: (0 for step in order if step > 0))
    assert "expected [0, 1, 0], got [0, 0, 0]" in repr(wrong), "numbers, not the address of a generator"
