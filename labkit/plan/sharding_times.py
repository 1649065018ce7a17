"""Transfers of fully sharded weights in a stage's forward and backward (ZeRO-3, FSDP), as far as they are exposed.

Every rank keeps its share of each layer (arXiv 1910.02054; arXiv 2304.11277). A layer's weights are gathered before its
forward and once more before its backward, and its gradients are scattered after it. While one layer computes, the next
one's weights travel, so only what takes longer is exposed, and the first gather. Experts are sharded over the ranks
that hold the same experts. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.config import ModelConfig, MoEConfig
from labkit.plan.collectives import Group, collective_seconds
from labkit.plan.layout import Layout
from labkit.plan.machine import Machine
from labkit.plan.parameters import expert_parameters, first_parameters, layer_parameters
from labkit.plan.pieces import Passes, Pieces, Terms
from labkit.plan.sizes import padded_vocab
from labkit.plan.terms import Term


@dataclass(frozen=True, slots=True)
class Layers:
    """Equal layers of a stage."""

    count: int
    experts: bool
    """They have experts."""
    passes: Passes
    """The times of one of them."""

    @property
    def forward(self) -> float:
        """Seconds of one layer's forward."""
        return sum(term.seconds for term in self.passes.forward)

    @property
    def backward(self) -> float:
        """Seconds of one layer's backward, with what it computes again."""
        passes = self.passes
        return sum(term.seconds for term in (*passes.input_grad, *passes.weight_grad, *passes.recompute))


def sharding_terms(model: ModelConfig, moe: MoEConfig, layout: Layout, machine: Machine, stage: list[Layers],
                   *, reshards: bool) -> tuple[Terms, Terms]:  # fmt: skip
    """Return the exposed transfers of a microbatch, forward and backward, of all layers of a stage and the embedding.

    reshards: weights are gathered once more for the backward.
    """
    if layout.software.gathers_tensor_by_tensor:
        return _tensor_by_tensor(model, layout, machine, stage)
    pieces = Pieces(model, layout, machine)
    for layers in stage:
        ahead, back = layers.forward, layers.backward
        for name, size, group in _sharded(model, moe, layout, layers):
            gather = collective_seconds(machine, "all_gather", size, group)
            pieces.sends(pieces.forward, f"first {name}", "dp", "all_gather", size, group)
            pieces.sends(pieces.forward, name, "dp", "all_gather", size, group, hidden=ahead, count=layers.count - 1)
            ahead = max(0.0, ahead - gather)
            if reshards:
                again = f"{name} again"
                pieces.sends(pieces.input_grad, again, "dp", "all_gather", size, group, hidden=back, count=layers.count)
                back = max(0.0, back - gather)
            scatter, size = f"gradients of {name}", size * layout.software.sharded_gradient_bytes / layout.element_bytes
            pieces.sends(
                pieces.input_grad, scatter, "dp", "reduce_scatter", size, group, hidden=back, count=layers.count
            )
            back = max(0.0, back - collective_seconds(machine, "reduce_scatter", size, group))
    t = layout.tp.size
    size = layout.element_bytes * (padded_vocab(model, t) // t * model.hidden + first_parameters(model))
    pieces.sends(pieces.forward, "embedding, gathered", "dp", "all_gather", size, layout.dp)
    pieces.sends(pieces.input_grad, "embedding, scattered", "dp", "reduce_scatter", size, layout.dp)
    return tuple(pieces.forward), tuple(pieces.input_grad)


def _sharded(model: ModelConfig, moe: MoEConfig, layout: Layout, layers: Layers) -> list[tuple[str, float, Group]]:
    """Return the bytes of a layer's weights on a rank of tp, and the ranks that share them."""
    t, element = layout.tp.size, layout.element_bytes
    if not layers.experts:
        return [("weights", element * layer_parameters(model, t), layout.dp)]
    index, ep, etp = moe.layer_freq.index(1), layout.ep.size, layout.etp.size
    whole = layer_parameters(model, t, moe=moe, index=index, ep=ep, etp=etp)
    experts = moe.num_experts // ep * (expert_parameters(model, moe) // etp)
    return [
        ("weights", element * (whole - experts), layout.dp),
        ("weights of experts", element * experts, layout.edp),
    ]


_TENSORS = 12
"""Tensors of a layer of Megatron-LM: weights and biases of qkv, proj, fc1, fc2 and two norms."""


def _tensor_by_tensor(model: ModelConfig, layout: Layout, machine: Machine, stage: list[Layers]
                      ) -> tuple[Terms, Terms]:  # fmt: skip
    """Return the transfers of weights that are gathered tensor by tensor (DeepSpeed's ZeRO-3 of 2021).

    One ring has one adapter in each node, and every tensor pays the ring's latency. Half of the bytes' time is hidden,
    where the computation is long enough: an assumption, which the three rows of arXiv 2104.04473, table 2, fit to 7 %.
    """
    rate = machine.levels[-1].bandwidth if layout.dp.nodes(machine) > 1 else machine.node.bandwidth
    size = layout.element_bytes * layer_parameters(model, layout.tp.size)
    gather = _TENSORS * collective_seconds(machine, "all_gather", 1, layout.dp)
    formula = "layers x (passes x (latency + bytes / rate) - half of what computation hides)"

    def term(layers: Layers, passes: int, beside: float) -> Term:
        streaming = passes * size / rate
        seconds = layers.count * (passes * gather + streaming - 0.5 * min(streaming, beside))
        inputs = (
            ("layers", layers.count), ("passes", passes), ("latency", gather), ("bytes", size), ("rate", rate),
            ("computation", beside),
        )  # fmt: skip
        return Term("weights, tensor by tensor", "dp", seconds, formula, inputs)

    forward = tuple(term(layers, 1, layers.forward) for layers in stage)
    return forward, tuple(term(layers, 2, layers.backward) for layers in stage)
