"""NaN and infinity in a loss, a gradient or a weight of one rank: all ranks agree, none changes a weight, and the
parameter and the rank are named (row F9)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from labkit.config import RunConfig, presets
from labkit.launch import rank_info
from labkit.parallel.data_parallel.optimizer import named_parameters
from labkit.train import pretrain
from labkit.train.forward_step import gpt_forward_step

STEPS = 3
BAD = 1
"""Index of the step in which something goes wrong."""


def small(**changes: Any) -> RunConfig:
    shape = {"layers": 2, "hidden": 32, "heads": 4, "seq_length": 16, "global_batch_size": 4, "steps": STEPS}
    return presets.tiny().override(shape | {"record_events": False} | changes)


class Planter:
    """Writes `value` into one gradient or weight of one rank, and watches the weights of its own rank."""

    def __init__(self, kind: str, rank: int, name: str, value: float) -> None:
        self.kind, self.rank, self.name, self.value = kind, rank, name, value
        self.after: list[dict[str, Tensor]] = []

    def on_model(self, groups: Any, chunks: Sequence[nn.Module], schedule: Any) -> None:
        """Nothing to do."""

    def on_gradients(self, step: int, chunks: Sequence[nn.Module]) -> None:
        """After all reductions: only this rank can know."""
        if self.kind == "gradient":
            self._plant(step, chunks, lambda parameter: parameter.main_grad)

    def on_update(self, step: int, chunks: Sequence[nn.Module]) -> None:
        """Keep the weights; a bad weight is there from the next step on."""
        self.after.append({name: p.detach().clone() for name, p in named_parameters(chunks).items()})
        if self.kind == "parameter":
            self._plant(step + 1, chunks, lambda parameter: parameter.data)

    def _plant(self, step: int, chunks: Sequence[nn.Module], tensor_of: Any) -> None:
        if step == BAD and rank_info().rank == self.rank:
            tensor_of(named_parameters(chunks)[self.name]).view(-1)[-1] = self.value


def poisoned(rank: int, microbatch: int, *, microbatches: int, loss_too: bool) -> Any:
    """The default forward step, but for one microbatch of the bad step on one rank, whose gradient is not finite."""
    calls = iter(range(10_000))

    def forward_step(data_iterator: Any, model: nn.Module) -> Any:
        output, loss = gpt_forward_step(data_iterator, model)
        if rank_info().rank != rank or next(calls) != BAD * microbatches + microbatch:
            return output, loss
        if loss_too:
            return output, lambda loss_BS: loss(loss_BS * math.nan)
        return output, lambda loss_BS: loss(loss_BS + torch.sqrt(0.0 * loss_BS))  # the loss is finite, its slope is not

    return forward_step


def outcome(config: RunConfig, planter: Planter | None = None, forward_step: Any = None) -> dict[str, Any]:
    """What a rank saw: an error's message, or which steps changed its weights and what the metrics say."""
    planter = planter or Planter("nothing", -1, "", 0.0)
    try:
        result = pretrain(config, observer=planter, forward_step=forward_step)
    except FloatingPointError as error:
        return {"error": str(error), "weights": planter.after}
    changed = [
        any(not torch.equal(old[name], new[name]) for name in new)
        for old, new in zip(planter.after[:-1], planter.after[1:])
    ]
    return {
        "changed": changed,
        "skipped": result.skipped_steps,
        "because": [line.get("skipped_because") for line in result.metrics],
        "counts": [line["skipped_steps"] for line in result.metrics],
        "losses": result.losses,
        "rates": [line["learning_rate"] for line in result.metrics],
    }


def check_skipped(results: list[dict[str, Any]], parameter: str, rank: int) -> None:
    """Every rank left out the bad step and no other, and gives the same reason."""
    for result in results:
        assert "error" not in result, result
        assert result["changed"] == [False, True], "the bad step changed a weight, or the good one after it did not"
        assert (result["skipped"], result["counts"]) == (1, [0, 1, 1])
        assert result["because"] == results[0]["because"]
        assert result["losses"] == results[0]["losses"]
        assert result["rates"][1] == result["rates"][2], "a skipped step uses up nothing of the schedule"
    reason = results[0]["because"]
    assert reason[0] is None and reason[2] is None
    assert re.match(rf"the gradient of {re.escape(parameter)} is not finite on rank {rank} \(", reason[1]), reason[1]


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"tp": 2}),
    (2, {"data_parallel": "naive"}),
    (2, {"bucket_size": 10_000}),
    (4, {"cp": 2, "pp": 2}),
    (8, {"tp": 2, "pp": 2, "precision": "fp16"}),
]


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=lambda value: str(value))
def test_one_bad_gradient_on_one_rank_stops_the_step_everywhere(on_ranks, world_size: int, layout: dict) -> None:
    """The last rank is the second of every axis: a replica, and one that counts nothing in the norm but its shards."""
    rank = world_size - 1
    planter = Planter("gradient", rank, "layers.1.mlp.fc2.bias", math.nan)
    results = on_ranks(outcome, world_size, small(on_not_finite="skip", **layout), planter)
    check_skipped(results, "layers.1.mlp.fc2.bias", rank)
    assert "1 NaN of 32" in results[0]["because"][1]


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS[:4], ids=lambda value: str(value))
def test_one_bad_gradient_on_one_rank_ends_the_run_everywhere(on_ranks, world_size: int, layout: dict) -> None:
    """The default. The error names the step, the rank and the first bad tensor; the bad step changes no weight."""
    rank = world_size - 1
    planter = Planter("gradient", rank, "layers.1.mlp.fc2.bias", math.nan)
    results = on_ranks(outcome, world_size, small(check_for_nan_in_grad=False, **layout), planter)
    assert len({result["error"] for result in results}) == 1
    named = f"the gradient of layers.1.mlp.fc2.bias is not finite on rank {rank} ("
    step = f"step {BAD + 1} (learning rate 0.00075)"
    assert results[0]["error"].startswith(f"a gradient is not finite at {step}: {named}")
    assert "train.on_not_finite = skip" in results[0]["error"] and "loss scale" not in results[0]["error"]
    assert all(len(result["weights"]) == BAD for result in results), "no update after the bad gradient"


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rank=st.integers(0, 3),
    name=st.sampled_from(["layers.0.attention.qkv.weight", "embedding.word.weight", "layers.1.mlp.norm.weight"]),
    value=st.sampled_from([math.nan, math.inf, -math.inf]),
)
def test_wherever_it_is_planted_all_ranks_agree(on_ranks, rank: int, name: str, value: float) -> None:
    results = on_ranks(outcome, 4, small(tp=2, on_not_finite="skip"), Planter("gradient", rank, name, value))
    check_skipped(results, name, rank)


def bad_slope(config: RunConfig, rank: int) -> dict[str, Any]:
    return outcome(config, forward_step=poisoned(rank, 1, microbatches=2, loss_too=False))


@pytest.mark.parametrize(
    "how",
    [{"data_parallel": "naive"}, {"bucket_size": 9000}, {"bucket_size": 9000, "distributed_optimizer": True}],
    ids=["naive", "buckets", "distributed optimizer"],
)
def test_the_replica_it_came_from_is_named_and_not_those_that_received_it(on_ranks, how: dict) -> None:
    """All gradients are NaN on rank 1, and by the reduction on all ranks: the one nearest to the loss is named."""
    results = on_ranks(bad_slope, 4, small(global_batch_size=8, on_not_finite="skip", **how), 1)
    check_skipped(results, "final_norm.bias", 1)
    assert "on rank 0" not in results[0]["because"][1] and "on rank 2" not in results[0]["because"][1]


def bad_loss(config: RunConfig, rank: int) -> dict[str, Any]:
    return outcome(config, forward_step=poisoned(rank, 2, microbatches=4, loss_too=True))


@pytest.mark.parametrize(("layout", "rank"), [({"tp": 2}, 1), ({"pp": 2}, 1)], ids=str)
def test_one_bad_loss_on_one_rank_ends_the_run_on_all(on_ranks, layout: dict, rank: int) -> None:
    """Under tp each rank computes the loss, and only one of them has it wrong."""
    results = on_ranks(bad_loss, 2, small(**layout), rank)
    assert len({result["error"] for result in results}) == 1
    assert f"the loss of microbatch 2 is not finite on rank {rank}" in results[0]["error"]
    assert f"at step {BAD + 1} " in results[0]["error"]
    assert all(len(result["weights"]) == BAD for result in results), "no update after the bad loss"


@pytest.mark.parametrize(("layout", "rank"), [({"tp": 2}, 1), ({"pp": 2}, 1)], ids=str)
def test_one_bad_loss_on_one_rank_may_skip_the_step_on_all(on_ranks, layout: dict, rank: int) -> None:
    results = on_ranks(bad_loss, 2, small(on_not_finite="skip", **layout), rank)
    for result in results:
        assert result["changed"] == [False, True] and result["counts"] == [0, 1, 1]
        assert [math.isfinite(loss) for loss in result["losses"]][::2] == [True, True]
        assert result["because"] == [None, results[0]["because"][1], None]
        assert result["because"][1].startswith(f"the loss of microbatch 2 is not finite on rank {rank}")


def only_bad_losses(config: RunConfig) -> dict[str, Any]:
    def forward_step(data_iterator: Any, model: nn.Module) -> Any:
        output, loss = gpt_forward_step(data_iterator, model)
        return output, lambda loss_BS: loss(loss_BS * math.nan)

    return outcome(config, forward_step=forward_step)


def test_losses_that_never_are_finite_end_the_run(on_ranks) -> None:
    results = on_ranks(only_bad_losses, 2, small(steps=20, on_not_finite="skip"))
    assert len({result["error"] for result in results}) == 1
    assert "10 steps in a row were skipped, the last being step 10, because the loss of" in results[0]["error"]


@pytest.mark.parametrize("word", ["stop", "skip"])
def test_a_bad_weight_ends_the_run_and_is_named_before_the_losses_it_spoils(on_ranks, word: str) -> None:
    planter = Planter("parameter", 0, "layers.0.mlp.fc1.weight", math.inf)
    results = on_ranks(outcome, 2, small(pp=2, on_not_finite=word), planter)
    assert len({result["error"] for result in results}) == 1
    named = "parameter layers.0.mlp.fc1.weight is not finite on rank 0 (pp 0): 1 infinite of 4096"
    assert named in results[0]["error"]


def hopeless(config: RunConfig) -> dict[str, Any]:
    def forward_step(data_iterator: Any, model: nn.Module) -> Any:
        output, loss = gpt_forward_step(data_iterator, model)
        return output, lambda loss_BS: loss(loss_BS + torch.sqrt(0.0 * loss_BS))

    return outcome(config, forward_step=forward_step)


@pytest.mark.parametrize(
    "changes", [{"on_not_finite": "skip"}, {"precision": "fp16", "initial_loss_scale": 2.0}], ids=["fp32", "fp16"]
)
def test_a_gradient_that_never_is_finite_ends_the_run(on_ranks, changes: dict) -> None:
    """fp16 first lowers its scale to the minimum: one step of patience, one that lowers, then ten in vain."""
    results = on_ranks(hopeless, 2, small(steps=20, **changes))
    assert len({result["error"] for result in results}) == 1
    last = 10 + (2 if "precision" in changes else 0)
    assert f"10 steps in a row were skipped, the last being step {last}, because the gradient of" in results[0]["error"]
    first = results[0]["weights"][0]
    assert all(torch.equal(first[name], later[name]) for later in results[0]["weights"] for name in first)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("skip", "10 steps in a row were skipped, the last being step 10, because the gradient of"),
        ("stop", "a gradient is not finite at step 1 (learning rate 0.001): the gradient of"),
    ],
)
def test_a_constant_scale_that_is_too_large_ends_the_run_and_is_named(on_ranks, word: str, said: str) -> None:
    config = small(steps=20, precision="fp16", loss_scale=2.0**40, on_not_finite=word)
    results = on_ranks(outcome, 2, config)
    assert len({result["error"] for result in results}) == 1
    error = results[0]["error"]
    assert said in error
    assert error.endswith("optim.loss_scale = 1.099511628e+12 may be too large for fp16: lower it, or set it to null "
                          "for a scale that adapts")  # fmt: skip


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(1, {}), (4, {"tp": 2, "pp": 2}), (2, {"distributed_optimizer": True})],
    ids=str,
)
def test_fp16_skips_until_its_scale_fits_and_then_learns(on_ranks, world_size: int, layout: dict) -> None:
    steps = 14
    changes = {"precision": "fp16", "initial_loss_scale": 2.0**24, "hysteresis": 1, "loss_scale_window": 1000}
    results = on_ranks(outcome, world_size, small(steps=steps, lr=1e-3, **changes, **layout))
    counts = results[0]["counts"]
    assert counts[:3] == [1, 2, 3] and 3 <= counts[-1] < steps - 3
    for result in results:
        assert result["counts"] == counts
        assert result["losses"] == results[0]["losses"]
        assert result["changed"] == [later == earlier for earlier, later in pairwise(counts)]
    assert results[0]["losses"][-1] < results[0]["losses"][0] - 0.01
    if "distributed_optimizer" in layout:  # what the last good step left to gather survives the steps that are skipped
        overlapped = small(steps=steps, lr=1e-3, overlap_param_gather=True, **changes, **layout)
        assert on_ranks(outcome, world_size, overlapped)[0]["losses"] == results[0]["losses"]


def norms(config: RunConfig) -> tuple[list[float], list[float]]:
    result = pretrain(config)
    return result.losses, [line["grad_norm"] for line in result.metrics]


@pytest.mark.parametrize("changes", [{"loss_scale": 1024.0}, {"initial_loss_scale": 64.0, "loss_scale_window": 1}])
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2, "calculate_per_token_loss": True}], ids=str)
def test_fp16_trains_like_fp32_whatever_the_scale(on_ranks, changes: dict, layout: dict) -> None:
    """The same losses and gradient norms to fp16's 2^-11, at a constant scale and at one that doubles every step.

    Adam's epsilon is larger than the gradients: with a small one a gradient times any factor gives the same update.
    """
    run = {"steps": 4, "eps": 0.1, "lr": 1e-2}
    losses, gradients = norms(small(**run))
    for found in on_ranks(norms, 2, small(**run, precision="fp16", **changes, **layout)):
        assert found[0] == pytest.approx(losses, rel=2e-4)
        assert found[1] == pytest.approx(gradients, rel=5e-3)
