"""GPipe and 1F1B against torch.distributed.pipelining: losses and gradients."""

import pytest
import torch
from pipeline_stages import Stage, microbatches, run_stages

from labkit.launch import run
from labkit.schedules import gpipe, one_f_one_b

pytestmark = pytest.mark.oracle


def _torch_step(name, pp, count):
    """torch's runtime on the same stages and data: losses by microbatch and gradients."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining import schedules as theirs

    rank = dist.get_rank()
    module = Stage(rank)
    stage = PipelineStage(module, rank, pp, torch.device("cpu"))
    loss_fn = lambda output, target: (output - target).square().mean()  # noqa: E731
    schedule = getattr(theirs, f"Schedule{name}")(stage, count, loss_fn=loss_fn)
    data = microbatches(count)
    x, target = (torch.cat(part) for part in zip(*data, strict=True))
    losses: list = []
    if rank == 0:
        schedule.step(x)
    elif rank == pp - 1:
        schedule.step(target=target, losses=losses)
    else:
        schedule.step()
    return [loss.item() for loss in losses], {rank: [p.grad for p in module.parameters()]}


def _beside_torch():
    pairs = (("GPipe", gpipe), ("1F1B", one_f_one_b))
    return [(run_stages(builder(4, 6))[:2], _torch_step(name, 4, 6)) for name, builder in pairs]


def test_losses_and_gradients_equal_those_of_torch():
    by_rank = run(_beside_torch, 4)
    for number in range(2):
        ours, theirs = zip(*(results[number] for results in by_rank), strict=True)
        assert [report["loss"] for report in ours[-1][0]] == pytest.approx(theirs[-1][0], rel=1e-12)
        for rank in range(4):
            for a, b in zip(ours[rank][1][rank], theirs[rank][1][rank], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)
