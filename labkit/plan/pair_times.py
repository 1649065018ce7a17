"""Times of the parts of layers in merged pairs: what computes between all-to-alls, and how long these take.

No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from labkit.config import ModelConfig, MoEConfig, RunConfig
from labkit.plan.layer_times import layer_passes
from labkit.plan.layout import Layout
from labkit.plan.machine import Machine
from labkit.plan.stages import stage_contents
from labkit.plan.terms import Term
from labkit.schedules import LayerTimes
from labkit.schedules.merging import DENSE_PARTS, MOE_PARTS

_OF_EXPERTS = ("dispatch over etp", "combine over etp", "rows sorted by expert", "experts fc", "activation")
_OF_COMBINE = ("rows added up", "mlp residual")
_TRANSFERS = ("dispatch of rows", "combine of rows")


def stage_layers(config: RunConfig, layout: Layout, machine: Machine, num_stages: int) -> list[list[LayerTimes]]:
    """Return, by stage, the parts of each layer: launch gaps and what is computed again are not among them."""
    times = {
        experts: _layer_times(config.model, config.moe if experts else None, layout.of_stage(), machine)
        for experts in (False, True)
    }
    has_experts = config.moe.is_moe_layer
    return [[times[has_experts(i)] for i in held.layers] for held in stage_contents(config, num_stages)]


@lru_cache(maxsize=1024)
def _layer_times(model: ModelConfig, moe: MoEConfig | None, layout: Layout, machine: Machine) -> LayerTimes:
    passes = layer_passes(model, moe, layout, machine)
    parts = DENSE_PARTS if moe is None else MOE_PARTS
    sent = {name: sum(term.seconds for term in passes.forward if term.name == name) for name in _TRANSFERS}
    return LayerTimes(
        forward=_by_part(passes.forward, parts),
        backward=_by_part(passes.input_grad, parts),
        weight=_by_part(passes.weight_grad, parts),
        dispatch=sent["dispatch of rows"],
        combine=sent["combine of rows"],
    )


def _by_part(terms: Iterable[Term], parts: tuple[str, ...]) -> Mapping[str, float]:
    """Return the computation of each part, without all-to-alls."""
    seconds = dict.fromkeys(parts, 0.0)
    for term in terms:
        if term.name not in _TRANSFERS:
            seconds[_part_of(term, parts)] += term.seconds
    return seconds


def _part_of(term: Term, parts: tuple[str, ...]) -> str:
    if parts == DENSE_PARTS:
        return "mlp" if term.name.startswith(("mlp", "fc", "activation")) else "attention"
    if term.name.startswith(_OF_COMBINE):
        return "combine"
    return "experts" if term.name.startswith(_OF_EXPERTS) and term.part != "shared_experts" else "attention"
