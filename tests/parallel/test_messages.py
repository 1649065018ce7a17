"""Messages between stages: seen by whoever observes, refused where they do not fit, safe where connections are lazy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from labkit.comm import collectives
from labkit.comm.p2p import MessageSpec, P2POp, start
from labkit.config import ParallelConfig
from labkit.events import recording
from labkit.launch import status
from labkit.parallel import CommLedger, initialize_model_parallel, p2p_communicator
from labkit.schedules import PipelineRuntime, interleaved, one_f_one_b, zbv

SHAPE = (2, 3, 4)
SPEC = MessageSpec((SHAPE,), torch.float32)


def message(p2p, x):
    """Rank 0 sends x, rank 1 returns what came."""
    rank = p2p.groups.pp.rank
    op = P2POp("recv" if rank else "send", 1 - rank, 0, () if rank else (x,), SPEC, "x", "forward")
    (work,) = start(p2p, [op])
    (came,) = work.wait() or (x,)
    return came


def exchanged():
    """On each of two ranks: what came, and what was seen, without observers, with a ledger, and with a recorder."""
    groups = initialize_model_parallel(ParallelConfig(pp=2))
    rank, x = groups.pp.rank, torch.arange(24.0).view(4, 3, 2).permute(2, 1, 0)  # not contiguous
    p2p = p2p_communicator(groups, batch_p2p_comm=False)
    waited, enter = [], status.StatusSlot.enter
    status.StatusSlot.enter = lambda self, text: (waited.append(text), enter(self, text))[1]
    came = [message(p2p, x)]
    with CommLedger() as ledger:
        came.append(message(p2p, x))
    with recording(rank) as recorder:
        came.append(message(p2p, x))
    came.append((collectives.isend if rank == 0 else collectives.irecv)(x.contiguous(), groups.pp, 1 - rank).wait())
    status.StatusSlot.enter = enter
    booked = [(record.operation, record.layer, record.phase, record.bytes) for record in ledger.records]
    return all(torch.equal(y, x) for y in came), waited, booked, [event.name for event in recorder.events]


def test_a_message_arrives_and_is_named_booked_and_recorded_for_whoever_observes(on_ranks):
    for operation, (equal, waited, booked, events) in zip(("send", "recv"), on_ranks(exchanged, 2), strict=True):
        assert equal
        labels = [f"{operation} pp #{number} (2, 3, 4) float32" for number in (1, 2, 3, 4)]  # one count for all
        assert list(dict.fromkeys(waited)) == labels  # a watched call is named at its start, too
        assert booked == [(operation, "x", "forward", 96)]
        assert events == [f"wait {operation} pp", f"{operation} pp"]


def refused_sends():
    """On each of two ranks: what is said of a stage that sends no tensor, one of another type, and one of two sizes."""
    groups = initialize_model_parallel(ParallelConfig(pp=2))
    said = []
    for tensors, varies in (
        ((), False),
        ((torch.zeros(SHAPE, dtype=torch.float64),), False),
        ((torch.zeros(2, 2),), True),
    ):
        op = P2POp("send", 1 - groups.pp.rank, 0, tensors, SPEC, "x")
        with pytest.raises(ValueError) as error:
            start(p2p_communicator(groups, variable_seq_lengths=varies), [op])
        said.append(str(error.value))
    return said


def test_a_stage_that_sends_what_nobody_expects_is_refused(on_ranks):
    for none, other_type, two_sizes in on_ranks(refused_sends, 2):
        assert "sends x as 0 tensors" in none
        assert "x is torch.float64, but the pipeline's dtype is torch.float32" in other_type
        assert "three sizes (S, B, H); this tensor has shape (2, 2)" in two_sizes


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
from test_messages import two_steps
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
