"""A GPT with experts under every fold against one process: loss, gradients, parameters over two optimizer steps.

All of docs/parity.md's tables of experts are a sweep (`make sweep`): {ep1, 2, 4, 8} x {etp1, 2} x {tp1, 2} x {cp1, 2} x
{pp1, 2} x {data parallel, distributed optimizer} up to 8 ranks, in rows that have every four values that can occur
together. The subset here has every pair.

Tokens that an expert is too full for are dropped by what one rank holds. So layouts with a capacity are held against
one process only where a rank holds whole micro batches, else against another way to send the same tokens.
"""

import runpy
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from labkit.config import RunConfig
from labkit.train import ParityReport, compare

MATRIX = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "parity_matrix.py"))
LAYOUTS, PAIRS, AXES = (MATRIX[name] for name in ("EXPERT_LAYOUTS", "PAIRS", "EXPERT_AXES"))
FOLDED = {"tp": 2, "sequence_parallel": True, "etp": 1, "ep": 4, "world_size": 4}


def sparse(preset: str, **changes: Any) -> RunConfig:
    """The configuration of the tables, in as few layers as have a dense one among them, and with half the batch."""
    return MATRIX["sparse"](preset).override({"layers": 2, "global_batch_size": 8, **changes})


def agrees(report: ParityReport) -> None:
    assert report.ok, f"\n{report}"
    if report.dtype == "float64":
        assert max(row.largest for row in report.rows) <= 1e-10


def values_of(layout: dict[str, Any]) -> dict[str, Any]:
    return {axis: layout[axis] for axis in AXES}


@pytest.mark.parametrize("strength", [2, 4])
def test_the_rows_have_all_values_that_can_occur_together(strength):
    """Held against every combination that fits 8 ranks, written out once more."""
    rows = LAYOUTS[:PAIRS] if strength == 2 else LAYOUTS
    wanted = set()
    for values in product(*AXES.values()):
        layout = dict(zip(AXES, values))
        dense = layout["tp"] * layout["cp"] * layout["pp"]
        experts = layout["etp"] * layout["ep"] * layout["pp"]
        ranks = next(n for n in range(1, 65) if n % dense == 0 and n % experts == 0)
        replicas = ranks // dense * layout["cp"]
        ranks *= 2 if layout["distributed_optimizer"] and replicas == 1 else 1
        if 1 < ranks <= 8:
            wanted |= set(combinations(layout.items(), strength))
    found = set().union(*(combinations(values_of(layout).items(), strength) for layout in rows))
    assert found == wanted
    assert len({tuple(values_of(layout).items()) for layout in LAYOUTS}) == len(LAYOUTS) >= 40


def test_every_pair_of_sizes():
    """Eight replicas need twice the batch of the others. Two steps; the sweep takes these rows on."""
    many = [row["world_size"] // (row["tp"] * row["cp"] * row["pp"]) > 4 for row in LAYOUTS[:PAIRS]]
    for batch, chosen in ((8, False), (16, True)):
        layouts = [row for row, is_many in zip(LAYOUTS, many) if is_many == chosen]
        agrees(compare(sparse("tiny_moe", global_batch_size=batch), layouts, steps=2))


def test_one_sequence_and_all_experts_on_the_same_eight_ranks():
    """cp8 ep8, the first of its table."""
    layout = MATRIX["SAME_RANKS_LAYOUTS"][0]
    assert (layout["cp"], layout["ep"], layout["world_size"]) == (8, 8, 8)
    agrees(compare(sparse("tiny_moe"), [layout], steps=2))


def test_every_way_to_send_tokens():
    """Groups of experts, a bias on their scores, a shared expert; 16 experts, of which some get no token."""
    layouts = [
        {"dispatcher": "allgather", "ep": 2, "cp": 2},
        {"dispatcher": "allgather", **FOLDED, "ep": 2, "etp": 2},
        {**FOLDED, "shared_expert_overlap": True, "recompute_granularity": "full"},
        {"ep": 2, "pp": 2, "grouped_gemm": False, "world_size": 4, "schedule.name": "zero_bubble_h1"},
    ]
    agrees(compare(sparse("deepseek_tiny"), layouts, steps=2))


def test_float32_along_the_routing_of_one_process():
    layouts = [{**FOLDED, "cp": 2, "world_size": 8}, {"pp": 2, "ep": 2}]
    agrees(compare(sparse("mixtral_tiny"), layouts, steps=2, dtype="float32"))


PARTIAL = {"recompute_granularity": "full", "num_microbatches_with_partial_activation_checkpoints": 1}


def test_float32_where_some_microbatches_are_recomputed():
    """A second forward takes its own microbatch's choices, though others have none."""
    layouts = [{"pp": 2, **PARTIAL}, {"pp": 2, **PARTIAL, "schedule.name": "interleaved", "vpp": 2}]
    config = sparse("mixtral_tiny", layers=4, micro_batch_size=1, global_batch_size=4)
    agrees(compare(config, layouts, steps=2, dtype="float32"))


def test_the_global_loss_where_some_microbatches_are_recomputed():
    """Its mean over the microbatches so far is that of the forwards, as without recomputation."""
    config = sparse("tiny_moe", layers=4, load_balancing="global_aux_loss", aux_loss_coeff=0.1, micro_batch_size=1)
    agrees(compare(config, [{"pp": 2, **PARTIAL}, {"pp": 2, **PARTIAL, "schedule.name": "zbv"}], steps=2))


def test_gradients_of_experts_over_their_own_replicas():
    """Attention over 2 replicas, experts over 4, or over 2 others: all ways to reduce gradients and count a norm."""
    layouts = [
        {**FOLDED, "ep": 2, "world_size": 4, **MATRIX["MEGATRON"], "bucket_size": 4000},
        {**FOLDED, "ep": 1, "world_size": 4, "optim.data_parallel": "naive"},
    ]
    agrees(compare(sparse("tiny_moe"), layouts, steps=2))


LAST_EXPERTS = "layers.1.mlp.experts.fc2.weight gradient"
LEFT_OUT = [
    ({"operation": "all_to_all", "group": "ep", "phase": "forward"}, {"ep": 2}, "layers.1.mlp output"),
    ({"operation": "all_to_all", "group": "ep", "phase": "backward"}, {"ep": 2}, LAST_EXPERTS),
    ({"operation": "reduce_scatter", "group": "etp", "phase": "forward"}, {"etp": 2}, "layers.1.mlp output"),
    ({"operation": "all_reduce", "group": "edp"}, {"ep": 2, "world_size": 4}, LAST_EXPERTS),
    ({"operation": "all_reduce", "phase": "expert bias"}, {"ep": 2}, "layers.1.mlp.router.expert_bias parameter"),
    ({"operation": "all_reduce", "layer": "layers.1.mlp.router"}, {"cp": 2}, "layers.1.mlp.router.weight gradient"),
]


@pytest.mark.parametrize(
    ("fault", "layout", "named"),
    [pytest.param(*row, marks=[] if number == 1 else [pytest.mark.sweep]) for number, row in enumerate(LEFT_OUT)],
    ids=["-".join(fault.values()) for fault, _, _ in LEFT_OUT],
)
def test_communication_of_experts_that_is_left_out_is_named(fault, layout, named):
    """Of an all-to-all that is left out a rank keeps its own rows, as many as were to come."""
    report = compare(sparse("deepseek_tiny"), [layout], steps=1, fault=fault)
    assert report.rows[0].first_difference == named, f"\n{report}"


DROPS = {"capacity_factor": 0.75, "moe.aux_loss_coeff": 0.01}


@pytest.mark.parametrize("policy", ["probs", pytest.param("position", marks=pytest.mark.sweep)])
def test_dropped_tokens_where_a_rank_holds_whole_micro_batches(policy):
    layouts = [{"ep": 4, "pad_to_capacity": padded, "distributed_optimizer": padded} for padded in (False, True)]
    agrees(compare(sparse("tiny_moe", **DROPS, drop_policy=policy), layouts, steps=2))


def test_dropped_tokens_do_not_depend_on_how_the_others_are_sent():
    """cp 2 with sequence parallelism: a rank holds a quarter of a micro batch, whoever has the experts."""
    tokens = {"cp": 2, "tp": 2, "sequence_parallel": True}
    layouts = [
        {**tokens, "etp": 2, "ep": 2},
        {**tokens, "etp": 1, "ep": 4, "pad_to_capacity": True},
    ]
    agrees(
        compare(sparse("tiny_moe", **DROPS), layouts, steps=2, reference={**tokens, "dispatcher": "local", "etp": 1})
    )


def test_dropping_changes_the_training():
    """Otherwise the tests above would compare nothing."""
    whole, dropping = sparse("tiny_moe"), sparse("tiny_moe", **DROPS)
    losses = [compare(config, [], steps=2).reference_losses for config in (whole, dropping)]
    assert abs(losses[0][1] - losses[1][1]) > 1e-6


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("title", MATRIX["EXPERT_SWEEPS"])
def test_every_row_with_experts(title):
    config, layouts, dtype = MATRIX["EXPERT_SWEEPS"][title]
    report = compare(config, layouts, steps=MATRIX["EXPERT_STEPS"], dtype=dtype)
    assert report.ok, f"\n{report}"
    assert len(report.rows) == len(layouts)
