"""What the scores say about wrong answers that a score could easily describe wrongly."""

from labkit.check import chapter_09, check


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


def test_owners_that_cannot_be_are_told_by_an_element():
    """The cases before compare whole maps; of forty parameters the first wrong element says more."""

    def got(answer) -> str:
        return check("09.shards", answer).outcomes[-1].got

    everything = lambda sizes, bucket_size, dp: [[(p, 0, n) for p, n in enumerate(sizes)]] * dp  # noqa: E731
    assert got(everything) == "element 0 of parameter 0 owned twice, by ranks 0 and 1"
    assert got(lambda sizes, bucket_size, dp: [[]] * dp).endswith(" without an owner")
    alone = lambda sizes, bucket_size, dp: [everything(sizes, 0, 1)[0]] + [[]] * (dp - 1)  # noqa: E731
    assert " on rank 0, which belongs to rank 1" in got(alone)
    right = chapter_09.owners
    assert got(right) == check("09.shards", right).outcomes[-1].expected

    def more(*case):
        first, *others = right(*case)
        return [[*first, (99, 0, 1)], *others]

    assert got(more) == "an element 0 of parameter 99, which has no such element"
    assert got(lambda sizes, bucket_size, dp: None).endswith("one list of pieces for each of the 6 ranks")
