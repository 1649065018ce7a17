"""Sleeping stages run their row through the real runtime, and each action takes at least its sleep."""

import pytest

from labkit.config import ParallelConfig
from labkit.models import sleep_through
from labkit.parallel import initialize_model_parallel, single_process_groups
from labkit.schedules import Costs, Schedule, one_f_one_b

LOOPED = Schedule.from_csv("0F0,0F1,2F0,2B0,2F1,2B1,0B0,0B1\n1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1", "looped")
SECONDS = {"F": 0.002, "B": 0.005}
COSTS = Costs(forward=0.002, input_grad=0.004, weight_grad=0.001)


def rank_body(schedule, transport):
    groups = initialize_model_parallel(ParallelConfig(pp=2))
    return sleep_through(groups, schedule, COSTS, transport=transport)


@pytest.mark.parametrize(
    ("schedule", "transport"),
    [(one_f_one_b(2, 3), "posted"), (one_f_one_b(2, 3), "batched"), (LOOPED, "posted")],
    ids=["1F1B posted", "1F1B batched", "looped posted"],
)
def test_events_are_the_row_and_no_shorter_than_the_sleeps(on_ranks, schedule, transport):
    for rank, events in enumerate(on_ranks(rank_body, 2, schedule, transport)):
        ran = [event for event in events if event.kind in ("forward", "backward")]
        assert [event.name for event in ran] == [str(action) for action in schedule.actions(rank)]
        assert all(event.duration >= SECONDS[event.name[1]] for event in ran)


def test_a_whole_backward_is_refused():
    with pytest.raises(ValueError, match="input_grad and then weight_grad"):
        sleep_through(single_process_groups(device="cpu"), one_f_one_b(1, 1), Costs(backward=0.1))
