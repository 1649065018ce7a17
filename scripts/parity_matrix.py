"""Compare every layout and every schedule of the matrix with one process, and write docs/parity.md.

.venv/bin/python scripts/parity_matrix.py                              # everything, an hour on two cores
.venv/bin/python scripts/parity_matrix.py Recomputation "Gradient bu"  # these tables again, the others as they are
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

from labkit.config import RunConfig, presets
from labkit.train import ParityReport, compare

TARGET = Path(__file__).parents[1] / "docs" / "parity.md"
STEPS = 10
LAYOUTS = [
    {"tp": tp, "pp": pp, "world_size": tp * pp * dp}
    for tp, pp, dp in product((1, 2, 4), (1, 2, 4), (1, 2))
    if 1 < tp * pp * dp <= 8
]
MICROBATCHES, SCHEDULE_STEPS = 8, 3
SCHEDULES = [
    {"schedule.name": "gpipe"},
    {"schedule.name": "1f1b"},
    {"schedule.name": "interleaved", "vpp": 2},
    {"schedule.name": "interleaved", "vpp": 4},
    {"schedule.name": "zero_bubble_h1"},
    {"schedule.name": "zbv"},
    {"schedule.name": "dualpipe_v"},
]
"""Every schedule that has a name."""
STAGES = [
    {"pp": 4, "pipeline_layout": "E t*4 | ttt | t*5 | t*4 L"},
    {"pp": 4, "pipeline_layout": "E | t*8 | t*8 | L"},
    {"pp": 2, "vpp": 4, "pipeline_layout": "E | (ttt|)*4 tt | tt | L"},
    {"pp": 2, "schedule.name": "zbv", "pipeline_layout": "E | t*9 | t*7 | L"},
    {"pp": 4, "schedule.name": "dualpipe_v", "pipeline_layout": "Et | (tt|)*2 t | (ttt|)*3 tL"},
    {"pp": 2, "tp": 2, "schedule.name": "zero_bubble_h1", "standalone_embedding_stage": True},
    {"pp": 4, "pipeline_layout": "E t*8 || t*8 | L"},
    {"pp": 4, "schedule.name": "zero_bubble_h1", "pipeline_layout": "E t*8 || t*8 | L"},
    {"pp": 2, "tp": 2, "vpp": 2, "sequence_parallel": True, "pipeline_layout": "E t*8 || t*8 | L"},
    {"pp": 2, "schedule.name": "zbv", "pipeline_layout": "E t*16 ||| L"},
]
"""Stages of different sizes, standalone embedding and loss stages, empty ones."""
TRANSFERS = [
    {"pp": 2, "vpp": 2, "overlap_p2p_comm": True, "microbatch_group_size": 4},
    {"pp": 4, "world_size": 8, "vpp": 2, "all_warmup": True},
    *[
        {"pp": 2, **schedule, **transfer}
        for schedule in (SCHEDULES[2], SCHEDULES[5])
        for transfer in ({"batch_p2p_comm": True}, {"batch_p2p_comm": False}, {"variable_seq_lengths": True})
    ],
]
"""How tensors move between stages, and two orders of interleaving."""
DATA_STEPS, DATA_BATCH = 10, 12
SEQUENCE_PARALLEL = {"sequence_parallel": True}
FULL = {"recompute_granularity": "full"}
BUCKETS = {"bucket_size": 10_000}
ZERO = {"distributed_optimizer": True, **BUCKETS}
MEGATRON = {"overlap_param_gather": True, **ZERO}
"""The distributed optimizer with every overlap, in several buckets."""


def grid(changes: dict[str, Any], sizes: list[tuple[int, int, int, int]]) -> list[dict[str, Any]]:
    """`changes` under each (tp, cp, pp, dp)."""
    return [{"tp": tp, "cp": cp, "pp": pp, "world_size": tp * cp * pp * dp, **changes} for tp, cp, pp, dp in sizes]


SEQUENCE_LAYOUTS = [
    *grid(SEQUENCE_PARALLEL, [(2, 1, 1, 1), (4, 1, 1, 1), (2, 1, 2, 1), (2, 1, 4, 1), (4, 1, 2, 1), (2, 1, 2, 2)]),
    *grid({}, [(1, 2, 1, 1), (1, 4, 1, 1), (2, 2, 1, 1), (1, 2, 2, 1), (2, 2, 2, 1), (1, 4, 2, 1), (2, 4, 1, 1)]),
    *grid({}, [(1, 2, 1, 2), (1, 2, 2, 2)]),
    *grid({"cp_comm_type": "all_gather"}, [(1, 2, 1, 1), (1, 4, 1, 1), (2, 2, 2, 1)]),
    *grid(SEQUENCE_PARALLEL, [(2, 2, 1, 1), (2, 2, 2, 1), (4, 2, 1, 1), (2, 2, 1, 2)]),
]
"""Sequence and context parallelism, alone and together."""
RECOMPUTE_LAYOUTS = [
    *grid(FULL, [(1, 1, 1, 1), (2, 1, 1, 1), (1, 1, 2, 1), (2, 1, 2, 1), (2, 1, 2, 2)]),
    *grid({"recompute_granularity": "selective"}, [(1, 1, 1, 1), (2, 1, 1, 1), (1, 1, 2, 1), (2, 1, 2, 1)]),
    *grid(
        {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp", "layernorm")},
        [(1, 1, 1, 1), (2, 1, 2, 1)],
    ),
    *grid({**FULL, "recompute_method": "block", "recompute_num_layers": 2}, [(1, 1, 1, 1), (1, 1, 2, 1)]),
    *grid({**FULL, "num_microbatches_with_partial_activation_checkpoints": 1}, [(1, 1, 2, 1), (2, 1, 2, 1)]),
    *grid({**FULL, **SEQUENCE_PARALLEL}, [(2, 1, 1, 1), (2, 1, 2, 1), (2, 2, 1, 1)]),
    *grid({**FULL, "schedule.name": "zero_bubble_h1"}, [(1, 1, 2, 1), (2, 1, 2, 1)]),
    *grid({**FULL, "schedule.name": "zbv"}, [(1, 1, 2, 1)]),
    *grid(FULL, [(1, 2, 1, 1), (1, 2, 2, 1)]),
]
"""What backward computes again, whole layers or parts of them."""
DATA_LAYOUTS = [
    *grid({"optim.data_parallel": "naive"}, [(1, 1, 1, 2), (2, 1, 2, 2)]),
    *grid(BUCKETS, [(1, 1, 1, 2), (1, 1, 1, 6), (2, 1, 1, 2), (1, 1, 2, 2), (2, 1, 2, 2), (1, 2, 1, 2)]),
    *grid({**BUCKETS, "average_in_collective": True}, [(1, 1, 1, 2), (1, 1, 1, 4)]),
    *grid({**BUCKETS, "calculate_per_token_loss": True}, [(1, 1, 1, 2), (1, 2, 2, 2)]),
    *grid({**BUCKETS, "schedule.name": "interleaved", "vpp": 2}, [(1, 1, 2, 2), (2, 1, 2, 2)]),
    *grid({**BUCKETS, "schedule.name": "zbv"}, [(1, 1, 2, 2)]),
    *grid({"overlap_grad_reduce": False}, [(1, 1, 1, 2)]),
]
"""Gradients in buckets, reduced behind the backward."""
ZERO_LAYOUTS = [
    *grid(ZERO, [(1, 1, 1, 2), (1, 1, 1, 3), (1, 1, 1, 6), (2, 1, 1, 2), (1, 1, 2, 2), (2, 1, 2, 2), (1, 2, 1, 2)]),
    *grid(MEGATRON, [(1, 1, 1, 2), (1, 1, 1, 4), (2, 1, 1, 2), (1, 1, 2, 2), (2, 1, 2, 2), (1, 2, 2, 2)]),
    *grid({**MEGATRON, "schedule.name": "interleaved", "vpp": 2}, [(1, 1, 2, 2), (2, 1, 2, 2)]),
    *grid({**MEGATRON, "schedule.name": "zero_bubble_h1"}, [(1, 1, 2, 2)]),
    *grid({**MEGATRON, "schedule.name": "zbv"}, [(1, 1, 2, 2)]),
    *grid({**MEGATRON, "schedule.name": "dualpipe_v"}, [(1, 1, 2, 2)]),
    *grid({**ZERO, "num_distributed_optimizer_instances": 2}, [(1, 1, 1, 4), (2, 1, 1, 4), (1, 1, 2, 4)]),
    *grid({**ZERO, "calculate_per_token_loss": True}, [(1, 1, 1, 2)]),
    *grid({**MEGATRON, **SEQUENCE_PARALLEL, **FULL}, [(2, 1, 1, 2), (2, 2, 1, 2), (2, 1, 2, 2)]),
    *grid({**MEGATRON, "vpp": 2, "pipeline_layout": "Ett||tt|L"}, [(1, 1, 2, 2)]),
    *grid({**ZERO, "pipeline_layout": "Ett||tt|L"}, [(1, 1, 4, 2)]),
]
"""The distributed optimizer, always over two replicas or more."""
EXPERT_STEPS, EXPERT_BATCH, MOST_RANKS = 3, 16, 8
BERT_STEPS, T5_STEPS, MAMBA_STEPS, COMPILED_STEPS = 5, 3, 3, 3
EXPERT_AXES: dict[str, tuple[Any, ...]] = {
    "ep": (1, 2, 4, 8),
    "etp": (1, 2),
    "tp": (1, 2),
    "cp": (1, 2),
    "pp": (1, 2),
    "distributed_optimizer": (False, True),
}
"""What is folded over one set of ranks."""


def ranks_of(layout: dict[str, Any]) -> int:
    """Fewest ranks on which attention and experts both fit; the distributed optimizer gets two replicas or more."""
    dense, experts = (layout["pp"] * math.prod(layout[a] for a in axes) for axes in (("tp", "cp"), ("etp", "ep")))
    alone = layout["cp"] == 1 and math.lcm(dense, experts) == dense
    return math.lcm(dense, experts) * (2 if layout["distributed_optimizer"] and alone else 1)


def covering(layouts: list[dict[str, Any]], strength: int) -> list[dict[str, Any]]:
    """Few of `layouts`, in which every `strength` values of different axes that occur together in one of them do.

    Greedy: always the one with most of what is missing, first for 2 values, then for 3, ..; so the rows that cover all
    pairs are the first ones, whatever the strength.
    """
    chosen: list[dict[str, Any]] = []
    for size in range(2, strength + 1):
        values = [set(combinations(layout.items(), size)) for layout in layouts]
        missing = set[Any]().union(*values) - set[Any]().union(*(combinations(c.items(), size) for c in chosen))
        while missing:
            best = max(range(len(layouts)), key=lambda number: len(values[number] & missing))
            chosen.append(layouts[best])
            missing -= values[best]
    return chosen


def expert_layouts(strength: int) -> list[dict[str, Any]]:
    """Layouts of up to 8 ranks that cover all `strength` values of `EXPERT_AXES` that can occur together."""
    every = [dict(zip(EXPERT_AXES, values)) for values in product(*EXPERT_AXES.values())]
    fitting = [layout for layout in every if 1 < ranks_of(layout) <= MOST_RANKS]
    return [
        {**layout, "sequence_parallel": layout["tp"] > 1, "world_size": ranks_of(layout)}
        for layout in covering(fitting, strength)
    ]


EXPERT_LAYOUTS = expert_layouts(strength=4)
PAIRS = len(expert_layouts(strength=2))
"""So many of the first rows have every pair."""
FOLDED = {"tp": 2, **SEQUENCE_PARALLEL, "etp": 1, "ep": 4}
DISPATCH_LAYOUTS = [
    *grid({"dispatcher": "allgather", "ep": 2}, [(1, 1, 1, 2), (1, 2, 1, 1), (1, 1, 2, 2)]),
    *grid({"dispatcher": "allgather", **SEQUENCE_PARALLEL, "ep": 2}, [(2, 1, 1, 2), (2, 2, 1, 1)]),
    *grid({"dispatcher": "allgather", "etp": 2}, [(1, 1, 1, 2)]),
    *grid({"dispatcher": "local"}, [(1, 1, 1, 2), (1, 2, 1, 1)]),
    *grid({"grouped_gemm": False, "ep": 4}, [(1, 1, 1, 4), (1, 2, 1, 2)]),
    *grid({"shared_expert_overlap": True, "ep": 2}, [(1, 1, 1, 2), (1, 2, 1, 1), (1, 1, 2, 2)]),
    {**FOLDED, "world_size": 4, "shared_expert_overlap": True},
    {**FOLDED, "world_size": 4, "recompute_granularity": "full"},
    {**FOLDED, "world_size": 4, "recompute_granularity": "selective", "recompute_modules": ("moe",)},
    {**FOLDED, "world_size": 4, "recompute_granularity": "selective", "recompute_modules": ("shared_experts",)},
    {**FOLDED, "world_size": 8, **MEGATRON},
    {**FOLDED, "world_size": 8, "pp": 2, "schedule.name": "interleaved", "vpp": 2},
    {**FOLDED, "world_size": 8, "pp": 2, "schedule.name": "zero_bubble_h1"},
    *grid({"ep": 2, "schedule.name": "zbv"}, [(1, 1, 2, 2)]),
    *grid({"ep": 2, "calculate_per_token_loss": True}, [(1, 1, 1, 2), (1, 2, 1, 2)]),
    *grid({"ep": 2, "average_in_collective": True}, [(1, 1, 1, 2), (1, 1, 1, 4)]),
    *grid({"ep": 2, "optim.data_parallel": "naive"}, [(1, 1, 1, 4)]),
    *grid({"ep": 2, **ZERO, "num_distributed_optimizer_instances": 2}, [(1, 1, 1, 4)]),
]
"""Every way to send tokens and to compute experts, with what else touches their gradients."""
MERGED = {"schedule.overlap_moe_expert_parallel_comm": True}
DELAYED = {**MERGED, "schedule.delay_wgrad_compute": True}


def graphs(*modules: str) -> dict[str, Any]:
    """Emulated graphs of these parts of the layers."""
    return {"graph.cuda_graph_impl": "emulated", "graph.cuda_graph_modules": modules}


TO_DISPATCH = graphs("attn", "moe_router", "moe_preprocess")
"""Graphs of all that comes before the experts' all-to-all."""
MERGED_LAYOUTS = [
    *grid({**MERGED, "ep": 2}, [(1, 1, 1, 2), (1, 1, 2, 2)]),
    {**DELAYED, "tp": 2, **SEQUENCE_PARALLEL, "etp": 1, "ep": 2, "world_size": 2},
    *grid({**DELAYED, "ep": 2}, [(1, 1, 2, 2)]),
    *grid({**MERGED, "ep": 2, "vpp": 2, **MEGATRON}, [(1, 1, 2, 2)]),
    *grid({**DELAYED, "ep": 2, "schedule.name": "dualpipe_v"}, [(1, 1, 2, 2)]),
    *grid({**MERGED, "ep": 2, "schedule.name": "dualpipe_v", "variable_seq_lengths": True}, [(1, 1, 2, 2)]),
    *grid({**DELAYED, "ep": 4, **ZERO}, [(1, 1, 1, 8), (1, 1, 2, 4)]),
    *grid({**MERGED, "ep": 8}, [(1, 1, 1, 8)]),
    *grid({**DELAYED, "ep": 2, "etp": 2}, [(1, 1, 2, 4)]),
    *grid({**MERGED, "ep": 2}, [(1, 2, 1, 1), (1, 2, 2, 1)]),
    {**DELAYED, **FOLDED, "pp": 2, "vpp": 2, "world_size": 8, "calculate_per_token_loss": True},
    *grid(
        {
            **MERGED, "ep": 2, "recompute_granularity": "selective",
            "recompute_modules": ("core_attn", "mlp", "shared_experts"),
        },
        [(1, 1, 1, 2), (1, 1, 2, 2)],
    ),
    *grid({**DELAYED, "ep": 2, "grouped_gemm": False, "optim.data_parallel": "naive"}, [(1, 1, 1, 4)]),
    *grid(
        {
            **DELAYED, "ep": 2, "recompute_granularity": "selective",
            "recompute_modules": ("core_attn", "layernorm", "mlp", "shared_experts"),
        },
        [(1, 1, 1, 2), (1, 1, 2, 2)],
    ),
    *grid({**MERGED, "ep": 2, **TO_DISPATCH}, [(1, 1, 1, 2), (1, 1, 2, 2)]),
    *grid({**DELAYED, "ep": 2, **TO_DISPATCH}, [(1, 1, 1, 2), (1, 1, 2, 2)]),
    *grid({**DELAYED, "ep": 2, "vpp": 2, **MEGATRON, **graphs("attn", "moe_router")}, [(1, 1, 2, 2)]),
    *grid({**MERGED, "ep": 2, "vpp": 2, **TO_DISPATCH}, [(1, 1, 2, 2)]),
    *grid({**DELAYED, "ep": 2, "schedule.name": "dualpipe_v", **TO_DISPATCH}, [(1, 1, 2, 2)]),
    *grid({**DELAYED, "ep": 4, **ZERO, **graphs("moe_router")}, [(1, 1, 1, 4)]),
    *grid({**MERGED, "ep": 2, **graphs("attn")}, [(1, 2, 1, 1)]),
    {**DELAYED, **FOLDED, "world_size": 4, **TO_DISPATCH},
    *grid(
        {
            **DELAYED, "ep": 2, **TO_DISPATCH, "recompute_granularity": "selective",
            "recompute_modules": ("core_attn", "mlp", "shared_experts"),
        },
        [(1, 1, 2, 2)],
    ),
]  # fmt: skip
"""Merged pairs under every schedule that has them, over ep 2, 4 and 8, and with graphs along their order."""
MERGED_FP8_LAYOUTS = [
    *grid({**MERGED, "ep": 2}, [(1, 1, 1, 2), (1, 1, 2, 2), (1, 2, 2, 1)]),
    *grid({**DELAYED, "ep": 2}, [(1, 1, 2, 2)]),
    *grid({**MERGED, "ep": 2, "vpp": 2, **MEGATRON}, [(1, 1, 2, 2)]),
    {**DELAYED, "tp": 2, **SEQUENCE_PARALLEL, "etp": 1, "ep": 2, "pp": 2, "vpp": 2, "world_size": 4},
    *grid({**DELAYED, "ep": 2, "schedule.name": "dualpipe_v"}, [(1, 1, 2, 2)]),
    *grid({**DELAYED, "ep": 4, **ZERO}, [(1, 1, 2, 4)]),
    *grid(
        {**MERGED, "ep": 2, "recompute_granularity": "selective", "recompute_modules": ("mlp", "shared_experts")},
        [(1, 1, 2, 2)],
    ),
]
"""The same in fp8 with delayed scaling, whose numbers no layout changes."""
BERT_LAYOUTS = [
    *grid({}, [(2, 1, 1, 1), (4, 1, 1, 1), (1, 1, 2, 1), (1, 1, 4, 1), (2, 1, 2, 2), (1, 1, 1, 2)]),
    *grid(SEQUENCE_PARALLEL, [(2, 1, 1, 1), (4, 1, 2, 1), (2, 1, 2, 2)]),
    *grid(FULL, [(2, 1, 1, 1), (1, 1, 2, 1)]),
    *grid({"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp")}, [(2, 1, 2, 1)]),
    *grid({"schedule.name": "interleaved", "vpp": 2}, [(1, 1, 2, 1), (2, 1, 2, 1)]),
    *grid({"schedule.name": "zero_bubble_h1"}, [(1, 1, 2, 1)]),
    *grid({"schedule.name": "zbv", **SEQUENCE_PARALLEL}, [(2, 1, 2, 1)]),
    *grid(ZERO, [(1, 1, 1, 2), (1, 1, 4, 2)]),
    *grid({**MEGATRON, **SEQUENCE_PARALLEL, **FULL}, [(2, 1, 2, 2)]),
]
"""Every axis that a BERT has, and what else touches its ends."""


def split(changes: dict[str, Any], shapes: list[tuple[int, int, int, int]]) -> list[dict[str, Any]]:
    """Layouts (tp, encoder stages, decoder stages, dp) of an encoder-decoder; 0 and 0 is no pipeline."""
    layouts = []
    for tp, encoder, decoder, dp in shapes:
        pp = max(1, encoder + decoder)
        stages = {"pp": pp, "split_rank": encoder} if pp > 1 else {}
        layouts.append({"tp": tp, **stages, "world_size": tp * pp * dp, **changes})
    return layouts


SCOPE_MAMBA = {"graph.cuda_graph_impl": "emulated", "graph.cuda_graph_modules": ["mamba"]}
MAMBA_LAYOUTS = [
    *grid({}, [(2, 1, 1, 1), (4, 1, 1, 1), (1, 1, 2, 1), (1, 1, 4, 1), (2, 1, 2, 2), (1, 1, 1, 2)]),
    *grid(SEQUENCE_PARALLEL, [(2, 1, 1, 1), (4, 1, 2, 1)]),
    *grid({**FULL, **SEQUENCE_PARALLEL}, [(2, 1, 2, 1)]),
    *grid({"schedule.name": "interleaved", "vpp": 2}, [(1, 1, 2, 1), (2, 1, 2, 1)]),
    *grid({"schedule.name": "zero_bubble_h1"}, [(1, 1, 2, 1)]),
    *grid({"schedule.name": "zbv", **SEQUENCE_PARALLEL}, [(2, 1, 2, 1)]),
    *grid(ZERO, [(1, 1, 1, 2), (2, 1, 2, 2)]),
    *grid({**MEGATRON, **SEQUENCE_PARALLEL}, [(2, 1, 1, 2)]),
    *grid(SCOPE_MAMBA, [(2, 1, 1, 1), (1, 1, 2, 1)]),
]
"""Every axis that a Mamba model has, and graphs of its layers."""
T5_LAYOUTS = [
    *split({}, [(2, 0, 0, 1), (4, 0, 0, 1), (1, 1, 1, 1), (1, 2, 2, 1), (1, 1, 2, 1), (2, 1, 1, 2), (1, 0, 0, 2)]),
    *split(SEQUENCE_PARALLEL, [(2, 0, 0, 1), (4, 1, 1, 1), (2, 2, 2, 1)]),
    *split(FULL, [(2, 0, 0, 1), (1, 1, 1, 1)]),
    *split({"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp")}, [(2, 1, 1, 1)]),
    *split({"schedule.name": "gpipe"}, [(1, 2, 1, 1)]),
    *split({"schedule.name": "zero_bubble_h1"}, [(1, 1, 1, 1), (1, 2, 2, 1)]),
    *split(ZERO, [(1, 0, 0, 2), (1, 2, 2, 2)]),
    *split({**MEGATRON, **SEQUENCE_PARALLEL, **FULL}, [(2, 1, 1, 2)]),
]
"""Every axis that a T5 has, with stages given to its halves in several ways."""
SAME_RANKS_LAYOUTS = [
    *grid({"ep": 8}, [(1, 8, 1, 1)]),
    *grid({"ep": 8, **ZERO}, [(1, 8, 1, 1)]),
    *grid({"ep": 8, "cp_comm_type": "all_gather"}, [(1, 8, 1, 1)]),
    *grid({"ep": 4, "etp": 2}, [(1, 8, 1, 1)]),
    *grid({"ep": 8, "etp": 1, **SEQUENCE_PARALLEL}, [(2, 4, 1, 1)]),
    *grid({"ep": 4}, [(1, 4, 2, 1)]),
]
"""cp8 ep8 on 8 ranks and its neighbours: ranks that share one sequence share out the experts (arXiv 2504.14960)."""
COMPILED = {"compile": "layers"}
COMPILED_LAYOUTS = [
    *grid(COMPILED, [(1, 1, 1, 1), (2, 1, 2, 1), (1, 2, 1, 1)]),
    *grid({**COMPILED, **SEQUENCE_PARALLEL}, [(2, 1, 1, 1), (2, 2, 1, 1)]),
    *grid({**COMPILED, **FULL}, [(2, 1, 2, 1)]),
    *grid({**COMPILED, "optim.data_parallel": "naive"}, [(1, 1, 1, 2)]),
    *grid({**COMPILED, **MEGATRON, "schedule.name": "interleaved", "vpp": 2}, [(1, 1, 2, 2)]),
    *grid({**COMPILED, **MEGATRON, **SEQUENCE_PARALLEL}, [(2, 1, 1, 2)]),
]
"""Compiled layers: what communicates around and inside them, and what runs or gathers them again."""
COMPILED_EXPERT_LAYOUTS = [
    *grid({**COMPILED, "ep": 2}, [(1, 1, 1, 2), (1, 2, 1, 1), (1, 1, 2, 2)]),
    {**COMPILED, **FOLDED, "world_size": 8, **MEGATRON},
]
PRESETS = {"tiny": "GPT-2's blocks, tied embeddings", "llama_tiny": "Llama's blocks, untied output"}

INTRODUCTION = f"""# Parity of all layouts with one process

These tables show how far training under each layout differs from training in a single process. Each row trains the same
model twice for several optimizer steps, on the same data and from the same seed: under a layout with one process per
rank (gloo, CPU), and in one process. To compare a layout of your own, run [`labkit
parity`](howto/compare_layouts.md).

A difference is ‖a − b‖ / max(‖b‖, floor) over whole tensors, gathered from the ranks. The floor is 1e-6 of the global
norm for gradients and lr·√n for parameters. Each row gives the largest difference over all tensors of the first and the
last step. *First difference* names the first tensor, in the order of training, that differs by more than 1e-10 in
float64 or 1e-5 in float32. At some seeds rounding alone exceeds that in some tensors. Such a row says *rounding* if
reordering the sums in a single process causes as large a difference (`labkit/train/parity/rounding.py`).

- The first four tables, of layouts: {STEPS} steps with 4 layers and 4 samples.
- Schedules, stages and transfers: {SCHEDULE_STEPS} steps ({STEPS} in the first table, which has every schedule) with
  16 layers, so that pp4 vpp4 has 16 stages of one layer, and {MICROBATCHES} microbatches per replica.
- Sequence and context parallelism, recomputation, gradient buckets and the distributed optimizer: {DATA_STEPS} steps
  with 4 layers and {DATA_BATCH} samples.
- Experts: {EXPERT_STEPS} steps with 4 layers, of which all or every second have 8 or 16 experts, and {EXPERT_BATCH}
  samples, 2 per microbatch.
- Compiled layers: {COMPILED_STEPS} steps with 4 layers and {DATA_BATCH} samples, with experts {EXPERT_BATCH}.
- BERT: {BERT_STEPS} steps with 4 layers. T5: {T5_STEPS} steps with 2 layers in the encoder and 2 in the decoder.
  Mamba: {MAMBA_STEPS} steps with 4 layers.

In models with experts, the single process computes one expert after another and sends no tokens. In float32 the layouts
replay its choice of experts. `scripts/parity_matrix.py` writes this page, and `make sweep` checks the same rows.
"""


def small(preset: str) -> RunConfig:
    """A preset with its kinds of blocks at sizes that 8 ranks on two cores train in seconds."""
    shape = {"layers": 4, "hidden": 32, "heads": 4, "seq_length": 16, "global_batch_size": 4}
    if preset == "llama_tiny":
        shape |= {"kv_heads": 4, "heads": 8, "model.ffn_hidden": 64}
    return presets.get(preset).override(shape)


def deep(preset: str, *, dp: int = 1) -> RunConfig:
    """`small` with 16 layers, which 16 stages can share, and 8 microbatches."""
    return small(preset).override({"layers": 16, "global_batch_size": MICROBATCHES * dp})


def schedule_layouts(dp: int = 1) -> list[dict[str, Any]]:
    """Every schedule under {pp2, pp4} x {tp1, tp2}, up to 8 ranks."""
    return [
        {"tp": tp, "pp": pp, "world_size": tp * pp * dp, **schedule}
        for schedule, pp, tp in product(SCHEDULES, (2, 4), (1, 2))
        if tp * pp * dp <= 8
    ]


SWEEPS: dict[str, tuple[RunConfig, list[dict[str, Any]], str]] = {
    "Schedules, tied embeddings": (deep("tiny"), schedule_layouts(), "float64"),
    "Schedules, tied embeddings, two replicas": (deep("tiny", dp=2), schedule_layouts(dp=2), "float64"),
    "Schedules, tied embeddings, float32": (deep("tiny"), schedule_layouts(), "float32"),
    "Schedules, untied output": (deep("llama_tiny"), schedule_layouts(), "float64"),
    "Stages": (deep("tiny"), STAGES, "float64"),
    "Transfers": (deep("tiny"), TRANSFERS, "float64"),
}
"""Title -> configuration, layouts, dtype; 16 layers and 8 microbatches on every replica."""


def schedule_steps(title: str) -> int:
    """Optimizer steps of a table of `SWEEPS`: the first has every schedule and runs as long as the layouts do."""
    return STEPS if title == next(iter(SWEEPS)) else SCHEDULE_STEPS


def wide(preset: str) -> RunConfig:
    """`small` with a batch that 2, 3, 4 and 6 replicas share equally."""
    return small(preset).override({"global_batch_size": DATA_BATCH})


DATA_SWEEPS: dict[str, tuple[RunConfig, list[dict[str, Any]], str]] = {
    f"{title}, {preset}, {dtype}": (wide(preset), layouts[::every], dtype)
    for title, layouts in {
        "Sequence and context parallel": SEQUENCE_LAYOUTS,
        "Recomputation": RECOMPUTE_LAYOUTS,
        "Gradient buckets": DATA_LAYOUTS,
        "Distributed optimizer": ZERO_LAYOUTS,
    }.items()
    for preset, dtype, every in (("tiny", "float64", 1), ("llama_tiny", "float64", 2), ("llama_tiny", "float32", 3))
}
"""The same for sequence, context and data parallelism and recomputation; with Llama's blocks every second layout, in
float32 every third. Those have no biases: the gradient of a key bias is zero but for rounding, and an average over 6
replicas or a sum over tokens rounds it so that it moves by 1e-5 of a step, a verdict of `rounding`."""


def sparse(preset: str) -> RunConfig:
    """A preset with experts, at sizes that 8 ranks on two cores train in seconds; an expert may get no token at all."""
    shape: dict[str, Any] = {"layers": 4, "hidden": 32, "heads": 4, "seq_length": 16, "micro_batch_size": 2}
    if preset != "tiny_moe":
        shape |= {"kv_heads": 2, "model.ffn_hidden": 64}
    if preset == "deepseek_tiny":
        shape["layer_freq"] = (0, 1)
    return presets.get(preset).override({**shape, "global_batch_size": EXPERT_BATCH, "moe.ffn_hidden": 32})


EXPERT_SWEEPS: dict[str, tuple[RunConfig, list[dict[str, Any]], str]] = {
    "Experts, tiny_moe, float64": (sparse("tiny_moe"), EXPERT_LAYOUTS, "float64"),
    "Experts, deepseek_tiny, float64": (sparse("deepseek_tiny"), EXPERT_LAYOUTS[1::4], "float64"),
    "Experts, mixtral_tiny, float32": (sparse("mixtral_tiny"), EXPERT_LAYOUTS[3::4], "float32"),
    "Dispatchers, deepseek_tiny, float64": (sparse("deepseek_tiny"), DISPATCH_LAYOUTS, "float64"),
    "Merged pairs, deepseek_tiny, float64": (
        sparse("deepseek_tiny").override({"global_batch_size": 2 * EXPERT_BATCH}),
        MERGED_LAYOUTS,
        "float64",
    ),
    "Merged pairs in fp8, deepseek_tiny, float64": (
        sparse("deepseek_tiny").override({"global_batch_size": 2 * EXPERT_BATCH, "optim.fp8": "hybrid"}),
        MERGED_FP8_LAYOUTS,
        "float64",
    ),
    "CP and EP on the same ranks, float64": (sparse("tiny_moe"), SAME_RANKS_LAYOUTS, "float64"),
    "CP and EP on the same ranks, float32": (sparse("mixtral_tiny"), SAME_RANKS_LAYOUTS, "float32"),
}
"""Mixtures of experts. All layouts of the first table together have every four values of `EXPERT_AXES`."""


COMPILED_SWEEPS: dict[str, tuple[RunConfig, list[dict[str, Any]], str]] = {
    "Compiled layers, tiny, float64": (wide("tiny"), COMPILED_LAYOUTS, "float64"),
    "Compiled layers, llama_tiny, float32": (wide("llama_tiny"), COMPILED_LAYOUTS[1::3], "float32"),
    "Compiled layers, tiny_moe, float64": (sparse("tiny_moe"), COMPILED_EXPERT_LAYOUTS, "float64"),
}
"""Layers made by torch.compile."""


def masked(placement: str) -> RunConfig:
    """A BERT with the norms of one layout of its figure, at sizes that 8 ranks on two cores train in seconds."""
    return small("bert_tiny").override({"global_batch_size": 8, "model.norm_placement": placement})


BERT_SWEEPS: dict[str, tuple[RunConfig, list[dict[str, Any]], str]] = {
    "BERT, pre-norm, float64": (masked("pre"), BERT_LAYOUTS, "float64"),
    "BERT, post-norm, float64": (masked("post"), BERT_LAYOUTS, "float64"),
}
"""BERT in both layouts of figure 7 of arXiv 1909.08053."""


def encoder_decoder(form: str) -> RunConfig:
    """A T5 in Megatron's form (`learned`) or Hugging Face's (`relative`), with 2 layers in each half.

    Samples have unequal numbers of labels. The loss of the second form divides by their sum over the global batch.
    """
    shape: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "seq_length": 32, "decoder_seq_length": 16}
    if form == "relative":
        shape |= {
            "position": form,
            "relative_buckets": 8,
            "relative_max_distance": 16,
            "norm": "rmsnorm",
            "bias": False,
        }
        shape |= {"model.activation": "geglu", "model.ffn_hidden": 48, "calculate_per_token_loss": True}
    return presets.get("t5_tiny").override({**shape, "micro_batch_size": 2, "global_batch_size": 8})


def scanned(pattern: str | None) -> RunConfig:
    """A Mamba model with this pattern of layers (None: Mamba alone), at sizes that 8 ranks train in seconds."""
    return small("mamba_tiny").override({"hybrid_override_pattern": pattern, "model.mamba_state_dim": 8})


MAMBA_SWEEPS: dict[str, tuple[RunConfig, list[dict[str, Any]], str]] = {
    "Mamba alone, float64": (scanned(None), MAMBA_LAYOUTS, "float64"),
    "Mamba with attention and MLP, float64": (scanned("MM*-"), MAMBA_LAYOUTS, "float64"),
}
"""Mamba-2 in layers of one part each."""
T5_SWEEPS: dict[str, tuple[RunConfig, list[dict[str, Any]], str]] = {
    "T5, learned positions, float64": (encoder_decoder("learned"), T5_LAYOUTS, "float64"),
    "T5, relative positions, float64": (encoder_decoder("relative"), T5_LAYOUTS, "float64"),
}
"""T5 in both of its forms."""


def section(title: str, about: str, report: ParityReport) -> str:
    """One table in Markdown."""
    head = (
        "| layout | ranks | loss | worst gradient | worst parameter | first difference |\n|---|---|---|---|---|---|\n"
    )
    rows = ""
    for row in report.rows:
        name = row.name.replace("|", "\\|")  # a layout's text has them, and so have tables
        numbers = (f"{difference:.1e}" for difference in (row.loss_diff, row.grad_diff, row.param_diff))
        first = f"{row.first_difference} ({row.verdict})" if row.first_difference else "none"
        rows += f"| {' | '.join([name, str(row.world_size), *numbers, first])} |\n"
    return f"\n## {title}\n\n{about}{report.sentence}\n\n{head}{rows}"


def planned() -> list[tuple[str, str, RunConfig, list[dict[str, Any]], int, str]]:
    """Title, a word about it, configuration, layouts, steps and dtype of every table, in their order."""
    rows = [
        (f"{preset}, {dtype}", f"{PRESETS[preset]}. ", small(preset), LAYOUTS, STEPS, dtype)
        for preset, dtype in product(PRESETS, ("float64", "float32"))
    ]
    for title, (config, layouts, dtype) in SWEEPS.items():
        rows.append((title, "", config, layouts, schedule_steps(title), dtype))
    for title, (config, layouts, dtype) in DATA_SWEEPS.items():
        rows.append((title, "", config, layouts, DATA_STEPS, dtype))
    for title, (config, layouts, dtype) in EXPERT_SWEEPS.items():
        rows.append((title, "", config, layouts, EXPERT_STEPS, dtype))
    for title, (config, layouts, dtype) in COMPILED_SWEEPS.items():
        rows.append((title, "", config, layouts, COMPILED_STEPS, dtype))
    for title, (config, layouts, dtype) in BERT_SWEEPS.items():
        rows.append((title, "", config, layouts, BERT_STEPS, dtype))
    for title, (config, layouts, dtype) in T5_SWEEPS.items():
        rows.append((title, "", config, layouts, T5_STEPS, dtype))
    for title, (config, layouts, dtype) in MAMBA_SWEEPS.items():
        rows.append((title, "", config, layouts, MAMBA_STEPS, dtype))
    return rows


def committed() -> dict[str, str]:
    """The tables of the file as it is, by title."""
    if not TARGET.exists():
        return {}
    parts = TARGET.read_text(encoding="utf-8").split("\n## ")[1:]
    return {part.split("\n", 1)[0]: f"\n## {part}" for part in parts}


def main(chosen: Sequence[str] = ()) -> int:
    """Measure the tables whose titles begin with one of `chosen`, all where none is; exit code 1 if a layout differs.

    The others stay as they are in the file.
    """
    sections, ok = committed(), True
    for title, about, config, layouts, steps, dtype in planned():
        if chosen and not title.startswith(tuple(chosen)):
            continue
        report = compare(config, layouts, steps=steps, dtype=dtype, on_row=lambda row: print(row.name, flush=True))
        print(report, flush=True)
        sections[title] = section(title, about, report)
        ok = ok and report.ok
        known = [sections[title] for title, *_ in planned() if title in sections]
        TARGET.write_text(INTRODUCTION + "".join(known), encoding="utf-8")  # after each table: the next may fail
    print(f"wrote {TARGET.name}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
