"""Merged pairs on real ranks: the numbers of one process, the bytes of unmerged ones, the order of the simulator."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from labkit.comm.ledger import CommLedger
from labkit.config import RunConfig
from labkit.graphs.graphable_module import graphable_modules
from labkit.plan.stages import configured_schedule
from labkit.schedules import Costs, LayerTimes, simulate
from labkit.schedules.merging import DENSE_PARTS, MOE_PARTS
from labkit.train import compare, pretrain

MATRIX = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "parity_matrix.py"))
MERGED_LAYOUTS = MATRIX["MERGED_LAYOUTS"]
MERGES = {"schedule.overlap_moe_expert_parallel_comm": True}
DELAYS = {**MERGES, "schedule.delay_wgrad_compute": True}


def sparse(**changes: Any) -> RunConfig:
    """Two layers, the first with experts, and enough microbatches for pairs on every rank."""
    return MATRIX["sparse"]("tiny_moe").override({"layers": 2, "global_batch_size": 16, **changes})


@pytest.mark.parametrize("layouts", [MERGED_LAYOUTS[:3]], ids=["everyday"])
def test_layouts_with_merged_pairs_agree_with_one_process(layouts):
    report = compare(sparse(), layouts, steps=2)
    assert report.ok, f"\n{report}"
    assert max(row.largest for row in report.rows) <= 1e-10


@pytest.mark.sweep
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", MERGED_LAYOUTS[3:], ids=str)
def test_every_layout_with_merged_pairs_agrees_with_one_process(layout):
    preset = "deepseek_tiny" if "recompute_modules" in layout else "tiny_moe"  # which has shared experts
    config = MATRIX["sparse"](preset).override({"layers": 4, "global_batch_size": 32})
    report = compare(config, [layout], steps=2)
    assert report.ok, f"\n{report}"
    assert max(row.largest for row in report.rows) <= 1e-10


class Gradients:
    """Keeps the final gradients of the last step."""

    def on_model(self, *_: Any) -> None:
        pass

    def on_gradients(self, step: int, chunks: Any) -> None:
        self.gradients = [p.main_grad.clone() for chunk in chunks for p in chunk.parameters()]

    def on_update(self, *_: Any) -> None:
        pass


def trained(config: RunConfig) -> tuple[list[float], list[torch.Tensor], list[tuple[Any, ...]], list[Any]]:
    """Losses, gradients, every collective of two steps by what it is, and the parts of layers that ran."""
    observer = Gradients()
    with CommLedger() as ledger:
        result = pretrain(config, observer=observer)
    calls = [(r.operation, r.group, r.bytes, r.dtype, r.layer, r.phase, r.kept) for r in ledger.records]
    parts = [event for event in result.events if event.name.split()[-1] in (*MOE_PARTS, *DENSE_PARTS)]
    return result.losses, observer.gradients, sorted(calls, key=str), parts


@pytest.mark.parametrize(
    ("delay", "fp8"),
    [
        (False, "none"),
        (True, "none"),
        (True, "current"),
        (False, "blockwise"),
        pytest.param(False, "current", marks=pytest.mark.sweep),
        pytest.param(True, "blockwise", marks=pytest.mark.sweep),
        pytest.param(False, "delayed", marks=pytest.mark.sweep),
        pytest.param(True, "delayed", marks=pytest.mark.sweep),
    ],
    ids=lambda value: {False: "interleaved", True: "delayed wgrad"}.get(value, value),
)
def test_pairs_change_no_bit_and_no_byte_and_run_in_the_simulated_order(on_ranks, delay, fp8):
    """ep 2 x pp 2: the same losses, gradients and collectives as unmerged, in the order that the simulator gives.

    Four layers in four stages under interleaving, or in two stages of two under 1F1B. In fp8 with scales of a rank's
    own rows, too, with which no layout of ep has the numbers of one process.
    """
    layout: dict[str, Any] = {"ep": 2, "pp": 2, "vpp": 1 if delay else 2, "layers": 4, "train.steps": 2}
    layout |= {} if fp8 == "none" else {"optim.fp8": "hybrid", "optim.fp8_recipe": fp8}
    plain = on_ranks(trained, 4, sparse(**layout))
    config = sparse(**layout, **(DELAYS if delay else MERGES))
    merged = on_ranks(trained, 4, config)
    schedule = configured_schedule(config, 4)
    moe = LayerTimes(forward=dict.fromkeys(MOE_PARTS, 1.0), backward=dict.fromkeys(reversed(MOE_PARTS), 1.0))
    dense = LayerTimes(forward=dict.fromkeys(DENSE_PARTS, 1.0), backward=dict.fromkeys(reversed(DENSE_PARTS), 1.0))
    stages = [[moe, dense], [moe, dense]] if delay else [[moe], [dense], [moe], [dense]]
    timeline = simulate(schedule, Costs(layers=stages, delay_wgrad=delay))
    for rank, (one, other) in enumerate(zip(plain, merged, strict=True)):
        assert one[0] == other[0]
        assert len(one[1]) == len(other[1])
        assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))
        assert one[2] == other[2]
        expected = [e.name for e in timeline.events if e.rank == rank // 2 and e.kind != "collective"]
        found = [event.name for event in sorted(other[3], key=lambda event: event.start)]
        assert found == 2 * expected


# ---- graphs ----

TO_DISPATCH = ("attn", "moe_router", "moe_preprocess")
KINDS = {"forward": "F", "backward": "B", "weight gradients": "W"}


class EveryStep:
    """Keeps the final gradients of every step, and the order in which this rank's graphs were captured."""

    def __init__(self) -> None:
        self.gradients: list[list[torch.Tensor]] = []
        self.order: list[Any] = []

    def on_model(self, *_: Any) -> None:
        pass

    def on_gradients(self, step: int, chunks: Any) -> None:
        self.gradients.append([p.main_grad.clone() for chunk in chunks for p in chunk.parameters()])
        helpers = [layer.cuda_graph_owner for chunk in chunks for layer in graphable_modules(chunk)]
        self.order = helpers[0].order if helpers and helpers[0] is not None else []

    def on_update(self, *_: Any) -> None:
        pass


def replayed(config: RunConfig) -> tuple[list[float], Any, list[Any], list[Any]]:
    """Losses, gradients, the order of the captures, and the replays of all steps as entries of it."""
    observer, replays = EveryStep(), []
    result = pretrain(config, observer=observer)
    for event in sorted((e for e in result.events if e.kind == "graph_replay"), key=lambda e: e.start):
        _, chunk, _, _, _, _, kind = event.name.split(maxsplit=6)
        number = int(chunk) + 1
        replays.append({"F": number, "B": -number, "W": -number - 0.5}[KINDS[kind]])
    return result.losses, observer.gradients, observer.order, replays


WITH_GRAPHS = {
    "interleaved": {**MERGES, "vpp": 2, "distributed_optimizer": True, "overlap_param_gather": True},
    "1f1b": {**DELAYS, "shared_expert_ffn_hidden": 16, "hidden_dropout": 0.1},
    "dualpipe_v": {**DELAYS, "schedule.name": "dualpipe_v"},
}


@pytest.mark.parametrize("name", WITH_GRAPHS)
def test_graphs_change_no_bit_and_replay_in_the_order_of_their_captures(on_ranks, name):
    """ep 2 x pp 2, four layers, every second with experts: two steps of replays after two eager ones."""
    layout = {"ep": 2, "pp": 2, "layers": 4, "layer_freq": (0, 1), "train.steps": 4, **WITH_GRAPHS[name]}
    graph = {"cuda_graph_impl": "emulated", "cuda_graph_modules": TO_DISPATCH, "cuda_graph_warmup_steps": 2}
    eager = on_ranks(replayed, 4, sparse(**layout))
    graphed = on_ranks(replayed, 4, sparse(**layout, **graph))
    for one, other in zip(eager, graphed, strict=True):
        assert one[0] == other[0]
        for ours, theirs in zip(one[1], other[1], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert not one[3] and other[3] == 2 * other[2]
        assert any(entry != int(entry) for entry in other[2]) == ("schedule.delay_wgrad_compute" in layout)
