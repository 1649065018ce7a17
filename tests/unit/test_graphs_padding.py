"""Costs of one forward with partial graphs, and with padded experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from labkit.config import presets
from labkit.graphs.study.padding import forward_costs, rows_by_expert
from labkit.models import GPTModel
from labkit.parallel import single_process_groups

CONFIG = presets.tiny_moe().override({"model.layers": 2, "model.hidden": 32, "model.seq_length": 16})
PARTIAL, PADDED = ("attn", "moe_router", "moe_preprocess"), ("attn", "moe")


def gpt(factor: float | None = None) -> GPTModel:
    moe = replace(CONFIG.moe, layer_freq=(1,), capacity_factor=factor, pad_to_capacity=factor is not None)
    return GPTModel(CONFIG.model, single_process_groups(), layers=range(2), moe=moe, seed=0)


def windows() -> torch.Tensor:
    return torch.randint(1024, (2, 17), generator=torch.Generator().manual_seed(0))


def test_every_token_has_k_rows_and_a_record_is_taken_off_again() -> None:
    model = gpt()
    rows = rows_by_expert(model, windows())
    assert rows.shape == (2, 8) and rows.sum(1).tolist() == [2 * 32, 2 * 32], "k = 2 rows of 32 tokens"
    assert all(layer.router.record is None for layer in model.moe_layers())


@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0])
def test_padding_computes_the_factor_and_drops_what_exceeds_it(factor: float) -> None:
    """The mean is 32 x 2 / 8 = 8 rows of an expert, so the capacity is 8 times the factor; at E/k = 4 it is all 32."""
    graph = replace(CONFIG.graph, cuda_graph_impl="emulated")
    free = forward_costs(gpt(), windows(), replace(graph, cuda_graph_modules=PARTIAL))
    padded = forward_costs(gpt(factor), windows(), replace(graph, cuda_graph_modules=PADDED))
    assert free.rows == free.choices == padded.choices == 128 and free.dropped == 0
    assert padded.rows == 128 * factor
    over = (rows_by_expert(gpt(factor), windows()) - 8 * factor).clamp(min=0).sum()
    assert padded.dropped == over and (padded.dropped > 0) == (factor == 1.0)
    assert free.sent_bytes == padded.sent_bytes == 0, "one rank"
    assert padded.kept_bytes > 0 and (padded.kept_bytes > free.kept_bytes) == (factor > 1)
