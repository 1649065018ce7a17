"""Row F3: a rank that stands still is reported within a second after the limit, with rank, collective and stack."""

import time

import pytest
from patience import on_this_machine
from step_faults import Plant, holds_the_gil, is_stopped, loader_sleeps, planted_run
from survival_runs import TINY

from labkit.launch import RankError, forkserver, run

LIMIT = 1.5
"""Seconds that a rank may wait for another."""
FAULTS = {is_stopped: "stopped by a signal", holds_the_gil: "at holds_the_gil", loader_sleeps: "at loader_sleeps"}
"""Fault -> the words of the report about the rank at fault."""


def stand_still(tally, told, layout: dict, rank: int, fault) -> None:
    """Let the rank stand still in a forward pass, and read the report."""
    with pytest.raises(RankError) as error:
        run(planted_run, 2, TINY.override(layout), Plant(fault, rank, str(told)), timeout=LIMIT)
    took = time.monotonic() - float((told / "died").read_text().split()[0])
    text = str(error.value)
    assert (error.value.kind, error.value.ranks) == ("timeout", [rank]), text
    assert error.value.summary == f"rank {1 - rank} of 2 waited for rank {rank} longer than {LIMIT:g} s"
    assert f"rank {1 - rank}: waiting in {'all_reduce tp' if 'tp' in layout else 'recv'}" in text, "the last collective"
    assert FAULTS[fault] in text and "innermost call first" in text, text
    assert took < on_this_machine(LIMIT + 1), f"reported after {took:.2f} s"
    tally.saw("seconds until the report", took)


@pytest.mark.parametrize("attempts", [1, pytest.param(10, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_rank_that_stands_still_is_named(tally, tmp_path, fault, attempts):
    forkserver.ensure_running()
    counts = tally("F3", f"{fault.__name__.replace('_', ' ')}; limit {LIMIT:g} s")
    for number in range(attempts):
        with counts.attempt(f"{number}"):
            stand_still(counts, tmp_path, {"tp": 2} if number % 4 < 2 else {"pp": 2}, number % 2, fault)
