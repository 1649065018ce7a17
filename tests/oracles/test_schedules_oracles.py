"""GPipe and 1F1B against torch.distributed.pipelining (orders, losses, gradients) and megatron-core (warm-up)."""

import sys
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
from pipeline_stages import Stage, microbatches, run_stages

from labkit.launch import run
from labkit.schedules import Action, gpipe, one_f_one_b

pytestmark = pytest.mark.oracle


def _torch_orders(name, pp, count):
    """torch's own listing per rank, idle cells and gradient reductions dropped.

    One repair: in torch 2.13 the last rank's listing of 1F1B (not its execution) numbers its forwards from 1.
    """
    from torch.distributed.pipelining import schedules as theirs

    listing = getattr(theirs, f"Schedule{name}").__new__(getattr(theirs, f"Schedule{name}"))
    listing._num_stages, listing._n_microbatches, listing.pp_group_size = pp, count, pp
    kinds = {theirs._ComputationType.FORWARD: "F", theirs._ComputationType.FULL_BACKWARD: "B"}
    rows = []
    for rank, actions in sorted(listing._get_pipeline_order().items()):
        kept = [a for a in actions if a is not None and a.computation_type in kinds]
        row = [Action(a.stage_index, kinds[a.computation_type], a.microbatch_index) for a in kept]
        if name == "1F1B" and rank == pp - 1:
            row = [replace(a, microbatch=a.microbatch - 1) if a.kind == "F" else a for a in row]
        rows.append(row)
    return rows


@pytest.mark.parametrize(("name", "builder"), [("GPipe", gpipe), ("1F1B", one_f_one_b)])
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_orders_equal_those_of_torch(name, builder, pp, extra):
    schedule = builder(pp, pp + extra)
    assert [schedule.actions(rank) for rank in range(pp)] == _torch_orders(name, pp, pp + extra)


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


def test_warmup_equals_megatron_core():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches

    for pp, count in ((2, 1), (4, 2), (4, 8), (8, 8), (8, 3)):
        parallel_state.set_pipeline_model_parallel_world_size(pp)
        for rank in range(pp):
            parallel_state.set_pipeline_model_parallel_rank(rank)
            kinds = [action.kind for action in one_f_one_b(pp, count).actions(rank)]
            # With no microbatch left for the steady phase the row is all forwards, then all backwards.
            turn = next(i for i, (a, b) in enumerate(pairwise([*kinds, "B"])) if (a, b) == ("F", "B")) + 1
            total, _, warmup, _ = get_pp_rank_microbatches(count, 1, None)
            assert turn - (warmup < total) == warmup
    parallel_state.set_pipeline_model_parallel_world_size(None)
    parallel_state.set_pipeline_model_parallel_rank(None)
