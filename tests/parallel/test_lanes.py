"""Lanes: what they leave out while nobody observes is there as soon as somebody does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from labkit.config import ParallelConfig
from labkit.events import observers, recording
from labkit.launch import status
from labkit.parallel import CommLedger, collectives, initialize_model_parallel, transport
from labkit.parallel.lanes import Lane
from labkit.parallel.payload import Format, start_receive, start_send
from labkit.schedules import PipelineRuntime, interleaved, one_f_one_b, zbv

SHAPE = (2, 3, 4)
FORM = Format[str](lambda name: (SHAPE,), lambda name: "forward", torch.float32, torch.device("cpu"), only_shape=SHAPE)


def message(rank, lane, x):
    """Rank 0 sends x, rank 1 returns what came."""
    (pending,) = start_send("x", (x,), FORM, lane) if rank == 0 else start_receive("x", FORM, lane)
    return pending.wait()


def exchanged():
    """On each of two ranks: what came, and what was seen, without observers, with a ledger, and with a recorder."""
    groups = initialize_model_parallel(ParallelConfig(pp=2))
    rank, x = groups.pp.rank, torch.arange(24.0).view(4, 3, 2).permute(2, 1, 0)  # not contiguous
    lane = Lane(groups.pp, 1 - rank, groups.device, torch.float32, SHAPE)
    waited, enter = [], status.StatusSlot.enter
    status.StatusSlot.enter = lambda self, text: (waited.append(text), enter(self, text))[1]
    came = [message(rank, lane, x)]
    with CommLedger() as ledger:
        came.append(message(rank, lane, x))
    with recording(rank) as recorder:
        came.append(message(rank, lane, x))
    came.append((collectives.isend if rank == 0 else collectives.irecv)(x.contiguous(), groups.pp, 1 - rank).wait())
    status.StatusSlot.enter = enter
    booked = [(record.operation, record.layer, record.phase, record.bytes) for record in ledger.records]
    return all(torch.equal(y, x) for y in came), waited, booked, [event.name for event in recorder.events]


def test_a_message_arrives_and_is_named_booked_and_recorded_for_whoever_observes(on_ranks):
    for operation, (equal, waited, booked, events) in zip(("send", "recv"), on_ranks(exchanged, 2), strict=True):
        assert equal
        assert waited == [f"{operation} pp #{number} (2, 3, 4) float32" for number in (1, 2, 3, 4)]  # one count for all
        assert booked == [(operation, "x", "forward", 96)]
        assert events == [f"wait {operation} pp", f"{operation} pp"]


def ways():
    """On each of two ranks: what a message is under way as, by who observes."""
    groups = initialize_model_parallel(ParallelConfig(pp=2))
    lane = Lane(groups.pp, 1 - groups.pp.rank, groups.device, torch.float32, SHAPE)

    def way():
        x = torch.zeros(SHAPE)
        (pending,) = start_send("x", (x,), FORM, lane) if groups.pp.rank == 0 else start_receive("x", FORM, lane)
        pending.wait()
        return type(pending).__name__

    with recording(0):
        recorded = way()
    with CommLedger():
        booked = way()
    return way(), recorded, booked, way()


def test_a_recorder_sees_a_message_end_and_needs_no_other_way(on_ranks):
    assert on_ranks(ways, 2) == [("OnLane", "OnLane", "Pending", "OnLane")] * 2


def nothing_sent():
    """On each of two ranks: what is said of a stage that returns no tensor."""
    group = initialize_model_parallel(ParallelConfig(pp=2)).pp
    with pytest.raises(ValueError) as error:
        start_send("x", (), FORM, Lane(group, 1 - group.rank, torch.device("cpu"), torch.float32, SHAPE))
    return str(error.value)


def test_a_stage_that_sends_nothing_is_refused(on_ranks):
    for message in on_ranks(nothing_sent, 2):
        assert "sends x as 0 tensors" in message


def which_are_plain():
    """On a rank: lanes of a process, of another device, of various shapes, and where gloo connects with the first
    message."""
    group = initialize_model_parallel(ParallelConfig(pp=2)).pp

    def is_plain(kind, shape=SHAPE):
        return Lane(group, 1 - group.rank, torch.device(kind), torch.float32, shape).is_plain

    found = [is_plain("cpu"), is_plain("cuda"), is_plain("cpu", None)]
    transport._LAZY = True
    try:
        return [*found, is_plain("cpu")]
    finally:
        transport._LAZY = False


def test_other_devices_and_lazy_connections_go_the_long_way(on_ranks):
    assert on_ranks(which_are_plain, 2) == [[True, False, False, False]] * 2


def refused_then_right():
    """On each of two ranks: what is said where the ranks disagree, and the losses of a right run on the same groups."""
    groups = initialize_model_parallel(ParallelConfig(pp=2))
    said = None
    for shape in ((9, 9, 9) if groups.pp.rank else SHAPE, SHAPE):
        runtime = PipelineRuntime(
            one_f_one_b(2, 4), Plain(4, 4), groups, forward_step_func=forward_step, tensor_shape=shape
        )
        try:
            reports = runtime.run(iter(torch.zeros(4, *SHAPE)))
        except ValueError as error:
            said = str(error)
    return said, len(reports)


def test_a_run_that_was_refused_leaves_no_receive_behind_that_takes_a_later_message(on_ranks):
    for rank, (said, reports) in enumerate(on_ranks(refused_then_right, 2)):
        assert "disagree on tensor_shape" in said
        assert reports == 4 * rank


LAZY = """
import sys

sys.path.insert(0, sys.argv[1])
from test_lanes import two_steps
from labkit.launch import run

if __name__ == "__main__":
    print([run(two_steps, 4, name, timeout=60) for name in ("one_f_one_b", "interleaved", "zbv")])
"""


def two_steps(name):
    """On each of four ranks: how many losses two first steps report."""
    groups = initialize_model_parallel(ParallelConfig(pp=4))
    schedule = {"one_f_one_b": one_f_one_b, "zbv": zbv}.get(name, lambda p, m: interleaved(p, 2, m))(4, 8)
    chunks = nn.ModuleList(Plain(4, 4) for _ in schedule.stages_of(groups.pp.rank))
    runtime = PipelineRuntime(schedule, chunks, groups, forward_step_func=forward_step, tensor_shape=SHAPE)
    return [len(runtime.run([iter(torch.zeros(8, *SHAPE)) for _ in chunks])) for _ in range(2)]


def test_first_steps_run_where_connections_are_made_by_the_first_message(tmp_path):
    """As NCCL's are: a receive that is opened before the other side can send would block both."""
    script = tmp_path / "lazy.py"
    script.write_text(LAZY)
    ran = subprocess.run(
        [sys.executable, script, Path(__file__).parent],
        env=os.environ | {"TORCH_GLOO_LAZY_INIT": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    none, all_of_them = [0, 0], [8, 8]
    last, first = [none, none, none, all_of_them], [all_of_them, none, none, none]
    assert (ran.returncode, ran.stdout) == (0, f"{[last, last, first]}\n"), ran.stderr


class Plain(nn.Linear):
    """A stage."""

    def set_input_tensor(self, x):
        self.x = x


def forward_step(data, stage):
    """The first stage reads its data."""
    x = next(data)
    return stage(getattr(stage, "x", x)), lambda output: (output.mean(), {})


def calls_between_actions():
    """On each rank: labkit's own functions called in a step, by action, once everything is warm."""
    groups = initialize_model_parallel(ParallelConfig(pp=2))
    chunk = Plain(4, 4)
    runtime = PipelineRuntime(
        one_f_one_b(2, 16),
        chunk,
        groups,
        forward_step_func=forward_step,
        tensor_shape=SHAPE,
    )
    for _ in range(2):
        runtime.run(iter(torch.zeros(16, *SHAPE)))
    count = 0

    def called(frame, event, argument):
        nonlocal count
        count += event == "call" and "/labkit/" in frame.f_code.co_filename

    sys.setprofile(called)
    runtime.run(iter(torch.zeros(16, *SHAPE)))
    sys.setprofile(None)
    assert not observers
    return count / 32


def test_an_action_calls_few_functions(on_ranks):
    """A rank that has just waited finds none of them in its caches: each costs several microseconds. (Seen: 18.)
    `benchmarks/pipeline_sleep.py` measures what they cost."""
    assert max(on_ranks(calls_between_actions, 2)) < 25
