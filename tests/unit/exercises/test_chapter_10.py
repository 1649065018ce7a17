"""Wrong answers to the exercises of chapter 10, with what each believes and words of its score."""

import math

from labkit.check import score
from labkit.check.chapter_10 import _program
from labkit.schedules import one_f_one_b


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

ROWS = {
    # Runs all forwards before the first backward: that is GPipe, with its memory.
    "gpipe": (lambda pp, rank, m: _program(rank, m, m), "this is GPipe"),
    "no warm-up": (lambda pp, rank, m: _program(rank, 0, m), "no warm-up: each forward waits"),
    # Believes that ranks further down the pipeline warm up longer, because they start later.
    "grows": (lambda pp, rank, m: _program(rank, min(rank, m), m), "the warm-up grows with the rank"),
    "too many": (lambda pp, rank, m: _program(rank, min(pp - rank, m), m), "one forward too many in the warm-up"),
    "too few": (lambda pp, rank, m: _program(rank, max(0, min(pp - rank - 1, m) - 1), m), "one forward too few"),
    # Forgets that there may be fewer microbatches than stages after this rank.
    "uncapped": (lambda pp, rank, m: _program(rank, pp - rank - 1, m), "a warm-up has at most all 2 forwards"),
    "forwards": (lambda pp, rank, m: _program(rank, m, m)[:m], "forwards alone"),
    "late": (lambda pp, rank, m: (r := _program(rank, 0, m))[:-2] + r[-1:] + r[-2:-1], "the rank waits for a gradient"),
    "form": (lambda pp, rank, m: "0F0 0B0", "a row is a list of texts"),
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

TABLES = {"10.enough": ENOUGH, "10.one_f_one_b": ROWS, "10.messages": MESSAGES}


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


def test_rows_that_cannot_run_are_told_from_rows_that_are_merely_different():
    late = score("10.one_f_one_b", lambda pp, rank, m: _program(rank, min(pp - rank, m), m))
    assert "with [5, 4, 3, 2] in flight by rank" in repr(late) and "cannot run" not in repr(late)
    grows = score("10.one_f_one_b", lambda pp, rank, m: _program(rank, min(rank, m), m))
    assert "cannot run" in repr(grows)


def test_rows_without_backwards_are_named_instead_of_timed():
    """A schedule of forwards alone is quick and keeps nothing: to say so would praise what is missing."""
    forwards = score("10.one_f_one_b", lambda pp, rank, m: [f"{rank}F{i}" for i in range(m)])
    assert forwards.passed == 0
    assert forwards.outcomes[-1].got == "no backward for 0F0, 0F1, 0F2"
    assert "in flight" not in forwards.outcomes[-2].got
    one_missing = score("10.one_f_one_b", lambda pp, rank, m: [f"{rank}{k}{i}" for i in range(m) for k in "FB"][:-1])
    assert one_missing.outcomes[-1].got == "no backward for 0F2"


def test_rows_in_another_order_are_timed_in_units_that_are_named():
    gpipe = score("10.one_f_one_b", lambda pp, rank, m: [f"{rank}{kind}{i}" for kind in "FB" for i in range(m)])
    assert (
        gpipe.outcomes[-1].expected == "a schedule that takes 21 units of time (F = 1, B = 2) with at most 3 in flight"
    )
    assert (
        gpipe.outcomes[-1].got
        == "one that takes 21 units of time (F = 1, B = 2) with [3, 3, 3, 3, 3] in flight by rank"
    )


def test_a_row_in_another_form_is_told_what_a_row_is():
    """Each has its backwards: to miss them would send the reader looking in the wrong place."""

    def got(row):
        return score("10.one_f_one_b", row).outcomes[-1].got

    assert got(lambda pp, rank, m: "0F0 0F1") == "'0F0 0F1' for rank 0: a row is a list of texts such as '0F0'"
    assert got(lambda pp, rank, m: [f"{k}{i}" for i in range(m) for k in "FB"]) == (
        "'F0' in the row of rank 0: a row is a list of texts such as '0F0'"
    )
    assert got(lambda pp, rank, m: None).startswith("None for rank 0: a row is a list")
    shifted = got(lambda pp, rank, m: [f"{rank + 1}{k}{i}" for i in range(m) for k in "FB"])
    assert shifted == "a row in which rank 0 runs stage 1 (1F0): rank r runs stage r"


def test_a_microbatch_that_is_left_out_lacks_its_forward_first():
    left_out = score("10.one_f_one_b", lambda pp, rank, m: [f"{rank}{k}{i}" for i in range(m - 1) for k in "FB"])
    assert left_out.outcomes[-1].got.startswith("the answer cannot run: 0F2 is missing; 1F2 is missing")
    many = score("10.one_f_one_b", lambda pp, rank, m: [f"{rank}F{i}" for i in range(30)])
    assert many.outcomes[-1].got.endswith("0F6, 0F7 and 22 more")


def test_a_deadlock_is_told_in_sentences_without_the_grid():
    backward_first = score("10.one_f_one_b", lambda pp, rank, m: [f"{rank}{k}{i}" for i in range(m) for k in "BF"])
    got = backward_first.outcomes[-1].got
    assert "the answer cannot run, rank" in got
    assert "|" not in got and "which rank" in got.rsplit("; ", 1)[-1]
