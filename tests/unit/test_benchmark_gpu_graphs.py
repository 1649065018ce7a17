"""What the GPU benchmark of graphs builds and counts, on the host; measured it is elsewhere."""

from __future__ import annotations

from dataclasses import replace

import gpu_graphs
import torch
from gpu_graphs import PARTS, pipeline_pool, same_losses
from gpu_steps import PLAIN

from labkit.config import GraphConfig, ModelConfig, MoEConfig

HOST = torch.device("cpu")
EMULATED = GraphConfig(cuda_graph_impl="emulated", cuda_graph_warmup_steps=1)
TINY = ModelConfig(layers=2, hidden=16, heads=2, vocab_size=64, seq_length=16, **PLAIN)


def test_dense_steps_with_graphs_are_the_eager_ones() -> None:
    graphs = {"layers": EMULATED, "whole": replace(EMULATED, cuda_graph_impl="full_iteration")}
    rows = same_losses(TINY, graphs, steps=4, precision="fp32", device=HOST)
    assert [row["equal"] for row in rows] == [True, True]


def test_partial_steps_with_graphs_are_the_eager_ones() -> None:
    graphs = {name: replace(EMULATED, cuda_graph_modules=scope) for name, scope in PARTS.items()}
    moe = MoEConfig(num_experts=4, top_k=2)
    rows = same_losses(replace(TINY, activation="swiglu"), graphs, moe, steps=3, precision="fp32", device=HOST)
    assert [row["equal"] for row in rows] == [True] * len(PARTS)


def test_what_is_said_of_an_iteration() -> None:
    made = gpu_graphs.iteration(TINY, EMULATED, precision="fp32", device=HOST)
    assert made.graphed_layers() == 2 and (made.pool_bytes() or 0) > 0
    eager = gpu_graphs.iteration(TINY, precision="fp32", device=HOST)
    assert eager.graphed_layers() == 0 and eager.pool_bytes() is None


def test_the_pool_of_a_pipeline_is_flat() -> None:
    small = replace(TINY, layers=1)
    [row] = pipeline_pool(2, 4, 1, small, replays=32, device=HOST, impl="emulated", dtype=torch.float32)
    assert row["grown_mib"] == 0
    assert row["pool_mib"] > 0
