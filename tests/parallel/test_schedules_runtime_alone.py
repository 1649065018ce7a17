"""The runtime in a process without a launcher, and what it records there."""

import pytest
from pipeline_stages import Stage, forward_step, microbatches, reference

from labkit.events import active_recorder, recording
from labkit.parallel import single_process_groups
from labkit.schedules import PipelineRuntime, execution, one_f_one_b


def _alone():
    made = PipelineRuntime(one_f_one_b(1, 2), Stage(0), single_process_groups(), forward_step_func=forward_step)
    return made.run(iter(microbatches(2)))


def test_a_plain_process_needs_no_launcher():
    assert [r["loss"] for r in _alone()] == pytest.approx(reference(1, 2)[0], rel=1e-12)


def test_recording_is_off_by_default(monkeypatch):
    """No step opens an event before somebody records, nor after."""
    opened, really = [], execution.span

    def span(name, *args, **kwargs):
        opened.append(name)
        return really(name, *args, **kwargs)

    monkeypatch.setattr(execution, "span", span)
    _alone()
    assert opened == [] and active_recorder() is None
    with recording(0) as recorder:
        _alone()
    assert [e.name for e in recorder.events] == opened == ["0F0", "0B0", "0F1", "0B1"]
    _alone()
    assert len(recorder.events) == len(opened) == 4
