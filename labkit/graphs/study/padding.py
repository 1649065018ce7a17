"""What a forward of a GPT with experts costs a rank: with graphs that end inside its layers, or with padded experts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.comm.ledger import CommLedger
from labkit.config import GraphConfig
from labkit.graphs.cuda_graph_helper import CudaGraphHelper
from labkit.graphs.pool import play_back
from labkit.models.saved_tensors import SavedTensors
from labkit.schedules import one_f_one_b


class RankCosts(NamedTuple):
    """Costs of one forward on one rank, all layers together."""

    rows: int
    """Rows that leave this rank for experts, empty ones included."""
    sent_bytes: int
    """Bytes that go to other ranks by all-to-all, there and back."""
    kept_bytes: int
    """Bytes that are kept for the backward by graphs, and by experts that run without one."""
    choices: int
    """Choices of this rank's tokens, before any limit."""
    dropped: int
    """Choices beyond an expert's capacity."""


def rows_by_expert(gpt: Any, windows_BS: Tensor) -> Tensor:
    """Rows of this rank that chose each expert of each layer, before any limit: int64 [layers, E].

    windows_BS: tokens [B, S + 1]; the last one is only a label. Runs a forward, so all ranks of `ep` call it.
    """
    routers = [layer.router for layer in gpt.moe_layers()]
    for router in routers:
        router.record = []
    try:
        with torch.no_grad():
            gpt(windows_BS[:, :-1], None, windows_BS[:, 1:])
        return torch.stack([(router.record[0] & 1).sum((0, 1)) for router in routers])  # bit 0: chosen
    finally:
        for router in routers:
            router.record = None


def forward_costs(gpt: Any, windows_BS: Tensor, graph: GraphConfig) -> RankCosts:
    """Capture emulated graphs of the layers, run one forward with them, and count.

    gpt: a model whose layers all have experts. graph: `emulated`, with the scope to capture.
    """
    wanted_LE = rows_by_expert(gpt, windows_BS)
    samples, positions = windows_BS.shape[0], windows_BS.shape[1] - 1
    helper = CudaGraphHelper([gpt], graph, positions, samples, schedule=one_f_one_b(1, 1))
    helper.create_cudagraphs()
    with CommLedger() as ledger, SavedTensors(gpt) as saved:
        _loss = gpt(windows_BS[:, :-1], None, windows_BS[:, 1:]).mean()  # as long as it lives, so do saved tensors
        eager = sum(size for name, size in saved.by_module.items() if "experts" in name)
    memory, pool = helper.memory(), helper.pool
    assert memory is not None and pool is not None, "emulated graphs tell what they hold"
    forwards = play_back(pool.history).frames[: len(helper.layers)]
    moe, dispatcher = gpt.moe_layers()[0].moe, gpt.moe_layers()[0].token_dispatcher
    rows, dropped = int(wanted_LE.sum()), 0
    if moe.pad_to_capacity:
        capacity = dispatcher.capacity(samples * positions)
        rows = wanted_LE.numel() * capacity
        dropped = int((wanted_LE - capacity).clamp(min=0).sum())
    return RankCosts(
        rows=rows,
        sent_bytes=sum(one.bytes - one.kept for one in ledger.select(operation="all_to_all")),
        kept_bytes=memory.static_inputs + forwards[-1].live_bytes + eager,
        choices=int(wanted_LE.sum()),
        dropped=dropped,
    )
