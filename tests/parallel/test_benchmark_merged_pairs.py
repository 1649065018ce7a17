"""The benchmark of merged pairs in tiny form: what the model says of waits, and that real all-to-alls are hidden."""

from __future__ import annotations

import merged_pairs
import pytest

from labkit.schedules import merged_one_f_one_b


def test_the_model_waits_for_what_runs_alone_and_for_what_is_too_long_for_its_part() -> None:
    schedule = merged_one_f_one_b(1, 4)  # a forward and a backward alone, and three pairs
    alone = 2 * 2 * 2 * 0.002  # two all-to-alls of each of two layers
    assert merged_pairs.modelled_waits(schedule, 2, 0.002, 0.010) == pytest.approx(alone)
    # combine and dispatch of the backward take 12 ms, and the forward hides 10 of them
    assert merged_pairs.modelled_waits(schedule, 2, 0.012, 0.010) == pytest.approx(6 * alone + 3 * 2 * 2 * 0.002)


def test_a_tiny_run_hides_all_to_alls() -> None:
    comparison, hidden, steps = merged_pairs.measure({}, 0.020, 0.010, repetitions=3, microbatches=4)
    assert comparison.rejected, "three steps are not quoted"
    assert hidden.transfer >= 0.009, "10 ms, of which a wait that begins late misses some"
    assert 0 < hidden.modelled < hidden.unmerged
    assert comparison.facts["hidden"] == round(hidden.share, 3) > 0, "how much, a busy machine decides"
    assert {event.name for event in steps[0][-1]} >= {"0F1 0 attention", "0B0 3 combine", "all_to_all ep"}


@pytest.mark.sweep
@pytest.mark.parametrize("case", merged_pairs.CASES, ids=str)
def test_pairs_hide_most_of_what_the_model_says_can_hide(case: dict[str, int]) -> None:
    _, hidden, _ = merged_pairs.measure(case, 0.060, 0.030, repetitions=5, microbatches=6)
    assert hidden.share >= 0.7
