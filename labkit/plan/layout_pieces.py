"""What the bounds of many layouts are made of: time and bytes of one layer and of the ends, for each distinct split.

A million layouts have only some ten thousand ways to split a layer, because schedules, stages and data parallelism do
not change it. Every number here is that of `layer_times.py`, `action_times.py` and `activations.py`. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal

import numpy as np

from labkit.config import RunConfig
from labkit.plan.action_times import embedding_passes, loss_passes
from labkit.plan.activations import end_activation_bytes, layers_activation_bytes
from labkit.plan.layer_times import layer_passes, repeated_terms
from labkit.plan.layout import Layout, layout_of
from labkit.plan.layouts import RECOMPUTATIONS
from labkit.plan.machine import Machine
from labkit.plan.parameters import expert_parameters, layer_parameters
from labkit.plan.pieces import Terms
from labkit.plan.sizes import padded_vocab
from labkit.plan.stage_activations import most_that_is_kept, share_of
from labkit.plan.workload import Workload

Progress = Callable[[str, int, int], None]
"""Called with what is done, how many are done, and how many there are."""
LAYER_KEY = ("tp", "cp", "ep", "etp", "micro_batch", "sp")
"""Columns that decide the time of a layer with every recomputation. A split backward, whose collectives have less to
hide behind, is at least as long."""
ENDS_KEY = ("tp", "cp", "micro_batch", "sp")
"""Columns that decide the time of the embedding and of the loss."""
MEMORY_KEY = ("tp", "cp", "etp", "micro_batch", "recompute", "sp")
"""Columns that decide the activations of a layer."""
STATE_KEY = ("tp", "ep", "etp")
"""Columns that decide the parameters of a layer on a rank."""
_EVERY = 64
"""Pieces between two reports of progress."""


def distinct(columns: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the first rows (K,) of distinct combinations, and the combination of every row (N,)."""
    key, first = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    for column in columns:
        values, places = np.unique(column, return_inverse=True)
        _, first, key = np.unique(key * len(values) + places, return_index=True, return_inverse=True)
    return first, key


def layer_kinds(workload: Workload) -> list[tuple[int, int]]:
    """Return (index of the first layer, how many) of the dense layers and of those with experts, if there are any."""
    moe, layers = workload.config.moe, range(workload.config.model.layers)
    by_kind = [[index for index in layers if moe.is_moe_layer(index) == experts] for experts in (False, True)]
    return [(indices[0], len(indices)) for indices in by_kind if indices]


def times_of_layers(base: Workload, machine: Machine, rows: np.ndarray, progress: Progress) -> np.ndarray:
    """Return (K, recomputations, kinds, 4): times of a layer of each kind for each row.

    The four are a forward's seconds on the device and on the host, and a backward's, with what it computes again.
    """
    kinds, costs = layer_kinds(base), _Costs(base, machine)
    models = [replace(base.config.model, recompute_granularity=name) for name in RECOMPUTATIONS]
    found = np.zeros((len(rows), len(models), len(kinds), 4))
    for number, row in enumerate(rows):
        config, layout = _whole_backwards(base, row)
        for place, (index, _) in enumerate(kinds):
            made = layer_passes(
                models[0], config.moe if config.moe.is_moe_layer(index) else None, layout, machine
            )  # fmt: skip
            forward, back = costs.of(made.forward), costs.of((*made.input_grad, *made.weight_grad))
            for mode, model in enumerate(models):
                again = costs.of(repeated_terms(model, layout, made.forward))
                found[number, mode, place] = *forward, back[0] + again[0], back[1] + again[1]
        if number % _EVERY == 0:
            progress("times of layers", number, len(rows))
    return found


def times_of_ends(base: Workload, machine: Machine, rows: np.ndarray) -> np.ndarray:
    """Return (K, 2, 4): the same of the embedding and of the loss."""
    costs, found = _Costs(base, machine), np.zeros((len(rows), 2, 4))
    for number, row in enumerate(rows):
        config, layout = _whole_backwards(base, row)
        for place, passes in enumerate((embedding_passes, loss_passes)):
            made = passes(config.model, layout, machine)
            found[number, place] = *costs.of(made.forward), *costs.of((*made.input_grad, *made.weight_grad))
    return found


def _split_alone(base: Workload, row: np.void) -> RunConfig:
    """Return the configuration with what splits a layer, and nothing of its pipeline."""
    config, sizes = base.config, {name: int(row[name]) for name in ("tp", "cp", "ep", "etp")}
    parallel = replace(config.parallel, **sizes, sequence_parallel=bool(row["sp"]))
    return replace(config, parallel=parallel, train=replace(config.train, micro_batch_size=int(row["micro_batch"])))


def _whole_backwards(base: Workload, row: np.void) -> tuple[RunConfig, Layout]:
    config = _split_alone(base, row)
    return config, layout_of(replace(base, config=config))


class _Costs:
    """Counts the seconds of terms on the device, and those that the host needs to launch them."""

    def __init__(self, base: Workload, machine: Machine) -> None:
        graphed = base.config.graph.cuda_graph_impl not in ("none", "emulated")
        self.gap, self.host = (0.0, 0.0) if graphed else (machine.kernel_launch, machine.host_launch)

    def of(self, terms: Terms) -> tuple[float, float]:
        """Return both."""
        launches = sum(term.launches for term in terms)
        return sum(term.seconds for term in terms) + launches * self.gap, launches * self.host


def kept_by_pieces(base: Workload, device: Literal["cpu", "cuda"], rows: np.ndarray, progress: Progress) -> np.ndarray:
    """Return (K, kinds + 1): bytes that a microbatch keeps in a layer of each kind, and after the last layer."""
    kinds, moe = layer_kinds(base), most_that_is_kept(base.config.moe)
    models = [replace(base.config.model, recompute_granularity=name) for name in RECOMPUTATIONS]
    found = np.zeros((len(rows), len(kinds) + 1))
    for number, row in enumerate(rows):
        share, model = share_of(_split_alone(base, row), device, base.expert_load), models[row["recompute"]]
        found[number, :-1] = [layers_activation_bytes(model, share, range(index, index + 1), moe) for index, _ in kinds]
        found[number, -1] = end_activation_bytes(model, share, pre_process=False, post_process=True)
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
