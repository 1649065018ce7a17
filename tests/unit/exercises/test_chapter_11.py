"""Wrong answers to the exercises of chapter 11, with what each believes and words of its score."""

import pytest

from labkit.check import score
from labkit.check.chapter_11 import _EARLY, _PIPELINES, _Case, _first_early
from labkit.schedules import interleaved


def pair(first: str, second: str):
    return lambda: [[int(word) for word in row.split()] for row in (first, second)]


TWO = {
    # Takes a microbatch through all chunks of a rank because the rank holds them.
    "depth first": (pair("1 2 1 2 -2 -1 -2 -1", "1 2 -2 1 2 -2 -1 -1"), "waits for microbatch 0, which is on rank 1"),
    "1F1B too soon": (
        pair("1 1 2 -2 2 -2 -1 -1", "1 1 2 -2 2 -2 -1 -1"),
        "waits for a gradient before its last forward",
    ),
    "gradients by turns": (pair("1 1 2 2 -2 -1 -2 -1", "1 1 2 -2 -1 2 -2 -1"), "while the other one of chunk 1"),
    "rank 1 depth first": (pair("1 1 2 2 -2 -2 -1 -1", "1 2 -2 1 2 -2 -1 -1"), "rank 1 comes late with what rank 0"),
    # Believes that gradients reach the first chunk first, as activations do.
    "upwards": (pair("1 1 2 2 -1 -1 -2 -2", "1 1 2 2 -2 -2 -1 -1"), "on rank 0 the -1 at position 4 waits for the -2"),
    "stuck": (pair("1 2 -2 -1 1 2 -2 -1", "1 1 2 -2 2 -2 -1 -1"), "no pipeline: "),
    "no backward": (pair("1 1 2 2", "1 1 2 2"), "0 times -1 on rank 0"),
    "one row": (lambda: [1, 1, 2, 2, -2, -2, -1, -1], "give a list of two orders"),
}


def order(**changes):
    """An answer to 11.order, with the arguments of `_Case.order`, or functions of the groups that give them."""

    def answer(pp, vpp, groups, rank):
        given = {name: value(groups) if callable(value) else value for name, value in changes.items()}
        return _Case(pp, vpp, tuple(groups)).order(rank, **given)

    return answer


ORDERS = {
    # Takes 1F1B's warm-up of p - r - 1 without the factor 2: it runs, but no message has any time.
    "once": (order(each=1), "p - r - 1 once; twice leaves the messages time"),
    # Believes that the first group decides: its microbatches are the first to come back.
    "first group": (order(size=lambda groups: groups[0]), "for the first group; the largest"),
    "last group": (order(size=lambda groups: groups[-1]), "for the last group; the largest"),
    "1F1B": (order(each=1, before=0), "this is 1F1B's warm-up"),
    "one chunk": (order(before=0), "lacks (vpp - 1) groups"),
    "all forwards": (order(more=99), "this is GPipe with chunks"),
    "one more": (order(more=1), "the forward of the first pair is counted"),
    "no groups": (order(groups=lambda groups: [sum(groups)]), "groups are ignored: all microbatches pass"),
    "depth first": (order(groups=lambda groups: [1] * sum(groups)), "each microbatch passes all chunks at once"),
    "one less": (order(more=-1), "the first backward is one forward early"),
    # Believes that backwards visit the chunks in the order of the forwards: gradients come from the last one first.
    "same chunks": (
        lambda *case: [s if s > 0 else -(case[1] + 1 + s) for s in order()(*case)],
        "backwards take the chunks in the forwards' order",
    ),
    "no backward": (lambda *case: [s for s in order()(*case) if s > 0], "there is no backward"),
    "form": (lambda *case: "1 1", "an order is a list of whole numbers"),
}


def needs(signed, vpp):
    """The number that must stand before: of the chunk before, the chunk after, or the last chunk's own forward."""
    return vpp if signed == -vpp else signed - 1


def early(needed):
    return lambda order, vpp: _first_early(order, vpp, needed)


EARLY = {
    # Holds a backward against its own forward alone, and forgets the path through the other chunks.
    "own": (early(lambda s, v: 0 if s > 0 else -s), "only compares a backward with its own forward"),
    # Believes that gradients reach the first chunk first, as activations do.
    "upwards": (early(lambda s, v: s - 1 if s > 0 else s + 1 or 1), "gradients reach the first chunk first"),
    "forwards": (early(lambda s, v: s - 1 if s > 0 else 0), "this looks at forwards alone"),
    "seen": (
        lambda order, vpp: next((i for i, s in enumerate(order) if s < 0 and -s not in order[:i]), None),
        "asks if a forward came at all",
    ),
    "any": (
        lambda order, vpp: next((i for i, s in enumerate(order) if (n := needs(s, vpp)) and n not in order[:i]), None),
        "each entry needs one of its own",
    ),
    "backwards": (early(lambda s, v: 0 if s > 0 else needs(s, v)), "this looks at backwards alone"),
    "no turn": (early(lambda s, v: s - 1), "no chunk comes after the last one"),
    "free turn": (early(lambda s, v: 0 if s == -v else s - 1), "waits, too, for its own forward"),
    "vpp 2": (early(lambda s, v: {1: 0, 2: 1, -2: 2, -1: -2}.get(s)), "the -2 at position 4 waits for the -3"),
    # Trusts counts: if each chunk runs equally often forward and backward, the order must run.
    "nothing": (lambda order, vpp: None, "right counts do not make an order that runs"),
    "from one": (lambda order, vpp: (right := _first_early(order, vpp)) and right + 1, "positions count from 0"),
    "number": (
        lambda order, vpp: None if (right := _first_early(order, vpp)) is None else order[right],
        "the exercise asks for its position",
    ),
}

TABLES = {"11.two": TWO, "11.order": ORDERS, "11.early": EARLY}


def test_equal_groups_are_the_librarys_schedule():
    for pp, vpp, groups in ((4, 2, (4, 4)), (2, 2, (3, 2)), (3, 3, (4, 4))):
        schedule = interleaved(pp, vpp, sum(groups), groups[0])
        assert all(_Case(pp, vpp, groups).order(rank) == schedule.order(rank) for rank in range(pp))


def test_the_shorter_warm_up_is_told_what_messages_cost():
    """It is as fast with free messages and keeps less: without a reason the score would praise the mistake."""
    (found, *_) = [outcome for outcome in score("11.order", order(each=1)).outcomes if "all ranks" in outcome.given]
    assert found.expected.startswith("28.5 forwards of a whole share if messages are free, 32 if")
    assert found.got.startswith("28.5 forwards of a whole share if messages are free, 36 if")
    assert "at most 4 shares in flight: it looks better while messages are free" in found.got


def test_all_forwards_first_are_not_said_to_look_better():
    (found, *_) = [outcome for outcome in score("11.order", order(more=99)).outcomes if "all ranks" in outcome.given]
    assert found.got.endswith("it keeps more, and takes longer with slow messages")


@pytest.mark.parametrize("name", ["any", "backwards", "no turn", "free turn"])
def test_no_other_misunderstanding_is_named(name):
    reasons = [outcome.got.partition(": ")[2] for outcome in score("11.early", EARLY[name][0]).outcomes]
    assert set(filter(None, reasons)) == {reason for reason in reasons if EARLY[name][1] in reason}, reasons


@pytest.mark.parametrize("case", _PIPELINES, ids=str)
def test_unsafe_is_told_from_merely_different(case):
    """The largest group decides: with a smaller one the pipeline cannot run, with a longer warm-up it keeps more."""
    place = _PIPELINES.index(case) - len(_PIPELINES)
    short, longer = (score("11.order", order(**how)).outcomes[place].got for how in ({"size": 1}, {"more": 1}))
    assert short.startswith("no pipeline: the answer cannot run, ") and "|" not in short
    assert longer.endswith("it runs as fast, and keeps more")


def test_some_orders_run_and_some_do_not():
    faults = [_first_early(order, vpp) for _, order, vpp in _EARLY]
    assert sum(fault is None for fault in faults) == 4 and len(faults) == 9


def test_an_order_in_another_form_is_told_what_an_order_is():
    for wrong, seen in (
        ("1 1", "'1 1' for rank 0"),
        (["1"], "'1' in the order of rank 0"),
        ([1, 0], "0 in the"),
        (None, "None"),
    ):
        got = score("11.order", lambda *sizes, answer=wrong: answer).outcomes[-1].got
        assert got.startswith(seen) and "an order is a list of whole numbers" in got
    forwards = score("11.order", lambda pp, v, n, r: list(range(1, v + 1)) * sum(n))
    assert forwards.outcomes[-3].got == "0 times -1 on rank 0; each chunk runs 8 microbatches each way"


def test_a_deadlock_is_told_in_sentences_without_the_grid():
    last_first = score("11.order", lambda pp, v, n, r: [s * c for s in (1, -1) for c in range(1, v + 1)] * sum(n))
    got = last_first.outcomes[-1].got
    assert "the answer cannot run, these wait for each other: rank" in got
    assert "|" not in got and "which rank" in got.rsplit("; ", 1)[-1]
