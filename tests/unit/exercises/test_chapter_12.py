"""Wrong answers to the exercises of chapter 12, with what each believes and words of its score."""

import pytest

from labkit.check import chapter_12, score
from labkit.check.chapter_12 import crossed_pairs, most
from labkit.check.solution_source import solution_of
from labkit.schedules import gpipe, one_f_one_b, split_backward, verify, zbv, zero_bubble_h1
from labkit.schedules.ir import Schedule, ScheduleError


def texts(schedule):
    return [[str(action) for action in schedule.actions(rank)] for rank in range(schedule.pp)]


def split(weight):
    return lambda pp, m: texts(split_backward(one_f_one_b(pp, m), weight=weight))


def later_longer(pp, m):
    programs = ["F" * rank + "FB" * (m - rank) + "B" * rank for rank in range(pp)]
    return [
        [f"{rank}{kind}{program[:i].count(kind)}" for i, kind in enumerate(program)]
        for rank, program in enumerate(programs)
    ]


def weights_last(schedule):
    return [sorted(row, key=lambda action: "W" in action) for row in texts(schedule)]


def stage_of(action):
    return action.rstrip("0123456789")[:-1]


TABLES = {
    "12.kept": {
        # Believes that I frees the activations, as B does: W still reads them.
        "freed at I": (lambda row: most(row, {"F": 1, "B": -1, "I": -1}), "W still reads the activations"),
        "all forwards": (lambda row: sum("F" in action for action in row), "gives the memory of one back"),
        # Believes that each stage of a rank has a memory of its own, and takes the fullest.
        "fullest stage": (
            lambda row: max(
                most([a for a in row if stage_of(a) == stage], chapter_12.CHANGES) for stage in map(stage_of, row)
            ),
            "keep theirs at the same time",
        ),
        # Believes that memory only grows until the first backward, and stops there.
        "first backward": (lambda row: ["F" in action for action in row].index(False), "later more can be kept"),
        "freed twice": (lambda row: most(row, {"F": 1, "B": -1, "I": -1, "W": -1}), "twice, at I and at W"),
        "never freed by W": (lambda row: most(row, {"F": 1, "B": -1}), "a split backward frees at W"),
        "at the end": (lambda row: 0, "left at the end of the row"),
    },
    "12.schedule": {
        "GPipe": (lambda pp, m: texts(gpipe(pp, m)), "all forwards come before the first backward"),
        # Believes that splitting the backward is enough: each W comes right after its I, where it delays the next I.
        "W after I": (split("after"), "each W comes right after its I"),
        # Believes that W may wait as long as it likes: so do the activations, and the gaps before it stay empty.
        "W at the end": (split("end"), "every W is at the end of its row"),
        # Believes that later ranks warm up longer: they wait for forwards that come after what waits for them.
        "later longer": (later_longer, "no rank may warm up longer than the one before it"),
        "one stage": (
            lambda pp, m: texts(zero_bubble_h1(pp, m)),
            "with one stage per rank no table takes fewer than 27",
        ),
    },
    "12.few": {
        # Believes that ZB-V is best at any size: with as many microbatches as ranks its W come too early.
        "ZB-V": (lambda: texts(zbv(4, 4)), "each W comes right after its I"),
        "ZB-H1": (lambda: texts(zero_bubble_h1(4, 4)), "with one stage per rank no table takes fewer than 15"),
        "eight microbatches": (lambda: texts(zbv(4, 8)), "is outside 8 stages and 4 microbatches"),
        # Puts every W off, but keeps the order of I: rank 0 then waits for gradients.
        "W at the end": (lambda: weights_last(zbv(4, 4)), "every W is at the end of its row"),
    },
    "12.crossed": {
        "none": (lambda rows: [], "this finds no crossing"),
        # Believes that forwards and gradients travel apart: between two ranks one order pairs all messages.
        "by direction": (lambda rows: crossed_pairs(rows, lambda a, b, x: (a, b, x.kind == "F")), "separately"),
        # Believes that the turn of a V is a message, too: it stays on its rank, and no order pairs it.
        "within a rank": (lambda rows: crossed_pairs(rows, own=True), "this counts results that stay on their rank"),
        "ascending": (lambda rows: crossed_pairs(rows, ascending=True), "in the order of its row"),
        # Names the receiver first, and so blames the action that is the victim.
        "receiver first": (lambda rows: [pair[::-1] for pair in crossed_pairs(rows)], "these pairs are (receiver,"),
        "first alone": (lambda rows: crossed_pairs(rows)[:1], "we want all of them"),
    },
}


def test_crossings_are_those_that_verify_refuses() -> None:
    """`blocking` posts a receive where its result is needed, as the exercise does."""
    rows = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B1", "1B0"]]
    with pytest.raises(ScheduleError) as refused:
        verify(Schedule("crossing", 2, 2, rows), "blocking")
    for made, used in crossed_pairs(rows):
        assert f"{made}>0 met the receive of 1B{used[-1]}>0" in str(refused.value)
    assert crossed_pairs(texts(gpipe(3, 4))) == [] and verify(gpipe(3, 4), "blocking")


def test_pairs_may_come_in_any_order_and_type() -> None:
    assert score("12.crossed", lambda rows: set(crossed_pairs(rows))).ok
    assert "None" in repr(score("12.crossed", lambda rows: None))


def test_a_schedule_that_only_goes_forward_scores_nothing():
    """Forwards alone are quick and remember nothing: without a rule of its own they would beat every target."""
    forwards = score("12.schedule", lambda pp, m: [[f"{rank}F{i}" for i in range(m)] for rank in range(pp)])
    assert forwards.passed == 0
    assert forwards.outcomes[0].got == "no backward in any row"
    one_half = score(
        "12.schedule",
        lambda pp, m: [
            [f"{rank}{k}{i}" for i in range(m) for k in ("FB" if i < m // 2 else "F")] for rank in range(pp)
        ],
    )
    assert one_half.passed == 0
    assert one_half.outcomes[0].got.startswith("16 actions are missing, first 0B4")


def test_a_schedule_that_does_not_run_is_told_once():
    """One mistake, one sentence, though all nine targets are missed."""
    found = score(
        "12.schedule", lambda pp, m: [[f"{r}{kind}{i}" for kind in "FI" for i in range(m)] for r in range(pp)]
    )
    assert (found.passed, found.total) == (0, 9)
    told = repr(found).splitlines()
    assert len(told) == 2
    assert "got 32 actions are missing, first 0W0" in told[1]


def test_a_schedule_that_runs_is_told_each_target_of_the_ladder_once():
    """Other sizes add nothing while the same target is missed at the first size."""
    head, *told = repr(score("12.schedule", lambda pp, m: texts(gpipe(pp, m)))).splitlines()
    assert head == "12.schedule: 1/9" and [line.split(" steps")[0].split()[-1] for line in told] == [
        "33", "29", "27", "25.5",
    ]  # fmt: skip
    assert told[0].endswith("so every rank keeps the whole batch.")


def test_a_table_for_one_size_is_refused_at_the_others():
    found = score("12.schedule", texts(zbv(4, 8)))
    assert [outcome.passed for outcome in found.outcomes] == [True] * 5 + [False] * 4
    assert "got 4 rows for 2 ranks" in repr(found)


def test_an_answer_that_is_no_rows_is_told_what_rows_are():
    v = zbv(4, 8)
    for answer, seen in (
        (None, "None."),
        (lambda pp, m: None, "None."),
        (v, "a Schedule: give its rows"),
        (lambda pp, m: zbv(pp, m), "a Schedule: give its rows"),
        (lambda pp, m: zbv(pp, m).to_csv(), "str '0F0,0F1"),
        (lambda pp, m: ["0F0 0B0"] * pp, "'0F0 0B0' as the row of rank 0"),
    ):
        head, *told = repr(score("12.schedule", answer)).splitlines()
        assert head == "12.schedule: 0/9" and len(told) == 1
        assert f"expected a list of rows (lists of texts such as 0F0) that runs, got {seen}" in told[0]
    rows = [[str(action) for action in v.actions(rank)] for rank in range(v.pp)]
    assert score("12.schedule", rows).outcomes[0].passed, "rows themselves are an answer for their own sizes"


def test_one_stage_a_rank_meets_all_targets_but_those_with_two():
    """ZB-H1 takes 3m + p - 1 in memory p; two stages a rank reach 3m + (p - 1)/2: 25.5, 22 and 38 steps."""

    missed = [
        outcome.expected
        for outcome in score("12.schedule", lambda pp, m: texts(zero_bubble_h1(pp, m))).outcomes
        if not outcome.passed
    ]
    assert [text.split(" steps")[0] for text in missed] == ["at most 25.5", "at most 22", "at most 38"]


def test_the_red_wait_is_one_that_a_weight_gradient_could_fill():
    """Rank 0 of W right after I waits longest before its first gradient, when it has no W; this is not named."""
    told = repr(score("12.schedule", split("after")))
    assert "the longest wait after a first gradient: rank 0 idles" in told and "before 0I0" not in told
    assert "longest wait" not in repr(score("12.schedule", lambda pp, m: texts(zero_bubble_h1(pp, m))))


def test_as_many_microbatches_as_ranks_reach_the_bound():
    assert score("12.few", solution_of("12.few")).ok
    rows = solution_of("12.few")()
    assert score("12.few", rows).ok, "rows themselves are an answer"
