"""Several stages a rank and split backwards against torch.distributed.pipelining: losses and gradients."""

import pytest
import torch
from pipeline_stages import Stage, microbatches, run_stages

from labkit.launch import run
from labkit.schedules import dualpipe_v, interleaved, zbv

pytestmark = pytest.mark.oracle

PAIRS = {
    "Interleaved1F1B": lambda pp, count: interleaved(pp, 2, count),
    "ZBVZeroBubble": zbv,
    "DualPipeV": dualpipe_v,
}


def _torch_step(name, schedule):
    """torch's runtime on the same stages, placement and data: losses by microbatch and gradients by stage."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining import schedules as theirs

    rank, stages, count = dist.get_rank(), schedule.num_stages, schedule.num_microbatches
    modules = {stage: Stage(stage) for stage in schedule.stages_of(rank)}
    held = [PipelineStage(module, stage, stages, torch.device("cpu")) for stage, module in modules.items()]
    loss_fn = lambda output, target: (output - target).square().mean()  # noqa: E731
    runtime = getattr(theirs, f"Schedule{name}")(held, count, loss_fn=loss_fn)
    x, target = (torch.cat(part) for part in zip(*microbatches(count), strict=True))
    losses: list = []
    last = {"target": target, "losses": losses} if stages - 1 in modules else {}
    runtime.step(*((x,) if 0 in modules else ()), **last)
    return [loss.item() for loss in losses], {s: [p.grad for p in m.parameters()] for s, m in modules.items()}


def _beside_torch(pp, count):
    schedules = {name: build(pp, count) for name, build in PAIRS.items()}
    return {name: (run_stages(schedule)[:2], _torch_step(name, schedule)) for name, schedule in schedules.items()}


@pytest.mark.parametrize("pp", [2, 4])
def test_losses_and_gradients_equal_those_of_torch(pp):
    compared, by_rank = 0, run(_beside_torch, pp, pp, 8)
    for (reports, mine), (losses, theirs) in (pair for pairs in by_rank for pair in pairs.values()):
        assert [report["loss"] for report in reports] == pytest.approx(losses, rel=1e-12)
        assert mine.keys() == theirs.keys()
        compared += len(losses)
        for stage, gradients in theirs.items():
            for a, b in zip(mine[stage], gradients, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)
    assert compared == len(PAIRS) * 8  # each on one rank, that of the last stage
