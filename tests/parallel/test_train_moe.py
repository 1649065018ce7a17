"""Training with experts on several ranks: each part of the loop gives what it gives on one process.

The matrix of layouts is in test_moe_parity.py; here are the norm, the wrappers, biases, metrics and faults.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from labkit.cli import main
from labkit.config import RunConfig, presets
from labkit.launch import rank_info
from labkit.models.chunks import build_model_chunks
from labkit.moe.router import routers_of
from labkit.parallel import initialize_model_parallel
from labkit.parallel.data_parallel.distributed_data_parallel import wrap_model_chunks
from labkit.parallel.data_parallel.optimizer import named_parameters
from labkit.parallel.parameters.parameter_record import record_of
from labkit.train import pretrain

SHAPE = {"layers": 4, "hidden": 32, "heads": 4, "seq_length": 16, "global_batch_size": 8, "moe.ffn_hidden": 32,
         "steps": 2, "precision": "fp64", "record_events": False, "aux_loss_coeff": 1.0, "clip_grad": 0.5}  # fmt: skip
BIASED = {"score_function": "sigmoid", "expert_bias": True, "expert_bias_update_rate": 0.1,
          "shared_expert_ffn_hidden": 32, "shared_expert_gate": True}  # fmt: skip
SP = {"tp": 2, "sequence_parallel": True}
ZERO = {"distributed_optimizer": True, "overlap_param_gather": True, "bucket_size": 5_000}


def small(**changes: Any) -> RunConfig:
    return presets.tiny_moe().override(SHAPE | changes)


class Watcher:
    """The biases of this rank, step by step."""

    def __init__(self) -> None:
        self.biases: list[dict[str, list[float]]] = []

    def on_model(self, groups: Any, chunks: Sequence[nn.Module], schedule: Any) -> None:
        self.groups = groups

    def on_gradients(self, step: int, chunks: Sequence[nn.Module]) -> None:
        pass

    def on_update(self, step: int, chunks: Sequence[nn.Module]) -> None:
        pairs = [(router.name, router.expert_bias) for router in routers_of(chunks)]
        self.biases.append({name: bias.tolist() for name, bias in pairs if bias is not None})


def trained(config: RunConfig) -> tuple[list[dict[str, Any]], list[dict[str, list[float]]]]:
    watcher = Watcher()
    return pretrain(config, observer=watcher).metrics, watcher.biases


@cache
def alone(biased: bool) -> list[dict[str, Any]]:
    """The metrics of one process; every layout is held against them."""
    return trained(small(**(BIASED if biased else {})))[0]


COMPARED = ("loss", "grad_norm", "learning_rate")


def check_same(metrics: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for line, other in zip(metrics, expected, strict=True):
        names = [name for name in other if name in COMPARED or name.startswith("moe/")]
        assert names == [name for name in line if name in COMPARED or name.startswith("moe/")]
        for name in names:
            assert line[name] == pytest.approx(other[name], rel=1e-10), name


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"ep": 2}),
    (2, {**SP, "etp": 1, "ep": 2, "calculate_per_token_loss": True}),
    (2, {"pp": 2, "schedule.name": "zbv", "recompute_granularity": "full"}),
    (4, {"ep": 2, **ZERO}),
    (4, {"ep": 2, "num_distributed_optimizer_instances": 2, **ZERO}),
    (2, {"grouped_gemm": False, **ZERO}),
]
MORE: list[tuple[int, dict[str, Any]]] = [
    (2, {"cp": 2, "calculate_per_token_loss": True}),
    (2, {"pp": 2}),
    (2, {"pp": 2, "vpp": 2}),
    (2, {"ep": 2, "data_parallel": "naive"}),
    (4, {**SP, "ep": 2, "bucket_size": 5_000, "average_in_collective": True}),
    (4, {"etp": 2, "ep": 2, "dispatcher": "allgather"}),
    (4, {"pp": 2, "ep": 2, "schedule.name": "zero_bubble_h1", "distributed_optimizer": True}),
]
"""A sweep; the everyday matrix of parity has a relative of each."""


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [*LAYOUTS, *(pytest.param(*row, marks=pytest.mark.sweep) for row in MORE)],
    ids=str,
)
def test_metrics_are_those_of_one_process(on_ranks, world_size: int, layout: dict[str, Any]) -> None:
    """Loss, clipped norm, load of every expert of every layer and the routers' losses; the same on every rank."""
    results = on_ranks(trained, world_size, small(**layout))
    check_same(results[0][0], alone(biased=False))
    for metrics, _ in results:
        for line, other in zip(metrics, results[0][0], strict=True):
            assert {k: v for k, v in line.items() if k != "timers"} == {k: v for k, v in other.items() if k != "timers"}


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, {**SP, "etp": 1, "ep": 2, "shared_expert_overlap": True}),
        (4, {"cp": 2, "ep": 4, "recompute_granularity": "selective", "recompute_modules": ["moe"], **ZERO}),
        (2, {"ep": 2, "shared_expert_overlap": True, **ZERO, "bucket_size": 100}),
        (4, {"pp": 2, "schedule.name": "zbv", "ep": 2, "shared_expert_overlap": True, **ZERO}),
    ],
    ids=str,
)
def test_biases_are_those_of_one_process_on_every_rank(on_ranks, world_size: int, layout: dict[str, Any]) -> None:
    """Loads are added over tp x dp x cp: a bias that saw its own rank's tokens alone would differ between ranks."""
    results = on_ranks(trained, world_size, small(**BIASED, **layout))
    check_same(results[0][0], alone(biased=True))
    for step, line in enumerate(results[0][0]):
        held = [biases[step] for _, biases in results]
        assert sorted({name for names in held for name in names}) == ["layers.0.mlp.router", "layers.2.mlp.router"]
        for name, bias in (pair for names in held for pair in names.items()):
            assert bias == line[f"moe/{name.partition('.mlp')[0]}/expert_bias"]


@pytest.mark.sweep
def test_the_same_layout_twice_is_bit_equal(on_ranks) -> None:
    config = small(**BIASED, **SP, ep=2, etp=1)
    first, second = (on_ranks(trained, 2, config) for _ in range(2))
    for one, other in zip(first[0][0], second[0][0], strict=True):
        assert all(one[name] == other[name] for name in one if name in COMPARED or name.startswith("moe/"))


class Planter(Watcher):
    """Makes one value of a gradient of one rank NaN in the first step."""

    def __init__(self, rank: int, name: str, place: tuple[int, ...]) -> None:
        super().__init__()
        self.rank, self.name, self.place = rank, name, place

    def on_gradients(self, step: int, chunks: Sequence[nn.Module]) -> None:
        if step == 0 and rank_info().rank == self.rank:
            named_parameters(chunks)[self.name].main_grad[self.place] = math.nan  # type: ignore[attr-defined]


def skipped_because(config: RunConfig, planter: Planter) -> tuple[int, str, list[dict[str, list[float]]]]:
    result = pretrain(config, observer=planter)
    return result.skipped_steps, result.metrics[0]["skipped_because"], planter.biases


@pytest.mark.parametrize("wrapper", [{}, {"data_parallel": "naive"}], ids=["bucketed", "naive"])
def test_a_bad_gradient_of_an_expert_names_it_and_its_place(on_ranks, wrapper: dict[str, Any]) -> None:
    """Expert 5 is the second of rank 2's own, at the first replica: ep 2 of 4, edp alone."""
    planter = Planter(2, "layers.2.mlp.experts.fc1.weight", (1, 0, 0))
    config = small(ep=4, on_not_finite="skip", **BIASED, **wrapper)
    results = on_ranks(skipped_because, 4, config, planter)
    for count, reason, biases in results:
        assert count == 1
        assert reason == (
            "the gradient of layers.2.mlp.experts.fc1.weight of expert 5 is not finite on rank 2 (ep 2): "
            f"1 NaN of {2 * 32 * 32}"
        )
        assert not any(map(any, biases[0].values())), "a skipped step moves no bias"
        assert any(map(any, biases[1].values()))


def spoiled(config: RunConfig) -> list[str]:
    """Parameters whose gradient this rank may have spoiled, where rank 1 has a bad one of an expert before the sync."""
    groups = initialize_model_parallel(config.parallel)
    chunks = wrap_model_chunks(build_model_chunks(config, groups), groups, config.optim)
    chunks[0].zero_grad_buffer()
    for name, parameter in named_parameters(chunks).items():
        parameter.main_grad.fill_(math.nan if groups.rank == 1 and "experts.fc1" in name else 1.0)  # type: ignore[attr-defined]
        record_of(parameter).has_gradient = True
    chunks[0].finish_grad_sync()
    found = chunks[0].spoiled_before_reduction()
    assert found is not None
    return [name for name, p in named_parameters(chunks).items() if any(p is other for other in found)]


@pytest.mark.parametrize("wrapper", [{}, {"data_parallel": "naive"}], ids=["bucketed", "naive"])
def test_experts_without_replicas_receive_no_bad_gradient(on_ranks, wrapper: dict[str, Any]) -> None:
    """With edp 1 their buffer is not reduced: what is bad there is the rank's own. With replicas only the rank that
    brought it is named."""
    other, own = on_ranks(spoiled, 2, small(ep=2, **wrapper))
    assert all("experts" in name for name in other + own) and any("experts.fc1" in name for name in own)
    replicated = on_ranks(spoiled, 2, small(**wrapper))
    assert replicated[0] == [] and any("experts.fc1" in name for name in replicated[1])


def fp16(config: RunConfig) -> tuple[list[float], list[float]]:
    result = pretrain(config)
    return result.losses, [line["moe/load_balancing_loss"] for line in result.metrics]


def test_fp16_scales_the_routers_losses_with_the_loss(on_ranks) -> None:
    """A constant scale changes nothing but rounding; scaling the loss alone would leave the load where it was."""
    changes = {"precision": "fp16", "ep": 2, "steps": 6, "aux_loss_coeff": 0.3, "lr": 3e-3}
    losses, loads = on_ranks(fp16, 2, small(**changes, loss_scale=1024.0))[0]
    other_losses, other_loads = on_ranks(fp16, 2, small(**changes, loss_scale=64.0))[0]
    assert losses == pytest.approx(other_losses, rel=2e-3) and loads == pytest.approx(other_loads, rel=2e-2)


def test_the_command_line_trains_experts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--preset", "tiny_moe", "--layers", "2", "--hidden", "16", "--heads", "2", "--seq-length", "16",
             "--global-batch-size", "4", "--steps", "2", "--expert-model-parallel-size", "2", "--nproc", "2",
             "--moe-layer-freq", "0,1", "--output-dir", str(tmp_path)]  # fmt: skip
    assert main(words) == 0
    out, _ = capfd.readouterr()
    assert out.startswith("2 ranks: tp 1 x cp 1 x dp 2 x pp 1, experts etp 1 x ep 2 x edp 1 x pp 1, 2 steps of 4")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    worst = lines[-1]["moe/max_over_mean"]
    assert f"the fullest expert has {worst:.2f} times the mean load" in out
    assert sum(lines[-1]["moe/layers.1/tokens_per_expert"]) == 4 * 16 * 2 and "moe/layers.0/z_loss" not in lines[-1]
