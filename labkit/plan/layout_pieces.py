"""What the bounds of many layouts are made of: time and bytes of one layer and of the ends, for each distinct split.

A million layouts have only some ten thousand ways to split a layer, because schedules, stages and data parallelism do
not change it. Every number here is that of `layer_times.py`, `action_times.py` and `activations.py`. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import numpy as np

from labkit.plan.action_times import embedding_passes, loss_passes
from labkit.plan.activations import end_activation_bytes, layers_activation_bytes
from labkit.plan.layer_times import layer_passes
from labkit.plan.layout import layout_of
from labkit.plan.layouts import splits_backward, workload_of
from labkit.plan.machine import Machine
from labkit.plan.parameters import expert_parameters, layer_parameters
from labkit.plan.pieces import Terms
from labkit.plan.sizes import padded_vocab
from labkit.plan.stage_activations import most_that_is_kept, share_of
from labkit.plan.workload import Workload

Progress = Callable[[str, int, int], None]
"""Called with what is done, how many are done, and how many there are."""
TIME_KEY = ("tp", "cp", "ep", "etp", "micro_batch", "recompute", "sp")
"""Columns that decide the time of a layer, with whether backwards are split."""
MEMORY_KEY = ("tp", "cp", "etp", "micro_batch", "recompute", "sp")
"""Columns that decide the activations of a layer."""
STATE_KEY = ("tp", "ep", "etp")
"""Columns that decide the parameters of a layer on a rank."""
_EVERY = 64
"""Pieces between two reports of progress."""


def distinct(columns: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the first rows (K,) of distinct combinations, and the combination of every row (N,)."""
    key = np.zeros(len(next(iter(columns := list(columns)))), dtype=np.int64)
    for column in columns:
        values, places = np.unique(column, return_inverse=True)
        _, first, key = np.unique(key * len(values) + places, return_index=True, return_inverse=True)
    return first, key


def layer_kinds(workload: Workload) -> list[tuple[int, int]]:
    """Return (index of the first layer, how many) of the dense layers and of those with experts, if there are any."""
    moe, layers = workload.config.moe, range(workload.config.model.layers)
    by_kind = [[index for index in layers if moe.is_moe_layer(index) == experts] for experts in (False, True)]
    return [(indices[0], len(indices)) for indices in by_kind if indices]


def times_of_pieces(base: Workload, machine: Machine, rows: np.ndarray, progress: Progress) -> np.ndarray:
    """Return (K, kinds + 2, 4): of a layer of each kind, of the embedding and of the loss, for each row.

    The four are a forward's seconds on the device and on the host, and a backward's, with what it computes again.
    """
    kinds = layer_kinds(base)
    found = np.zeros((len(rows), len(kinds) + 2, 4))
    for number, row in enumerate(rows):
        workload, splits = workload_of(base, row), splits_backward(int(row["schedule"]))
        config, layout = workload.config, layout_of(workload, splits_backward=splits)
        made = [
            layer_passes(config.model, config.moe if config.moe.is_moe_layer(index) else None, layout, machine)
            for index, _ in kinds
        ]
        made += [embedding_passes(config.model, layout, machine), loss_passes(config.model, layout, machine)]
        gap = machine.kernel_launch if not layout.graphed else 0.0
        host = machine.host_launch if not layout.graphed else 0.0
        for place, each in enumerate(made):
            back = (*each.input_grad, *each.weight_grad, *each.recompute)
            found[number, place] = *_cost(each.forward, gap, host), *_cost(back, gap, host)
        if number % _EVERY == 0:
            progress("times of layers", number, len(rows))
    return found


def _cost(terms: Terms, gap: float, host: float) -> tuple[float, float]:
    """Return the seconds of terms on the device, and those that the host needs to launch them."""
    launches = sum(term.launches for term in terms)
    return sum(term.seconds for term in terms) + launches * gap, launches * host


def kept_by_pieces(base: Workload, device: Literal["cpu", "cuda"], rows: np.ndarray, progress: Progress) -> np.ndarray:
    """Return (K, kinds + 1): bytes that a microbatch keeps in a layer of each kind, and after the last layer."""
    kinds = layer_kinds(base)
    found = np.zeros((len(rows), len(kinds) + 1))
    for number, row in enumerate(rows):
        workload = workload_of(base, row)
        config = workload.config
        share, moe = share_of(config, device, workload.expert_load), most_that_is_kept(config.moe)
        found[number, :-1] = [
            layers_activation_bytes(config.model, share, range(index, index + 1), moe) for index, _ in kinds
        ]
        found[number, -1] = end_activation_bytes(config.model, share, pre_process=False, post_process=True)
        if number % _EVERY == 0:
            progress("activations of layers", number, len(rows))
    return found


def parameters_of_pieces(base: Workload, rows: np.ndarray) -> np.ndarray:
    """Return (K, kinds + 1, 2): parameters outside and inside experts of a layer of each kind, and of the words."""
    model, moe, kinds = base.config.model, base.config.moe, layer_kinds(base)
    found = np.zeros((len(rows), len(kinds) + 1, 2))
    for number, row in enumerate(rows):
        tp, ep, etp = (int(row[name]) for name in STATE_KEY)
        for place, (index, _) in enumerate(kinds):
            whole = layer_parameters(model, tp, moe=moe, index=index, ep=ep, etp=etp)
            experts = 0
            if moe.is_moe_layer(index):
                experts = moe.num_experts // ep * (expert_parameters(model, moe) // etp)
            found[number, place] = whole - experts, experts
        found[number, -1, 0] = padded_vocab(model, tp) // tp * model.hidden
    return found
