"""What the scores say about wrong answers that a score could easily describe wrongly."""

from labkit.check import check


def test_rows_without_backwards_are_named_instead_of_timed():
    """A schedule of forwards alone is quick and keeps nothing: to say so would praise what is missing."""
    forwards = check("08.one_f_one_b", lambda pp, rank, m: [f"{rank}F{i}" for i in range(m)])
    assert forwards.passed == 0
    assert forwards.outcomes[-1].got == "no backward for 0F0, 0F1, 0F2"
    assert "in flight" not in forwards.outcomes[-2].got
    one_missing = check("08.one_f_one_b", lambda pp, rank, m: [f"{rank}{k}{i}" for i in range(m) for k in "FB"][:-1])
    assert one_missing.outcomes[-1].got == "no backward for 0F2"


def test_rows_in_another_order_are_timed_in_units_that_are_named():
    gpipe = check("08.one_f_one_b", lambda pp, rank, m: [f"{rank}{kind}{i}" for kind in "FB" for i in range(m)])
    assert (
        gpipe.outcomes[-1].expected == "a schedule that takes 21 units of time (F = 1, B = 2) with at most 3 in flight"
    )
    assert (
        gpipe.outcomes[-1].got
        == "one that takes 21 units of time (F = 1, B = 2) with [3, 3, 3, 3, 3] in flight by rank"
    )


def test_a_schedule_that_only_goes_forward_scores_nothing():
    """Forwards alone are quick and remember nothing: without a rule of its own they would beat every target."""
    forwards = check("10.schedule", lambda pp, m: [[f"{rank}F{i}" for i in range(m)] for rank in range(pp)])
    assert forwards.passed == 0
    assert forwards.outcomes[0].got == "no backward in any row"
    one_half = check(
        "10.schedule",
        lambda pp, m: [
            [f"{rank}{k}{i}" for i in range(m) for k in ("FB" if i < m // 2 else "F")] for rank in range(pp)
        ],
    )
    assert one_half.passed == 0
    assert "0B4 is missing" in one_half.outcomes[0].got


def test_a_row_in_another_form_is_told_what_a_row_is():
    """Each has its backwards: to miss them would send the reader looking in the wrong place."""

    def got(row):
        return check("08.one_f_one_b", row).outcomes[-1].got

    assert got(lambda pp, rank, m: "0F0 0F1") == "'0F0 0F1' for rank 0: a row is a list of texts such as '0F0'"
    assert got(lambda pp, rank, m: [f"{k}{i}" for i in range(m) for k in "FB"]) == (
        "'F0' in the row of rank 0: a row is a list of texts such as '0F0'"
    )
    assert got(lambda pp, rank, m: None).startswith("None for rank 0: a row is a list")
    shifted = got(lambda pp, rank, m: [f"{rank + 1}{k}{i}" for i in range(m) for k in "FB"])
    assert shifted == "a row in which rank 0 runs stage 1 (1F0): rank r runs stage r"


def test_a_microbatch_that_is_left_out_lacks_its_forward_first():
    left_out = check("08.one_f_one_b", lambda pp, rank, m: [f"{rank}{k}{i}" for i in range(m - 1) for k in "FB"])
    assert left_out.outcomes[-1].got.startswith("the answer cannot run: 0F2 is missing; 1F2 is missing")
    many = check("08.one_f_one_b", lambda pp, rank, m: [f"{rank}F{i}" for i in range(30)])
    assert many.outcomes[-1].got.endswith("0F6, 0F7 and 22 more")


def test_a_deadlock_is_told_in_sentences_without_the_grid():
    backward_first = check("08.one_f_one_b", lambda pp, rank, m: [f"{rank}{k}{i}" for i in range(m) for k in "BF"])
    last_first = check("09.order", lambda pp, v, m, n, r: [s * c for s in (1, -1) for c in range(1, v + 1)] * m)
    for outcome in (backward_first.outcomes[-1], last_first.outcomes[-1]):
        assert outcome.got.startswith("the answer cannot run, these wait for each other: rank")
        assert "|" not in outcome.got and "which rank" in outcome.got.rsplit("; ", 1)[-1]


def test_an_order_in_another_form_is_told_what_an_order_is():
    for wrong, seen in (
        ("1 1", "'1 1' for rank 0"),
        (["1"], "'1' in the order of rank 0"),
        ([1, 0], "0 in the"),
        (None, "None"),
    ):
        got = check("09.order", lambda *sizes, answer=wrong: answer).outcomes[-1].got
        assert got.startswith(seen) and "an order is a list of whole numbers" in got
    forwards = check("09.order", lambda pp, v, m, n, r: list(range(1, v + 1)) * m)
    assert forwards.outcomes[-2].got == "no backward for chunk 1, chunk 2 on rank 0"
