"""Training with experts replays graphs and comes to the same bits: losses, metrics of routers, weights.

Every case is a run by graphs, held against the same run without. A run has 10 steps, of which the first three are
eager, or in the matrix of layouts 6 and one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from labkit.config import RunConfig, presets
from labkit.graphs.graphable_module import graphable_modules
from labkit.launch import Ranks
from labkit.moe.router import routers_of
from labkit.parallel.data_parallel.param_gather import finish_param_sync
from labkit.train import pretrain

SHAPE = {"layers": 2, "hidden": 16, "heads": 2, "seq_length": 16, "model.ffn_hidden": 16, "moe.ffn_hidden": 16,
         "global_batch_size": 4, "steps": 10, "record_events": False}  # fmt: skip
ROUTER, PREPROCESS = ("attn", "moe_router"), ("attn", "moe_router", "moe_preprocess")
SHARED = {"shared_expert_ffn_hidden": 16, "shared_expert_gate": True}
OVERLAPPED = {**SHARED, "shared_expert_overlap": True}
PADDED = {"capacity_factor": 1.0, "pad_to_capacity": True}
BIASED = {"score_function": "sigmoid", "expert_bias": True, "num_groups": 4, "group_topk": 2, "top_k": 4}
ZERO = {"distributed_optimizer": True, "overlap_param_gather": True, "bucket_size": 2_000}
DROPS = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "attention_backend": "unfused", "input_jitter": 0.1}
AGAIN = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "shared_experts"]}
SP, FOUR = {"tp": 2, "sequence_parallel": True}, {"layers": 4}

Case = tuple[dict[str, Any], int, tuple[str, ...]]
"""Changes to the run, ranks, scope."""


# ---- every scope in every layout with replicas ----

FEW = {"steps": 6, "cuda_graph_warmup_steps": 1, "global_batch_size": 8}
LAYOUTS: dict[str, dict[str, Any]] = {
    "1 stage": {},
    "pp2": {"pp": 2, **FOUR},
    "pp4": {"pp": 4, "layers": 8},
    "pp4 vpp2": {"pp": 4, "vpp": 2, "layers": 8, "layer_freq": [1] * 4 + [0] * 4},
}
"""On every rank there are layers with experts and layers without; there are twice as many ranks as stages."""
REPLICAS = {"buckets": {"overlap_grad_reduce": True, "bucket_size": 200}, "zero": {**ZERO, "bucket_size": 200}}
"""A bucket holds a parameter or two, so that each must be waited for by itself."""
WITH_EXPERTS = {
    "": (), "router": ("moe_router",), "preprocess": ("moe_router", "moe_preprocess"), "experts": ("moe",)
}  # fmt: skip
SCOPES: list[tuple[str, ...]] = [
    ("full_iteration",),
    *(
        (*attn, *mlp, *experts)
        for attn, mlp, experts in product(((), ("attn",)), ((), ("mlp",)), WITH_EXPERTS.values())
    ),
]
"""Every scope there is; the empty one is the whole layer."""


def row(layout: str, replicas: str, scope: tuple[str, ...]) -> Case:
    """A case of the matrix. Experts are in a graph by drop-and-pad alone, and messages are in none."""
    whole = not scope or not {"moe", "full_iteration"}.isdisjoint(scope)
    changes = {**LAYOUTS[layout], **REPLICAS[replicas], **FEW, **(PADDED if whole else {})}
    return changes, 2 * changes.get("pp", 1), scope


MATRIX = [
    row(*choice) for choice in product(LAYOUTS, REPLICAS, SCOPES)
    if choice[0] == "1 stage" or choice[2] != ("full_iteration",)
]  # fmt: skip
COVER = [
    row("1 stage", "buckets", ("full_iteration",)),
    row("1 stage", "zero", (*PREPROCESS, "mlp")),
    row("pp2", "zero", ("moe",)),
    row("pp2", "buckets", ("mlp", "moe_router")),
    row("pp4", "buckets", ("attn",)),
    row("pp4 vpp2", "zero", ("attn", "mlp", "moe_router", "moe_preprocess")),
]
"""Every layout, every kind of replicas and every part of a scope."""

EVERY_DAY: list[Case] = [
    ({}, 1, ("moe_router",)),
    ({}, 1, (*PREPROCESS, "mlp")),
    ({"ep": 2, **OVERLAPPED, **ZERO}, 2, PREPROCESS),
    ({"ep": 2, **PADDED, **SHARED}, 2, ()),
    ({"pp": 2, "vpp": 2, **FOUR, **BIASED}, 2, PREPROCESS),
    ({"pp": 2, **SHARED, **DROPS}, 2, ROUTER),
    *COVER,
]
SWEEP: list[Case] = [
    *[({}, 1, scope) for scope in (("attn",), ("mlp",), ("moe_router", "moe_preprocess"), ROUTER, PREPROCESS)],
    *[({"dispatcher": dispatcher, **SHARED}, 1, scope) for dispatcher in ("local", "allgather")
      for scope in (ROUTER, PREPROCESS)],
    *[({**PADDED, **OVERLAPPED}, 1, scope) for scope in ((), ("moe",), PREPROCESS)],
    *[({"layer_freq": [0, 1]}, 1, scope) for scope in (("moe_router",), ("mlp", "moe_router"))],
    ({**DROPS}, 1, PREPROCESS),
    ({"grouped_gemm": False}, 1, PREPROCESS),
    *[({"ep": 2, **more}, 2, scope) for scope in (ROUTER, PREPROCESS)
      for more in ({}, SHARED, OVERLAPPED, BIASED, PADDED, ZERO, {"dispatcher": "allgather"}, {**SHARED, **AGAIN},
                   {"load_balancing": "seq_aux_loss"}, {"load_balancing": "global_aux_loss"},
                   {"precision": "bf16"}, {"precision": "fp16"}, {"eval_interval": 5, "eval_steps": 1})],
    *[({"ep": 2, **PADDED, **more}, 2, ("moe",)) for more in ({}, OVERLAPPED)],
    ({"ep": 2, "capacity_factor": 1.0}, 2, ROUTER),
    *[(layout, 2, scope) for scope in (ROUTER, PREPROCESS)
      for layout in (SP, {**SP, "ep": 2, "etp": 1}, {"cp": 2, "ep": 2}, {"pp": 2}, {"pp": 2, "schedule.name": "gpipe"},
                     {"pp": 2, "vpp": 2, **FOUR, **ZERO})],
    ({**SP, **DROPS}, 2, PREPROCESS),
    ({"pp": 2, "ep": 2, **FOUR, **OVERLAPPED}, 4, PREPROCESS),
    ({"pp": 4, "vpp": 2, "layers": 8, "global_batch_size": 8, **SHARED, **ZERO}, 4, PREPROCESS),
    ({"pp": 4, "vpp": 2, "layers": 8, "global_batch_size": 8}, 4, ROUTER),
    *[({"pp": 4, **FOUR, **more}, 4, PREPROCESS) for more in ({}, ZERO)],
    *[({"pp": 2, **ZERO}, 2, scope) for scope in (("moe_router",), PREPROCESS)],
    *[case for case in MATRIX if case not in COVER],
]  # fmt: skip


@pytest.fixture(scope="module")
def on_ranks() -> Iterator[Callable[..., list[Any]]]:
    """As that of conftest.py, with new ranks for another number of them and after a dozen trainings: the groups of a
    training live on in its ranks, each with three threads."""
    ranks, calls = None, 0

    def call(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        nonlocal ranks, calls
        if ranks is None or ranks.world_size != world_size or calls == 12:
            if ranks is not None:
                ranks.close()
            ranks, calls = Ranks(world_size, device="cpu", backend="gloo"), 0
        calls += 1
        return ranks.run(fn, *args)

    yield call
    if ranks is not None:
        ranks.close()


class Watcher:
    """The weights in the beginning and in the end; how often routers ran in Python and how many graphs there were, by
    step."""

    weights: list[Tensor]
    first: list[Tensor]

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.calls, self.calls_by_step, self.graphs_by_step = 0, list[int](), list[int]()

    def on_model(self, groups: Any, chunks: Sequence[nn.Module], schedule: Any) -> None:
        for router in routers_of(chunks):
            router.routing = self._counted(router, router.routing)  # type: ignore[method-assign]

    def _counted(self, router: nn.Module, routing: Any) -> Any:
        def counted(*args: Any) -> Any:
            self.calls += router.training  # evaluation is eager
            return routing(*args)

        return counted

    def on_gradients(self, step: int, chunks: Sequence[nn.Module]) -> None:
        if not self.calls_by_step:
            self.first = [parameter.detach().clone() for chunk in chunks for parameter in chunk.parameters()]
        self.calls_by_step.append(self.calls)
        layers = [layer for chunk in chunks for layer in graphable_modules(chunk)]
        self.graphs_by_step.append(sum(len(layer.cuda_graphs) for layer in layers))

    def on_update(self, step: int, chunks: Sequence[nn.Module]) -> None:
        if len(self.calls_by_step) == self.steps:
            finish_param_sync(chunks)
            self.weights = [parameter.detach().clone() for chunk in chunks for parameter in chunk.parameters()]


def trained(config: RunConfig) -> dict[str, Any]:
    watcher = Watcher(config.train.steps)
    result = pretrain(config, observer=watcher)
    steps = [line for line in result.metrics if "graphs" not in line]
    lines = [{name: line[name] for name in line if not _of_the_machine(name)} for line in steps]
    return {"losses": result.losses, "metrics": lines, "first": watcher.first, "weights": watcher.weights,
            "calls": watcher.calls_by_step, "graphs": watcher.graphs_by_step}  # fmt: skip


def _of_the_machine(name: str) -> bool:
    """Times, rates and memory, which differ from run to run."""
    return any(word in name for word in ("time", "second", "tflops", "memory"))


def config_of(changes: dict[str, Any], scope: tuple[str, ...] | None) -> RunConfig:
    graph = {"cuda_graph_impl": "emulated", "cuda_graph_modules": list(scope)} if scope is not None else {}
    fields = {**SHAPE, **changes, **graph}
    if scope is None:  # without graphs nothing warms up
        fields.pop("cuda_graph_warmup_steps", None)
    return presets.tiny_moe().override(fields)


@cache
def _eager(on_ranks: Any, ranks: int, config: RunConfig) -> list[dict[str, Any]]:
    return on_ranks(trained, ranks, config)


def _name(case: Case) -> str:
    changes, ranks, scope = case
    told = {key.split(".")[-1]: value for key, value in changes.items() if key not in FEW or changes[key] != FEW[key]}
    words = [key if value is True else f"{key}={value}" for key, value in told.items()]
    return f"{ranks}: {' '.join(words)} [{','.join(scope)}]"


@pytest.mark.parametrize(
    "case", [*EVERY_DAY, *(pytest.param(case, marks=pytest.mark.sweep) for case in SWEEP)],
    ids=[_name(case) for case in (*EVERY_DAY, *SWEEP)],
)  # fmt: skip
def test_graphs_change_no_bit(on_ranks, case: Case) -> None:
    changes, ranks, scope = case
    config = config_of(changes, scope)
    steps, eagerly = config.train.steps, config.graph.cuda_graph_warmup_steps
    eager = _eager(on_ranks, ranks, config_of(changes, None))
    replayed = on_ranks(trained, ranks, config)
    for left, right in zip(eager, replayed, strict=True):
        assert left["losses"] == right["losses"] and len(left["losses"]) == steps
        assert left["metrics"] == right["metrics"]
        assert all(torch.equal(a, b) for a, b in zip(left["weights"], right["weights"], strict=True))
        assert not any(torch.equal(a, b) for a, b in zip(left["first"], left["weights"], strict=True)), "all move"
    assert any(rank["graphs"][-1] for rank in replayed) or scope == ("full_iteration",)  # whose graph is no layer's
    for rank in replayed:
        assert not any(rank["graphs"][:eagerly]) and len(set(rank["graphs"][eagerly:])) == 1, (
            "eager for the first steps, graphs ever after"
        )
        if not scope or not {"moe", "moe_router", "full_iteration"}.isdisjoint(scope):
            assert len(set(rank["calls"][eagerly:])) == 1, (
                "a replay calls no Python: the routers ran at capture for the last time"
            )
        else:
            assert rank["calls"] == sorted(set(rank["calls"]))


def test_metrics_hold_what_routers_count_in_graphs(on_ranks) -> None:
    """The comparison above would also hold for nothing."""
    (rank,) = _eager(on_ranks, 1, config_of({}, None))
    tokens = SHAPE["global_batch_size"] * SHAPE["seq_length"]
    for line in rank["metrics"]:
        assert sum(line["moe/layers.0/tokens_per_expert"]) == 2 * tokens
        assert line["moe/load_balancing_loss"] > 0.9 and line["moe/z_loss"] > 0
