"""Bounds of many layouts at once, which decide which of them are worth a simulation. No torch.

    memory    state of the fullest rank + activations of one microbatch in it, or
              state of rank 0 + activations of all microbatches in flight there, or
              state of the last rank + activations of one microbatch and its logits
    time      microbatches x (forward + backward) of the fullest rank, or of the last one with the loss, and then
              head of F, and where backwards are whole tail of B, of a pipeline whose stages are as short as any

Neither exceeds what it bounds: `gpu_memory` (or `rank_memory`) of the fullest place, and `step_lower_bound`, which is a
bound of the simulated step. Equal layers are counted exactly. A model with dense layers and layers with experts has the
mean over ranks where the fullest rank is meant, and otherwise the cheaper kind. On a CPU the bytes are those of a CPU.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from labkit.plan.kernels import memory_bound, software_rate
from labkit.plan.layout_pieces import (
    MEMORY_KEY,
    STATE_KEY,
    Progress,
    distinct,
    kept_by_pieces,
    layer_kinds,
    parameters_of_pieces,
    times_of_ends,
    times_of_layers,
    times_of_reductions,
    times_of_transfers,
)
from labkit.plan.layouts import SCHEDULE_NAMES, splits_backward
from labkit.plan.machine import Machine
from labkit.plan.software import software_of
from labkit.plan.workload import Workload
from labkit.plan.zero_stages import ELEMENT_BYTES, bytes_per_parameter

_SLACK = 1 - 1e-9
"""Room for the order in which floats are added."""


class _Layers(NamedTuple):
    """Numbers of layers, (N,) each."""

    full: np.ndarray
    """Those of the fullest rank: exact for equal layers, else the mean."""
    least: np.ndarray
    """Those of any rank, at least."""
    stage: np.ndarray
    """Those of any stage, at least."""
    most: np.ndarray
    """Those of any rank, at most."""


def _layers(base: Workload, rows: np.ndarray) -> _Layers:
    layers, equal = base.config.model.layers, len(layer_kinds(base)) == 1
    stages = rows["pp"] * rows["vpp"]
    full = -(-layers // rows["pp"]) if equal else layers / rows["pp"]
    stage = layers // stages
    return _Layers(full, stage * rows["vpp"], stage, -(-layers // stages) * rows["vpp"])


def _of_fullest(base: Workload, layers: _Layers, each: np.ndarray) -> np.ndarray:
    """Return the sums over the layers of the fullest rank. each: (N, kinds, ...)."""
    return _times(_of_all(base, each) / base.config.model.layers, layers.full)


def _of_all(base: Workload, each: np.ndarray) -> np.ndarray:
    """Return the sums over all layers of the model. each: (N, kinds, ...) of one layer."""
    counts = np.array([count for _, count in layer_kinds(base)])
    return (each * counts.reshape(-1, *[1] * (each.ndim - 2))).sum(axis=1)


def _times(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return values * counts.reshape(-1, *[1] * (values.ndim - 1))


def _fewest(base: Workload, each: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the least sums over `counts` (N,) layers: of the cheaper kind as many as there are, then of the other.

    each: (N, kinds, ...) of one layer.
    """
    first, last = each[:, 0], each[:, -1]
    sizes = [count for _, count in layer_kinds(base)]
    cheap = np.minimum(np.where(first <= last, sizes[0], sizes[-1]), counts.reshape(-1, *[1] * (first.ndim - 1)))
    return _times(np.maximum(first, last), counts) - cheap * np.abs(first - last)


def memory_bounds(base: Workload, device: Literal["cpu", "cuda"], rows: np.ndarray, progress: Progress) -> np.ndarray:
    """Return bytes (N,) that the fullest rank of each layout needs at least."""
    layers = _layers(base, rows)
    first, which = distinct(rows[name] for name in MEMORY_KEY)
    kept = kept_by_pieces(base, device, rows[first], progress)[which]
    layers_kept, after = kept[:, :-1], kept[:, -1]
    state_of = _StateBytes(base, rows)
    fullest = state_of(_of_fullest(base, layers, state_of.each)) + _of_fullest(base, layers, layers_kept)
    least = _fewest(base, state_of.each, layers.least)
    at_end = state_of(least + state_of.words)
    at_first = at_end + in_flight(rows) * _fewest(base, layers_kept, layers.stage)
    at_last = at_end + _fewest(base, layers_kept, layers.least) + after
    return np.maximum(np.maximum(fullest, at_first), at_last) * _SLACK


class _StateBytes:
    """Bytes of weights, gradients and optimizer of parameters, which are (N, 2): outside and inside experts."""

    def __init__(self, base: Workload, rows: np.ndarray) -> None:
        first, which = distinct(rows[name] for name in STATE_KEY)
        parameters = parameters_of_pieces(base, rows[first])[which]
        self.each, self.words = parameters[:, :-1], parameters[:, -1]
        optim = base.config.optim
        wide = ELEMENT_BYTES[optim.precision] < 4 and not optim.grad_reduce_in_bf16
        bytes_of = bytes_per_parameter(
            param_dtype=optim.precision, grad_dtype="fp32" if wide else optim.precision, dp=1, stage=0
        )
        self.stays, self.shared = float(bytes_of.weight + bytes_of.gradient), float(bytes_of.master + bytes_of.moments)
        self.replicas = replicas(base, rows)

    def __call__(self, parameters: np.ndarray) -> np.ndarray:
        return (parameters * (self.stays + self.shared / self.replicas)).sum(axis=1) - 4  # whole bytes are counted


def replicas(base: Workload, rows: np.ndarray) -> np.ndarray:
    """Return (N, 2): ranks over which the state outside and inside experts is sharded; 1 without sharding."""
    found = np.stack([rows["dp"] * rows["cp"], base.world_size // (rows["etp"] * rows["ep"] * rows["pp"])], axis=1)
    return np.where(rows["sharded"][:, None], np.maximum(1, found), 1)


def in_flight(rows: np.ndarray) -> np.ndarray:
    """Return the microbatches (N,), counted once per chunk, whose activations rank 0 keeps at once.

    Source: the docstrings of `labkit.schedules.builders` and `labkit.schedules.zero_bubble`.
    """
    pp, count, chunks = (rows[name].astype(np.int64) for name in ("pp", "microbatches", "vpp"))
    by_name = {
        "auto": np.ones_like(pp),
        "1f1b": np.minimum(pp, count),
        "interleaved": np.minimum(2 * (pp - 1) + (chunks - 1) * pp + 1, count * chunks),
        "zero_bubble_h1": np.minimum(pp, count),
        "zbv": np.minimum(np.minimum(2 * pp, count + 1), 2 * count),
        "dualpipe_v": 2 * pp + 1,
    }
    return np.choose(rows["schedule"], [by_name[name] for name in SCHEDULE_NAMES])


def time_bounds(base: Workload, machine: Machine, rows: np.ndarray, progress: Progress) -> np.ndarray:
    """Return seconds (N,) that a step of each layout needs at least."""
    layers = _layers(base, rows)
    splits = np.array([splits_backward(number) for number in range(len(SCHEDULE_NAMES))])[rows["schedule"]]
    each = times_of_layers(base, machine, rows, progress)
    embedding, loss = times_of_ends(base, machine, rows)
    turns = (rows["pp"] > 1) & np.isin(rows["schedule"], [SCHEDULE_NAMES.index(name) for name in ("zbv", "dualpipe_v")])
    alone = (rows["pp"] == 1) | turns  # rank 0 has the loss, too
    before = _fewest(base, each.least, layers.stage * (rows["pp"] - 1))  # all stages before the last rank's first
    on_first = _fewest(base, each.least, layers.least) + embedding.least + np.where(alone[:, None], loss.least, 0.0)
    on_last = _fewest(base, each.least, layers.least) + np.where(alone[:, None], 0.0, loss.least)
    full = -(-base.config.model.layers // rows["pp"])
    whole = _of_all(base, each.least) + embedding.least + loss.least
    count, head = rows["microbatches"], _slower(before[:, :2])
    longest = [
        count * _action(_of_fullest(base, layers, each.least)),
        count * _action(_fewest(base, each.least, full)),
        count * _action(on_first),
        count * _action(on_last) + head + np.where(splits, 0.0, _slower(before[:, 2:4])),
        count * _inputs(on_last) + head + _slower(before[:, 4:]),
        _inputs(whole),
    ]
    transfers = times_of_transfers(base, machine, rows) * (rows["pp"] > 1)
    most = _times(each.most.max(axis=1), layers.most) + embedding.most + loss.most
    hides = most + (transfers * rows["vpp"])[:, None]
    return (np.maximum.reduce(longest) + _after(base, machine, rows, layers, hides)) * _SLACK


def _slower(pair: np.ndarray) -> np.ndarray:
    """Return the longer of device and host (N,)."""
    return pair.max(axis=1)


def _action(six: np.ndarray) -> np.ndarray:
    """Return forward and backward (N,) of the numbers of `Times.least`."""
    return _slower(six[:, :2]) + _slower(six[:, 2:4])


def _inputs(six: np.ndarray) -> np.ndarray:
    """Return forward and backward (N,) without weight gradients."""
    return _slower(six[:, :2]) + _slower(six[:, 4:])


def _after(base: Workload, machine: Machine, rows: np.ndarray, layers: _Layers, hides: np.ndarray) -> np.ndarray:
    """Return what the rank with the fewest layers does after the pipeline (N,), without a tied embedding.

    hides: (N, 2), at most the seconds of a microbatch's forward and backward on a rank, beside which weights and
    gradients travel.
    """
    first, which = distinct(rows[name] for name in STATE_KEY)
    parameters = parameters_of_pieces(base, rows[first])[which][:, :-1]
    counts, software = _fewest(base, parameters, layers.least), software_of(base.software)
    each = memory_bound(machine, "optimizer", 1.0, software.optimizer_bytes, kind="optimizer").seconds
    whole = times_of_reductions(base, machine, rows, counts)
    beside = hides[:, ::-1] * np.array([base.config.optim.overlap_grad_reduce, True])
    covered = np.minimum(whole, beside[:, None, :])
    exposed = (whole - covered + software.overlap_slowdown * covered).sum(axis=(1, 2))
    update = (counts / replicas(base, rows)).sum(axis=1) * each
    return exposed + update + software_rate(machine, software.name, "host")
