"""Every builder's schedule on real ranks: the row in order, losses and gradients of one process, memory."""

import pytest
import torch
from pipeline_stages import SHAPE, H, Stage, forward_step, microbatches
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from labkit.config import ParallelConfig
from labkit.events import recording
from labkit.parallel import initialize_model_parallel, single_process_groups
from labkit.parallel.layers import ColumnParallelLinear
from labkit.schedules import (
    PipelineRuntime,
    dualpipe_v,
    gpipe,
    interleaved,
    one_f_one_b,
    simulate,
    zbv,
    zero_bubble_h1,
)


def _interleaved_by(vpp, group_size=None):
    return lambda pp, count: interleaved(pp, vpp, count, group_size)


BUILDERS = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved v2": _interleaved_by(2),
    "interleaved v3 by 5": _interleaved_by(3, 5),
    "interleaved v2 all warm-up": lambda pp, count: interleaved(pp, 2, count, all_warmup=True),
    "zero_bubble_h1": zero_bubble_h1,
    "zbv": zbv,
    "dualpipe_v": dualpipe_v,
}
TRANSPORTS = ("posted", "batched", "even_odd")
COUNT = 9


class LabkitStage(nn.Module):
    """gelu(linear(x)) with labkit's linear layer, whose weight gradient waits for W."""

    def __init__(self, stage):
        super().__init__()
        group = single_process_groups().tp
        self.linear = ColumnParallelLinear(f"stages.{stage}", H, H, group=group, std=0.5, dtype=torch.float64)
        self.x = None

    def set_input_tensor(self, x):
        self.x = x

    def forward(self, x=None):
        taken, self.x = self.x, None
        return nn.functional.gelu(self.linear(x if taken is None else taken)[0])


def _build(name, pp):
    """Nine microbatches are the 5 + 4 of groups of five; groups of pp and DualPipeV take eight, all warm-up pp."""
    if "all warm-up" in name:
        return BUILDERS[name](pp, pp)
    uneven = name == "interleaved v2" and COUNT % pp
    return BUILDERS[name](pp, 8 if uneven or name == "dualpipe_v" else COUNT)


def _reference(stages, count):
    layers = [LabkitStage(stage) for stage in range(stages)]
    whole, losses = nn.Sequential(*layers), []
    for item in microbatches(count):
        output, loss_func = forward_step(iter([item]), whole)
        loss, report = loss_func(output)
        (loss / count).backward()
        losses.append(report["loss"])
    return losses, [[p.grad for p in layer.parameters()] for layer in layers]


def _run(name, transport):
    """(losses, gradients by stage, names and kinds of the actions' Events, losses forward only)."""
    groups = initialize_model_parallel(ParallelConfig(pp=torch.distributed.get_world_size()))
    schedule = _build(name, groups.pp.size)
    chunks = {stage: LabkitStage(stage) for stage in schedule.stages_of(groups.pp.rank)}
    how = {"forward_step_func": forward_step, "tensor_shape": SHAPE, "transport": transport}
    runtime = PipelineRuntime(schedule, list(chunks.values()), groups, **how)
    data = lambda: [iter(microbatches(schedule.num_microbatches)) for _ in chunks]  # noqa: E731
    with recording(groups.rank) as recorder:
        reports = runtime.run(data())
    ran = [(e.name, e.kind, e.chunk) for e in recorder.events if e.microbatch is not None]
    gradients = {stage: [p.grad.clone() for p in chunk.parameters()] for stage, chunk in chunks.items()}
    evaluated = runtime.run(data(), forward_only=True)
    return [r["loss"] for r in reports], gradients, ran, [r["loss"] for r in evaluated]


KINDS = {"F": "forward", "B": "backward", "I": "input_grad", "W": "weight_grad"}


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", BUILDERS)
def test_the_row_runs_in_order_and_equals_one_process(name, transport, pp, on_ranks):
    schedule = _build(name, pp)
    losses, gradients = _reference(schedule.num_stages, schedule.num_microbatches)
    home = schedule.placement(schedule.num_stages - 1)
    for rank, (found, by_stage, ran, evaluated) in enumerate(on_ranks(_run, pp, name, transport)):
        stages = schedule.stages_of(rank)
        wanted = [(str(a), KINDS[a.kind], stages.index(a.stage)) for a in schedule.actions(rank)]
        assert ran == wanted
        expected = pytest.approx(losses, rel=1e-12) if rank == home else []
        assert found == expected
        assert evaluated == expected
        assert sorted(by_stage) == stages
        for stage in stages:
            for a, b in zip(by_stage[stage], gradients[stage], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def _peak(name):
    """Most stage inputs alive at once on this rank, counted in each forward; those alive after the run.

    An input is what labkit's linear saved for its weight gradient, so it has to live until B or W.
    """
    groups = initialize_model_parallel(ParallelConfig(pp=torch.distributed.get_world_size()))
    schedule = _build(name, groups.pp.size)
    inputs, peak = [], 0

    class Watched(LabkitStage):
        def forward(self, x=None):
            nonlocal peak
            taken, self.x = self.x, None
            x = (x if taken is None else taken).clone()  # saved by the linear layer, and known to nobody else
            inputs.append(StorageWeakRef(x.untyped_storage()))
            output = nn.functional.gelu(self.linear(x)[0])
            peak = max(peak, sum(not storage.expired() for storage in inputs))
            return output

    chunks = [Watched(stage) for stage in schedule.stages_of(groups.pp.rank)]
    runtime = PipelineRuntime(schedule, chunks, groups, forward_step_func=forward_step, tensor_shape=SHAPE)
    runtime.run([iter(microbatches(schedule.num_microbatches)) for _ in chunks])
    return peak, sum(not storage.expired() for storage in inputs), len(inputs)


@pytest.mark.parametrize("name", BUILDERS)
def test_activations_live_until_b_or_w_and_no_longer(name, on_ranks):
    schedule = _build(name, 4)
    predicted = simulate(schedule).peak_in_flight
    total = [len(schedule.stages_of(rank)) * schedule.num_microbatches for rank in range(4)]
    assert on_ranks(_peak, 4, name) == [(peak, 0, count) for peak, count in zip(predicted, total, strict=True)]


def _no_sync_log(name):
    """When each chunk may synchronise: the actions it ran inside and outside of no_sync."""
    from contextlib import contextmanager

    groups = initialize_model_parallel(ParallelConfig(pp=torch.distributed.get_world_size()))
    schedule = _build(name, groups.pp.size)
    chunks = [Stage(stage) for stage in schedule.stages_of(groups.pp.rank)]
    left: list[list[int]] = [[] for _ in chunks]

    def context_of(chunk):
        @contextmanager
        def no_sync():
            yield
            left[chunk].append(len(recorder.events))

        return no_sync

    how = {"forward_step_func": forward_step, "tensor_shape": SHAPE, "dtype": torch.float64}
    contexts = [context_of(chunk) for chunk in range(len(chunks))]
    runtime = PipelineRuntime(schedule, chunks, groups, no_sync_func=contexts, **how)
    with recording(groups.rank) as recorder:
        runtime.run([iter(microbatches(schedule.num_microbatches)) for _ in chunks])
    ran = [[e for e in recorder.events[:end] if e.kind in KINDS.values()] for (end,) in left]
    return [(len(before), [e.name for e in before if e.chunk == chunk]) for chunk, before in enumerate(ran)]


@pytest.mark.parametrize("name", BUILDERS)
def test_no_sync_is_left_for_the_last_backward_of_a_chunk(name, on_ranks):
    """The last W where the backward is split; what the chunk ran before is all but that one action."""
    schedule = _build(name, 4)
    for rank, chunks in enumerate(on_ranks(_no_sync_log, 4, name)):
        actions = schedule.actions(rank)
        for stage, (_, before) in zip(schedule.stages_of(rank), chunks, strict=True):
            own = [str(a) for a in actions if a.stage == stage]
            last = max(i for i, a in enumerate(own) if a[len(str(stage))] in "BW")
            assert before == own[:last]
