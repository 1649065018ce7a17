"""Wrong answers to the exercises of chapter 10, with what each believes and words of its score."""

import math

import pytest

from labkit.check import score
from labkit.check.chapter_10 import _row, _warm_up, draw_warm_up
from labkit.schedules import Costs, Schedule, one_f_one_b, simulate
from labkit.schedules.ir import Action


def least(p, share):
    return (p - 1) * (1 - share) / share


ENOUGH = {
    # Takes (p - 1)/m for the bubble's share of the step; it is the bubble over the work.
    "work": (lambda p, share: max(1, math.ceil((p - 1) / share)), "compares the bubble with the work"),
    # Rounds down, although fewer microbatches mean a larger bubble.
    "down": (lambda p, share: max(1, math.floor(least(p, share))), "this rounds down"),
    # Lets p stages wait for the first microbatch; the first stage does not wait.
    "p stages": (lambda p, share: max(1, math.ceil(p * (1 - share) / share)), "p - 1 stages wait"),
    "fewer": (lambda p, share: math.floor(least(p, share)) + 1, "one fewer is enough"),
    "other share": (lambda p, share: max(1, math.ceil((p - 1) * share / (1 - share))), "exercise asks for the bubble"),
    "none": (lambda p, share: math.ceil(least(p, share)), "at least one microbatch"),
    "error": (lambda p, share: 1 / 0, "ZeroDivisionError"),
}


def warm(late, cap=True):
    """A warm-up with `late(stages after this rank, latency)` forwards more than 1F1B's."""

    def answer(pp, rank, count, latency):
        stages = pp - 1 - rank
        found = stages + late(stages, latency)
        return min(count, found) if cap else found

    return answer


WARM_UPS = {
    # The assumption of 1F1B: a gradient is there as soon as the next stage has computed it.
    "1f1b": (warm(lambda stages, latency: 0), "this is 1F1B's warm-up"),
    # Counts the way down and forgets the way back.
    "one way": (warm(lambda stages, latency: stages * math.ceil(latency / 3)), "a gradient has to come back"),
    "one border": (
        warm(lambda stages, latency: math.ceil(2 * latency / 3) if stages else 0),
        "one border's worth isn't enough",
    ),
    # Fills the whole round trip with pairs, as if a pair could begin on one rank and end on another.
    "in all": (
        warm(lambda stages, latency: math.ceil(2 * stages * latency / 3)),
        "every border is rounded up by itself",
    ),
    "down": (warm(lambda stages, latency: stages * math.floor(2 * latency / 3)), "round up"),
    "uncapped": (warm(lambda stages, latency: stages * math.ceil(2 * latency / 3), cap=False), "at most all forwards"),
    "one more": (warm(lambda stages, latency: stages * math.ceil(2 * latency / 3) + 1), "one forward fewer"),
    "gpipe": (lambda pp, rank, count, latency: count, "all forwards first is GPipe"),
    "error": (lambda pp, rank, count, latency: 1 / 0, "ZeroDivisionError"),
}


def name(action):
    return f"{action.kind}{action.microbatch}"


def with_messages(pp, rank, count, *, receives=True, sends=True, ends=True, early=False):
    """A row whose messages go one by one, in the given ways wrong."""
    steps = []
    for action in one_f_one_b(pp, count).actions(rank):
        to = 1 if action.kind == "F" else -1
        here = [f"recv {name(action)}"] if receives and (not ends or 0 <= rank - to < pp) else []
        send = [f"send {name(action)}"] if sends and (not ends or 0 <= rank + to < pp) else []
        steps += [*here, *send, name(action)] if early else [*here, name(action), *send]
    return steps


def joined(steps):
    """A receive that follows a send starts together with it: right."""
    posts = []
    for step in steps:
        if step[:4] == "recv" and posts and posts[-1][:4] == "send":
            posts[-1] += f" + {step}"
        else:
            posts.append(step)
    return posts


def at_once(*case):
    steps = [step for step in with_messages(*case) if step[:6] != "recv B"]
    return [step + step.replace("send F", " + recv B") if "send F" in step else step for step in steps]


def two_receives(*case):
    """Awaits the first gradient together with the activation before it: in time, but no function receives both."""
    posts = joined(with_messages(*case))
    at = next((i for i, post in enumerate(posts) if post.endswith("+ recv B0")), None)
    before = [i for i, post in enumerate(posts[:at]) if " + recv F" in post]
    if at is not None and before:
        posts[before[-1]] += " + recv B0"
        posts[at] = posts[at].removesuffix(" + recv B0")
    return posts


def swapped(pp, rank, count):
    """Rank 0 sends its first two activations in the other order."""
    steps = joined(with_messages(pp, rank, count))
    if rank or count < 2 or pp < 3:
        return steps
    return ["F0", "F1", "send F1", "send F0", *steps[4:]]


MESSAGES = {
    # Sends and receives one by one, as if a send did not wait for its receive.
    "one by one": (with_messages, "each waits until the other receives"),
    # Forgets that the pipeline has ends: the first rank receives no activation, the last sends none.
    "no ends": (lambda *case: with_messages(*case, ends=False), "no neighbour on that side"),
    "early": (lambda *case: with_messages(*case, early=True), "before it has run"),
    "no receive": (lambda *case: with_messages(*case, receives=False), "must come first"),
    "no send": (lambda *case: with_messages(*case, sends=False), "hangs waiting for it"),
    # Believes that the gradient of a microbatch comes back at once, so it is awaited together with the activation.
    "at once": (at_once, "does not come back at once"),
    "crossed": (swapped, "messages carry no name"),
    "twice": (lambda *case: [*(s := joined(with_messages(*case))), *[x for x in s if x[:4] == "send"]], "twice"),
    "row": (lambda pp, rank, m: ["F0", "B0"], "other actions than 1F1B's"),
    "two receives": (two_receives, "join at most one send and one receive"),
    "form": (lambda pp, rank, m: ["F0 + B0"], "a program is a list of texts"),
    "ahead": (
        lambda *case: sorted(with_messages(*case), key=lambda step: step[:6] != "recv F"),
        "they wait for each other",
    ),
}

TABLES = {"10.enough": ENOUGH, "10.warm_up": WARM_UPS, "10.messages": MESSAGES}


def test_one_microbatch_too_many_where_the_share_is_exact_is_no_stage_too_many():
    """With 4 stages and half of the step both give 4; a pipeline that tells them apart is judged first."""
    found = repr(score("10.enough", lambda p, share: math.floor(least(p, share)) + 1))
    assert "one fewer is enough" in found and "stages wait" not in found
    found = repr(score("10.enough", lambda p, share: max(1, math.ceil(p * (1 - share) / share))))
    assert "stages wait" in found and "one fewer is enough" not in found


def test_other_programs_that_run_are_right():
    """Megatron's own, which joins in the steady phase alone, and even ranks that send first."""

    def megatron(pp, rank, count):
        warmup = min(pp - rank - 1, count)
        steady = [f"B{m}" for m in range(count - warmup)] + [f"F{m}" for m in range(warmup, count)]
        posts = []
        for step in with_messages(pp, rank, count):
            joins = step[:4] == "recv" and posts and posts[-1][:4] == "send"
            if joins and step[5:] in steady and posts[-1][5:] in steady:
                posts[-1] += f" + {step}"
            else:
                posts.append(step)
        return posts

    def even_odd(pp, rank, count):
        posts = [post.split(" + ") for post in megatron(pp, rank, count)]
        return [step for post in posts for step in (post if rank % 2 == 0 else reversed(post))]

    assert score("10.messages", megatron).ok and score("10.messages", even_odd).ok


def step(pp, count, warm_ups, latency):
    rows = [[Action.parse(text) for text in _row(r, w, count)] for r, w in enumerate(warm_ups)]
    costs = Costs(forward=[1.0] * pp, backward=[2.0] * pp, latency=latency)
    return simulate(Schedule("late", pp, count, rows), costs).makespan


@pytest.mark.parametrize("latency", [0.0, 0.25, 0.5, 1.0, 1.5, 2.0])
def test_the_right_warm_up_loses_no_time_and_no_rank_can_do_with_less(latency):
    """A step then takes what no order can beat: the work of the last rank, and the way to it and back."""
    pp, count = 4, 32
    right = [_warm_up(pp, rank, count, latency) for rank in range(pp)]
    least = 3 * (count + pp - 1) + 2 * (pp - 1) * latency
    assert step(pp, count, right, latency) == least
    for rank in range(pp - 1):
        assert step(pp, count, [each - (r == rank) for r, each in enumerate(right)], latency) > least


def test_a_warm_up_is_drawn_if_it_runs():
    assert draw_warm_up(_warm_up) is not None
    assert draw_warm_up(lambda pp, rank, count, latency: rank) is None, "it deadlocks"
    assert draw_warm_up(lambda pp, rank, count, latency: "x") is None
