"""A real step's Events against its schedule: several stages a rank, split backwards, idle time accounted for."""

import pytest

from labkit.config import presets
from labkit.launch import run
from labkit.schedules import bubble_split, explain_gap, interleaved, simulate, zbv
from labkit.train import follows, pipeline_events, pretrain, stage_costs


@pytest.mark.parametrize(("name", "schedule"), [("interleaved", interleaved(2, 2, 4)), ("zbv", zbv(2, 4))])
def test_a_measured_step_is_split_and_compared_with_its_prediction(name, schedule):
    shape = {"layers": 4, "hidden": 32, "heads": 4, "seq_length": 16, "global_batch_size": 4, "steps": 3, "pp": 2}
    vpp = {"vpp": 2} if name == "interleaved" else {}
    results = run(pretrain, 2, presets.tiny().override(shape | vpp | {"schedule.name": name}))
    by_rank = [result.events for result in results]
    measured = pipeline_events(by_rank)
    assert follows(measured, schedule)

    split = bubble_split(measured, schedule)
    makespan = max(event.end for event in measured)
    busy = [sum(event.duration for event in measured if event.rank == rank) for rank in range(2)]
    assert split.idle.tolist() == pytest.approx([makespan - time for time in busy])
    assert min(split.total.values()) > -1e-9 * makespan  # one clock, and no action starts before what it needs

    costs = stage_costs([event for step in (0, 1) for event in pipeline_events(by_rank, step)], 4)
    table = costs.table(4)
    assert (table > 0).all()
    gap = explain_gap(simulate(schedule, costs), measured)
    assert gap.measured == pytest.approx(makespan)
    assert str(gap).startswith(f"the step took {makespan / gap.predicted:.2f} of the predicted time")
