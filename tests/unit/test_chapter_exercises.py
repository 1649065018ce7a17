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
    assert forwards.passed == 0 and forwards.total == 7
    assert [outcome.got for outcome in forwards.outcomes[:2]] == ["no backward in any row", "nothing that runs"]
    one_half = check(
        "10.schedule",
        lambda pp, m: [
            [f"{rank}{k}{i}" for i in range(m) for k in ("FB" if i < m // 2 else "F")] for rank in range(pp)
        ],
    )
    assert one_half.passed == 0
    assert "0B4 is missing" in one_half.outcomes[0].got
