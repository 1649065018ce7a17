"""Metrics of the routers: load of the experts, dropped tokens, losses and biases, layer by layer.

Routers count on their device (`labkit.moe.statistics`). Before each line the ranks of a stage add up their counts, and
every rank gets the layers of all stages. A line is about the steps since the last line.

    moe/load_balancing_loss   mean over layers and microbatches, without its coefficient; 1 for an even load
    moe/z_loss                the same of the mean squared log-sum-exp of the logits
    moe/max_over_mean         load of the fullest expert over the mean load, in the worst layer
    moe/load_entropy          entropy of the load over that of an even one, in the worst layer
    moe/dropped_share         share of all choices, over all layers, that exceeded a capacity
    moe/layers.3/...          the same of one layer, and there tokens_per_expert and expert_bias, both by expert

The line leaves a loss out if its coefficient is 0, and the drops if there is no capacity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from labkit.comm.groups import ParallelGroups
from labkit.moe.router import TopKRouter, routers_of
from labkit.moe.statistics import RouterSummary, summarize

LayerMetrics = dict[str, dict[str, Any]]
"""Layer, such as `layers.3` -> its metrics by name."""


class RouterMetrics:
    """The routers of one rank."""

    def __init__(self, chunks: Iterable[nn.Module], groups: ParallelGroups) -> None:
        """chunks: model chunks of this rank."""
        self._routers, self._groups = list(routers_of(chunks)), groups

    def take(self) -> LayerMetrics:
        """Return the metrics of this rank's layers over tp x dp x cp since the last call. All ranks call this."""
        summaries = summarize([router.statistics for router in self._routers], self._groups)
        for router in self._routers:
            router.statistics.reset()
        return {
            router.name.partition(".mlp")[0]: _of_layer(router, summary)
            for router, summary in zip(self._routers, summaries, strict=True)
        }


def _of_layer(router: TopKRouter, summary: RouterSummary) -> dict[str, Any]:
    moe = router.moe
    found: dict[str, Any] = {"max_over_mean": summary.max_over_mean, "load_entropy": summary.load_entropy}
    if moe.aux_loss_coeff:
        found["load_balancing_loss"] = summary.load_balancing_loss
    if moe.z_loss_coeff:
        found["z_loss"] = summary.z_loss
    if moe.capacity_factor is not None:
        found["dropped_share"] = summary.dropped / max(1, sum(summary.tokens_per_expert))
    found["tokens_per_expert"] = list(summary.tokens_per_expert)
    if router.expert_bias is not None:
        found["expert_bias"] = router.expert_bias.tolist()
    return found


def router_line(by_rank: Iterable[LayerMetrics]) -> dict[str, Any]:
    """Return the part of a metrics line about all layers, from the metrics of all ranks; empty without experts."""
    layers = {name: layer for rank in by_rank for name, layer in rank.items()}
    if not layers:
        return {}
    ordered = sorted(layers.items(), key=lambda item: int(item[0].rpartition(".")[2]))
    line: dict[str, Any] = {f"moe/{name}": value for name, value in _overall([layer for _, layer in ordered]).items()}
    return line | {f"moe/{name}/{key}": value for name, layer in ordered for key, value in layer.items()}


def _overall(layers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    def mean(name: str) -> float:
        return sum(layer[name] for layer in layers) / len(layers)

    found = {name: mean(name) for name in ("load_balancing_loss", "z_loss", "dropped_share") if name in layers[0]}
    found["max_over_mean"] = max(layer["max_over_mean"] for layer in layers)
    found["load_entropy"] = min(layer["load_entropy"] for layer in layers)
    return found
