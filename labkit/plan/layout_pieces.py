"""What the bounds of many layouts are made of: time and bytes of one layer and of the ends, for each distinct split.

A million layouts have only some ten thousand ways to split a layer, because schedules, stages and data parallelism do
not change it. Every number here is that of `layer_times.py`, `action_times.py` and `activations.py`. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from labkit.config import RunConfig
from labkit.plan.action_times import embedding_passes, loss_passes, stage_transfer
from labkit.plan.activations import end_activation_bytes, layers_activation_bytes
from labkit.plan.collectives import collective_seconds
from labkit.plan.float8 import is_float8, saved_bytes
from labkit.plan.layer_times import attention_half, mlp_half, repeated_terms
from labkit.plan.layout import Layout, layout_of
from labkit.plan.layouts import RECOMPUTATIONS, SCHEDULE_NAMES
from labkit.plan.layouts import splits_backward as splits
from labkit.plan.machine import Machine
from labkit.plan.parameters import expert_parameters, layer_parameters
from labkit.plan.pieces import Passes, Terms
from labkit.plan.sizes import padded_vocab
from labkit.plan.stage_activations import most_that_is_kept, share_of
from labkit.plan.update_times import gradient_bytes
from labkit.plan.workload import Workload

Progress = Callable[[str, int, int], None]
"""Called with what is done, how many are done, and how many there are."""
ENDS_KEY = ("tp", "cp", "micro_batch", "sp")
"""Columns that decide the time of attention, of the embedding and of the loss, beside a split backward."""
TRANSFER_KEY = ("tp", "cp", "micro_batch", "sp", "pp")
"""Columns that decide the time of a transfer to the next stage."""
REDUCTION_KEY = ("tp", "cp", "ep", "etp", "pp", "sharded")
"""Columns that decide, with the parameters of a rank, the time of its gradients and weights on the wire."""
MEMORY_KEY = ("tp", "cp", "etp", "micro_batch", "recompute", "sp")
"""Columns that decide the activations of a layer."""
STATE_KEY = ("tp", "ep", "etp")
"""Columns that decide the parameters of a layer on a rank."""
_MOST_KEYS = 2**62
_EVERY = 64
"""Pieces between two reports of progress."""


def distinct(columns: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the first rows (K,) of distinct combinations, and the combination of every row (N,)."""
    key, most = np.zeros(1, dtype=np.int64), 1
    for column in columns:
        size = int(column.max(initial=0)) + 1
        if most * size > _MOST_KEYS:
            key = np.unique(key, return_inverse=True)[1].astype(np.int64)  # of 32 bits in a browser
            most = int(key.max(initial=0)) + 1
        key, most = key * size + column, most * size
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    return first, which


def layer_kinds(workload: Workload) -> list[tuple[int, int]]:
    """Return (index of the first layer, how many) of the dense layers and of those with experts, if there are any."""
    moe, layers = workload.config.moe, range(workload.config.model.layers)
    by_kind = [[index for index in layers if moe.is_moe_layer(index) == experts] for experts in (False, True)]
    return [(indices[0], len(indices)) for indices in by_kind if indices]


class Times(NamedTuple):
    """Seconds of one microbatch: at least, on the device and on the host, and at most."""

    least: np.ndarray
    """(N, kinds, 6): on the device and on the host of a forward, of a backward with what it computes again, and of that
    backward without weight gradients."""
    most: np.ndarray
    """(N, kinds, 2): of a forward, and of a backward whose actions each wait for the host."""


def times_of_layers(base: Workload, machine: Machine, rows: np.ndarray, progress: Progress) -> Times:
    """Return the times of a layer of each kind in each layout.

    Layouts share the halves of a layer: attention those with the same samples and `ENDS_KEY`, experts those with the
    same number of tokens.
    """
    halves, costs, splits = _Halves(base, machine), _Costs(base, machine), splits_backward(rows)
    tokens = rows["micro_batch"].astype(np.int64) * base.config.model.seq_length // rows["cp"]
    keys = [
        [*(rows[name] for name in ENDS_KEY), splits],
        [tokens, *(rows[name] for name in ("tp", "ep", "etp", "sp")), splits],
    ]
    found = 0.0
    for half, key in zip((halves.attention, halves.mlp), keys, strict=True):
        first, which = distinct(key)
        each = []
        for number, (row, split) in enumerate(zip(rows[first], splits[first], strict=True)):
            each.append([[costs.of(passes, again) for passes, again in modes] for modes in half(row, bool(split))])
            if number % _EVERY == 0:
                progress("times of layers", number, len(first))
        found = found + np.array(each)[which, rows["recompute"]]
    assert isinstance(found, np.ndarray)
    return Times(found[..., :6], found[..., 6:])


class _Halves:
    """The halves of a layer; each is a list by recomputation of a list by kind of what runs and what runs again."""

    def __init__(self, base: Workload, machine: Machine) -> None:
        self.base, self.machine, moe = base, machine, base.config.moe
        self.models = [replace(base.config.model, recompute_granularity=name) for name in RECOMPUTATIONS]
        self.experts = [moe if moe.is_moe_layer(index) else None for index, _ in layer_kinds(base)]

    def attention(self, row: np.void, split: bool) -> list[list[tuple[Passes, Terms]]]:
        """Return the first half, which all kinds of layers share."""
        _, layout = _alone(self.base, row, split)
        return self._with_repeats(layout, [attention_half(self.models[0], layout, self.machine)])

    def mlp(self, row: np.void, split: bool) -> list[list[tuple[Passes, Terms]]]:
        """Return the second half."""
        _, layout = _alone(self.base, row, split)
        return self._with_repeats(
            layout, [mlp_half(self.models[0], moe, layout, self.machine) for moe in self.experts]
        )  # fmt: skip

    def _with_repeats(self, layout: Layout, made: list[Passes]) -> list[list[tuple[Passes, Terms]]]:
        return [[(each, repeated_terms(model, layout, each.forward)) for each in made] for model in self.models]


def times_of_ends(base: Workload, machine: Machine, rows: np.ndarray) -> tuple[Times, Times]:
    """Return the same of the embedding and of the loss."""
    splits = splits_backward(rows)
    first, which = distinct([*(rows[name] for name in ENDS_KEY), splits])
    costs, found = _Costs(base, machine), np.zeros((len(first), 2, 8))
    for number, (row, split) in enumerate(zip(rows[first], splits[first], strict=True)):
        config, layout = _alone(base, row, bool(split))
        for place, passes in enumerate((embedding_passes, loss_passes)):
            found[number, place] = costs.of(passes(config.model, layout, machine), ())
    embedding, loss = found[which].swapaxes(0, 1)
    return Times(embedding[:, :6], embedding[:, 6:]), Times(loss[:, :6], loss[:, 6:])


def times_of_transfers(base: Workload, machine: Machine, rows: np.ndarray) -> np.ndarray:
    """Return the seconds (N,) of an activation from one stage to the next."""
    first, which = distinct(rows[name] for name in TRANSFER_KEY)
    made = [(config.model, layout) for config, layout in (_alone(base, row, False) for row in rows[first])]
    return np.array([stage_transfer(model, layout, machine).seconds for model, layout in made])[which]


def times_of_reductions(base: Workload, machine: Machine, rows: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return (N, 2, 2): whole seconds of the reduction and of the gather of parameters outside and inside experts.

    counts: (N, 2) parameters of a rank.
    """
    first, which = distinct([*(rows[name] for name in REDUCTION_KEY), *np.rint(counts).astype(np.int64).T])
    found = np.zeros((len(first), 2, 2))
    for number, (row, count) in enumerate(zip(rows[first], counts[first], strict=True)):
        config, layout = _alone(base, row, False)
        kind = "reduce_scatter" if row["sharded"] else "all_reduce"
        for place, group in enumerate((layout.dp, layout.edp)):
            size = float(count[place])
            found[number, place, 0] = collective_seconds(machine, kind, size * gradient_bytes(config, layout), group)
            if row["sharded"]:
                whole = collective_seconds(machine, "all_gather", size * layout.element_bytes, group)
                found[number, place, 1] = whole
    return found[which]


def splits_backward(rows: np.ndarray) -> np.ndarray:
    """Return a mask (N,) of the layouts whose tensor-parallel collectives have no weight gradient to hide behind."""
    by_number = np.array([splits(number) for number in range(len(SCHEDULE_NAMES))])
    return by_number[rows["schedule"]] & (rows["tp"] > 1)


def _split_alone(base: Workload, row: np.void) -> RunConfig:
    """Return the configuration with what splits a layer and the model, and nothing of its schedule."""
    config, sizes = base.config, {name: int(row[name]) for name in ("tp", "cp", "ep", "etp", "pp")}
    parallel = replace(config.parallel, **sizes, sequence_parallel=bool(row["sp"]))
    return replace(config, parallel=parallel, train=replace(config.train, micro_batch_size=int(row["micro_batch"])))


def _alone(base: Workload, row: np.void, split: bool) -> tuple[RunConfig, Layout]:
    config = _split_alone(base, row)
    return config, layout_of(replace(base, config=config), splits_backward=split)


class _Costs:
    """Counts the seconds of terms on the device, and those that the host needs to launch them."""

    def __init__(self, base: Workload, machine: Machine) -> None:
        graphed = base.config.graph.cuda_graph_impl not in ("none", "emulated")
        self.gap, self.host = (0.0, 0.0) if graphed else (machine.kernel_launch, machine.host_launch)
        self.most_gap = machine.kernel_launch

    def of(self, passes: Passes, again: Terms) -> tuple[float, ...]:
        """Return the numbers of `Times` for one microbatch: six at least, and two at most."""
        forward, *back = [
            self._three(terms) for terms in (passes.forward, again, passes.input_grad, passes.weight_grad)
        ]
        inputs = [one + other for one, other in zip(*back[:2], strict=True)]
        device, host, most = (one + other for one, other in zip(inputs, back[2], strict=True))
        return *forward[:2], device, host, *inputs[:2], forward[2], most

    def _three(self, terms: Terms) -> tuple[float, float, float]:
        """Return the seconds on the device, those of the host, and the most that they take together."""
        launches, seconds = sum(term.launches for term in terms), sum(term.seconds for term in terms)
        host = launches * self.host
        return seconds + launches * self.gap, host, max(seconds + launches * self.most_gap, host)


def kept_by_pieces(base: Workload, device: Literal["cpu", "cuda"], rows: np.ndarray, progress: Progress) -> np.ndarray:
    """Return (K, kinds + 1): bytes that a microbatch keeps in a layer of each kind, and after the last layer."""
    kinds, moe = layer_kinds(base), most_that_is_kept(base.config.moe)
    models = [replace(base.config.model, recompute_granularity=name) for name in RECOMPUTATIONS]
    found = np.zeros((len(rows), len(kinds) + 1))
    for number, row in enumerate(rows):
        config, model = _split_alone(base, row), models[row["recompute"]]
        share = share_of(config, device, base.expert_load)
        found[number, :-1] = [layers_activation_bytes(model, share, range(index, index + 1), moe) for index, _ in kinds]
        if device == "cuda" and is_float8(config):
            parallel = replace(config.parallel, ep=max(1, moe.num_experts))  # one expert: the fewest zeros
            config = replace(config, model=model, parallel=parallel)
            found[number, :-1] += [saved_bytes(base, config, share, [index]) for index, _ in kinds]
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
