"""A thousand schedules broken at random: what cannot run is refused, what can run is not. See `broken_schedules.py`."""

from collections import Counter

import pytest
from broken_schedules import BASES, broken_schedule, can_run, can_run_blocking

from labkit.schedules import Schedule, ScheduleError, simulate, verify

SEEDS = range(1000)


def _accepted(rows, stages, microbatches, ask):
    """Whether labkit takes the rows; a row of no actions is refused when the schedule is made."""
    try:
        ask(Schedule("broken", stages, microbatches, rows))
    except ScheduleError as error:
        assert "rank" in str(error) or "missing" in str(error), "a refusal says where"
        return False
    return True


def test_what_can_run_and_only_that_is_accepted():
    verdicts = Counter()
    for seed in SEEDS:
        story, *case = broken_schedule(seed)
        truth, blocking = can_run(*case), can_run_blocking(*case)
        verdicts[truth, blocking] += 1
        for transport in ("posted", "batched", "even_odd", "blocking"):
            wanted = blocking if transport == "blocking" else truth
            given = _accepted(*case, lambda schedule, t=transport: verify(schedule, t))
            assert given == wanted, f"{story}: {transport}, the judge says {wanted}"
        assert _accepted(*case, simulate) == truth, story
    assert verdicts.total() == 1000
    assert verdicts[False, False] > 600, verdicts  # most are broken beyond any transport
    assert verdicts[True, False] > 200 and verdicts[True, True] > 100, verdicts


def test_the_judge_accepts_what_the_builders_make():
    for builder in BASES.values():
        for schedule in builder():
            rows = [list(map(str, schedule.actions(rank))) for rank in range(schedule.pp)]
            assert can_run(rows, schedule.num_stages, schedule.num_microbatches)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0F0 0B0 | 1F0", "a missing backward leaves an activation and the first stage waits"),
        ("0F0 0B0 | 1B0 1F0", "the backward is before its forward"),
        ("0F0 0F0 0B0 | 1F0 1B0", "twice the same forward"),
        ("0F0 1B0 | 1F0 0B0", "a stage on two ranks"),
        ("0F0 0I0 | 1F0 1B0", "no weight gradient"),
        ("0F0 0B0 0F1 0B1 | 1F0 1F1 1B0 1B1", "a circle"),
    ],
)
def test_the_judge_refuses(text, why):
    rows = [row.split() for row in text.split("|")]
    assert not can_run(rows, 2, 2 if "0F1" in text else 1), why


def test_the_judge_of_blocking_transfers_knows_gpipe_and_1f1b():
    gpipe = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    one_f_one_b = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    crossed = [["0F0", "0F1", "0B1", "0B0"], ["1F1", "1F0", "1B1", "1B0"]]
    assert [can_run(rows, 2, 2) for rows in (gpipe, one_f_one_b, crossed)] == [True] * 3
    assert [can_run_blocking(rows, 2, 2) for rows in (gpipe, one_f_one_b, crossed)] == [True, False, False]
