"""`optim.calculate_per_token_loss`: the gradient of sum(loss) / sum(tokens) over the global batch, in every layout.

Microbatches and ranks count different numbers of tokens, so the mean of means is another number. The reference divides
in another way: one process, one microbatch that holds the whole global batch, and the usual mean of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from labkit.config import ParallelConfig, RunConfig, presets
from labkit.launch import RankError
from labkit.parallel import NaiveDataParallel, finalize_model_grads, initialize_model_parallel
from labkit.train import pretrain
from labkit.train.forward_step import gpt_forward_step

BATCH = 8


def small(**changes: Any) -> RunConfig:
    shape = {"layers": 4, "hidden": 32, "heads": 4, "seq_length": 16, "global_batch_size": BATCH, "steps": 2}
    return presets.tiny().override(
        shape | {"record_events": False, "precision": "fp64", "eps": 1e-5, "lr": 1e-3} | changes
    )


def uneven(data_iterator: Iterator[dict[str, torch.Tensor]], model: nn.Module) -> Any:
    """Counts a position by its label alone, so that every layout counts the same ones: about two of five."""
    batch = next(data_iterator)
    counted = batch["labels_BS"] % 5 < 2
    return gpt_forward_step(iter([batch | {"loss_mask_BS": counted.float()}]), model)


def trained(config: RunConfig) -> tuple[list[float], list[float]]:
    result = pretrain(config, forward_step=uneven)
    return result.losses, [line["grad_norm"] for line in result.metrics]


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"data_parallel": "naive"}),
    (2, {"tp": 2, "sequence_parallel": True}),
    (4, {"pp": 2, "schedule.name": "zbv"}),
    (4, {"pp": 2, "bucket_size": 9000}),
    (4, {"distributed_optimizer": True, "overlap_param_gather": True}),
    (4, {"cp": 2, "distributed_optimizer": True}),
]


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=str)
def test_it_is_the_mean_over_all_tokens_of_the_global_batch(on_ranks, world_size: int, layout: dict) -> None:
    losses, norms = trained(small(micro_batch_size=BATCH))
    for found in on_ranks(trained, world_size, small(calculate_per_token_loss=True, **layout)):
        assert found[0] == pytest.approx(losses, rel=1e-10)
        assert found[1] == pytest.approx(norms, rel=1e-9)


def test_a_mean_of_means_is_something_else_here_and_a_run_repeats_bit_by_bit(on_ranks) -> None:
    losses, norms = trained(small(micro_batch_size=BATCH))
    of_means = on_ranks(trained, 2, small())[0]
    assert of_means[0][0] == pytest.approx(losses[0], rel=1e-10), "the report is by token in either case"
    assert abs(of_means[1][0] / norms[0] - 1) > 1e-3
    config = small(calculate_per_token_loss=True)
    assert on_ranks(trained, 2, config) == on_ranks(trained, 2, config)


def mean_of_tokens(rows: list[list[float]], microbatches: int) -> float:
    """d/dw of sum(w x) / count at any w, rows dealt out over ranks and microbatches."""
    groups = initialize_model_parallel(ParallelConfig())
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    wrapped = NaiveDataParallel(model, groups.dp_cp, average=False)
    count = torch.zeros((), dtype=torch.int64)
    per_rank = rows[groups.dp.rank :: groups.dp.size]
    with wrapped.no_sync():
        for microbatch in range(microbatches):
            tokens = [x for row in per_rank[microbatch::microbatches] for x in row]
            if tokens:
                wrapped(torch.tensor(tokens, dtype=torch.float64).view(-1, 1)).sum().backward()
            count += len(tokens)
    finalize_model_grads([wrapped], groups, num_tokens=count)
    return model.weight.main_grad.item()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.lists(st.floats(-8, 8), max_size=5), min_size=1, max_size=8), microbatches=st.integers(1, 3))
def test_however_tokens_are_dealt_out(on_ranks, rows: list[list[float]], microbatches: int) -> None:
    """Also where a rank, or all of them, have none."""
    tokens = [x for row in rows for x in row]
    for gradient in on_ranks(mean_of_tokens, 2, rows, microbatches):
        assert gradient == pytest.approx(sum(tokens) / max(1, len(tokens)), abs=1e-12)


def means(config: RunConfig) -> None:
    def forward_step(data_iterator: Any, model: nn.Module) -> Any:
        output, _ = gpt_forward_step(data_iterator, model)
        return output, lambda loss_BS: (loss_BS.mean(), {"loss_sum": loss_BS.sum(), "tokens": loss_BS.numel()})

    pretrain(config, forward_step=forward_step)


def test_a_loss_that_is_a_mean_already_is_refused(on_ranks) -> None:
    with pytest.raises(RankError, match=r"calculate_per_token_loss needs .* \(sum, tokens, metrics\)"):
        on_ranks(means, 2, small(calculate_per_token_loss=True))
