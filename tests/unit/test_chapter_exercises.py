"""What the scores say about wrong answers that a score could easily describe wrongly."""

from labkit.check import check
from labkit.check.replicas import optimizer_shards
from labkit.schedules import zbv, zero_bubble_h1


def test_rows_without_backwards_are_named_instead_of_timed():
    """A schedule of forwards alone is quick and keeps nothing: to say so would praise what is missing."""
    forwards = check("10.one_f_one_b", lambda pp, rank, m: [f"{rank}F{i}" for i in range(m)])
    assert forwards.passed == 0
    assert forwards.outcomes[-1].got == "no backward for 0F0, 0F1, 0F2"
    assert "in flight" not in forwards.outcomes[-2].got
    one_missing = check("10.one_f_one_b", lambda pp, rank, m: [f"{rank}{k}{i}" for i in range(m) for k in "FB"][:-1])
    assert one_missing.outcomes[-1].got == "no backward for 0F2"


def test_rows_in_another_order_are_timed_in_units_that_are_named():
    gpipe = check("10.one_f_one_b", lambda pp, rank, m: [f"{rank}{kind}{i}" for kind in "FB" for i in range(m)])
    assert (
        gpipe.outcomes[-1].expected == "a schedule that takes 21 units of time (F = 1, B = 2) with at most 3 in flight"
    )
    assert (
        gpipe.outcomes[-1].got
        == "one that takes 21 units of time (F = 1, B = 2) with [3, 3, 3, 3, 3] in flight by rank"
    )


def test_a_schedule_that_only_goes_forward_scores_nothing():
    """Forwards alone are quick and remember nothing: without a rule of its own they would beat every target."""
    forwards = check("12.schedule", lambda pp, m: [[f"{rank}F{i}" for i in range(m)] for rank in range(pp)])
    assert forwards.passed == 0
    assert forwards.outcomes[0].got == "no backward in any row"
    one_half = check(
        "12.schedule",
        lambda pp, m: [
            [f"{rank}{k}{i}" for i in range(m) for k in ("FB" if i < m // 2 else "F")] for rank in range(pp)
        ],
    )
    assert one_half.passed == 0
    assert "0B4 is missing" in one_half.outcomes[0].got


def test_a_row_in_another_form_is_told_what_a_row_is():
    """Each has its backwards: to miss them would send the reader looking in the wrong place."""

    def got(row):
        return check("10.one_f_one_b", row).outcomes[-1].got

    assert got(lambda pp, rank, m: "0F0 0F1") == "'0F0 0F1' for rank 0: a row is a list of texts such as '0F0'"
    assert got(lambda pp, rank, m: [f"{k}{i}" for i in range(m) for k in "FB"]) == (
        "'F0' in the row of rank 0: a row is a list of texts such as '0F0'"
    )
    assert got(lambda pp, rank, m: None).startswith("None for rank 0: a row is a list")
    shifted = got(lambda pp, rank, m: [f"{rank + 1}{k}{i}" for i in range(m) for k in "FB"])
    assert shifted == "a row in which rank 0 runs stage 1 (1F0): rank r runs stage r"


def test_a_microbatch_that_is_left_out_lacks_its_forward_first():
    left_out = check("10.one_f_one_b", lambda pp, rank, m: [f"{rank}{k}{i}" for i in range(m - 1) for k in "FB"])
    assert left_out.outcomes[-1].got.startswith("the answer cannot run: 0F2 is missing; 1F2 is missing")
    many = check("10.one_f_one_b", lambda pp, rank, m: [f"{rank}F{i}" for i in range(30)])
    assert many.outcomes[-1].got.endswith("0F6, 0F7 and 22 more")


def test_a_deadlock_is_told_in_sentences_without_the_grid():
    backward_first = check("10.one_f_one_b", lambda pp, rank, m: [f"{rank}{k}{i}" for i in range(m) for k in "BF"])
    last_first = check("11.order", lambda pp, v, n, r: [s * c for s in (1, -1) for c in range(1, v + 1)] * sum(n))
    for outcome in (backward_first.outcomes[-1], last_first.outcomes[-1]):
        assert "the answer cannot run, these wait for each other: rank" in outcome.got
        assert "|" not in outcome.got and "which rank" in outcome.got.rsplit("; ", 1)[-1]


def test_an_order_in_another_form_is_told_what_an_order_is():
    for wrong, seen in (
        ("1 1", "'1 1' for rank 0"),
        (["1"], "'1' in the order of rank 0"),
        ([1, 0], "0 in the"),
        (None, "None"),
    ):
        got = check("11.order", lambda *sizes, answer=wrong: answer).outcomes[-1].got
        assert got.startswith(seen) and "an order is a list of whole numbers" in got
    forwards = check("11.order", lambda pp, v, n, r: list(range(1, v + 1)) * sum(n))
    assert forwards.outcomes[-3].got == "0 times -1 on rank 0; each chunk runs 8 microbatches each way"


def test_a_schedule_that_does_not_run_is_told_once():
    """One mistake, one sentence, though all nine targets are missed."""
    score = check(
        "12.schedule", lambda pp, m: [[f"{r}{kind}{i}" for kind in "FI" for i in range(m)] for r in range(pp)]
    )
    assert (score.passed, score.total) == (0, 9)
    told = repr(score).splitlines()
    assert len(told) == 2
    # 4 ranks and 8 microbatches lack 32 weight gradients; eight are named
    assert told[1].endswith("0W6 is missing; 0W7 is missing and 24 more.")


def test_a_schedule_that_runs_is_told_every_target_it_misses():
    score = check("12.schedule", lambda pp, m: [[f"{r}{k}{i}" for k in "FB" for i in range(m)] for r in range(pp)])
    assert len(repr(score).splitlines()) == 1 + score.total - score.passed == 9


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
        head, *told = repr(check("12.schedule", answer)).splitlines()
        assert head == "12.schedule: 0/9" and len(told) == 1
        assert f"expected a list of rows (lists of texts such as 0F0) that runs, got {seen}" in told[0]
    rows = [[str(action) for action in v.actions(rank)] for rank in range(v.pp)]
    assert check("12.schedule", rows).outcomes[0].passed, "rows themselves are an answer for their own sizes"


def test_one_stage_a_rank_meets_all_targets_but_those_with_two():
    """ZB-H1 takes 3m + p - 1 in memory p; two stages a rank reach 3m + (p - 1)/2: 25.5, 22 and 38 steps."""

    def h1(pp: int, m: int) -> list[list[str]]:
        schedule = zero_bubble_h1(pp, m)
        return [[str(action) for action in schedule.actions(rank)] for rank in range(pp)]

    missed = [outcome.expected for outcome in check("12.schedule", h1).outcomes if not outcome.passed]
    assert [text.split(" steps")[0] for text in missed] == ["at most 25.5", "at most 22", "at most 38"]


def test_owners_that_cannot_be_are_told_by_an_element():
    """The cases before compare whole maps; of forty parameters the first wrong element says more."""

    def got(answer) -> str:
        return check("09.shards", answer).outcomes[-1].got

    everything = lambda sizes, bucket_size, dp: [[(p, 0, n) for p, n in enumerate(sizes)]] * dp  # noqa: E731
    assert got(everything) == "element 0 of parameter 0 owned twice, by ranks 0 and 1"
    assert got(lambda sizes, bucket_size, dp: [[]] * dp).endswith(" without an owner")
    alone = lambda sizes, bucket_size, dp: [everything(sizes, 0, 1)[0]] + [[]] * (dp - 1)  # noqa: E731
    assert " on rank 0, which belongs to rank 1" in got(alone)
    right = optimizer_shards.owners
    assert got(right) == check("09.shards", right).outcomes[-1].expected

    def more(*case):
        first, *others = right(*case)
        return [[*first, (99, 0, 1)], *others]

    assert got(more) == "an element 0 of parameter 99, which has no such element"
    assert got(lambda sizes, bucket_size, dp: None).endswith("one list of pieces for each of the 6 ranks")
