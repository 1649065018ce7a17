"""The experts of one rank: feed-forward networks without bias, each on the rows that were routed to it.

Rows arrive sorted by expert, with their routing weights. The activation is multiplied by the routing weight before the
second projection, which equals weighting the output because the projection is linear. But the gradient of a routing
weight then needs only tensors that backward keeps anyway, and not the output of every expert.

Weights are stacked, so that all implementations load the same state_dict:

| name         | shape on a rank          | cut                                                                 |
|--------------|--------------------------|---------------------------------------------------------------------|
| `fc1.weight` | [E/ep, F'/etp, H]        | experts over ep, columns over etp; F' = 2F for `swiglu`: gate, up   |
| `fc2.weight` | [E/ep, H, F/etp]         | experts over ep, rows over etp                                      |

Under expert tensor parallelism each rank gets all rows of the group and returns a partial sum. The dispatcher gathers
before and reduce-scatters after; nothing in this file communicates.

Shapes: N rows (one for each token and expert of this rank that it visits), E experts, H hidden, F expert width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from labkit.comm.groups import Group, ParallelGroups
from labkit.config import ModelConfig, MoEConfig
from labkit.moe.dispatch.host_copy import host_numbers
from labkit.moe.grouped_gemm import GroupedGemms, GroupedPlan, Segments, grouped_linear
from labkit.moe.weighted_activation import weighted, weighted_activation
from labkit.parallel.mlp import ACTIVATIONS
from labkit.parallel.parameters.weights import Seed, make_expert_parameter


def expert_width(model: ModelConfig, moe: MoEConfig) -> int:
    """Return F: `moe.ffn_hidden`, or the dense width."""
    return moe.ffn_hidden or model.ffn_hidden or 4 * model.hidden


class StackedLinear(nn.Module):
    """One projection of all experts of this rank, as one grouped product.

    Args:
        name: name of the experts in the whole model; the parameter is `<name>.<part>.weight`.
        part: `fc1` or `fc2`.
        full_shape: [E, O, I], the shape in one process.
        accumulate: add the weight gradient to `weight.main_grad` where it exists.
        gemms: gives the products, from the layer's name, the number of all experts, and those of this rank; None
            computes in the type of the tensors.
        made: other arguments of `make_expert_parameter`.
    """

    def __init__(
        self,
        name: str,
        part: str,
        full_shape: tuple[int, int, int],
        *,
        ep: Group,
        accumulate: bool = False,
        gemms: Callable[[str, int, range], GroupedGemms] | None = None,
        **made: Any,
    ) -> None:
        super().__init__()
        self.weight = make_expert_parameter(name, f"{part}.weight", full_shape, ep=ep, **made)
        name, here = f"{name}.{part}", len(self.weight)
        mine = range(ep.rank * here, (ep.rank + 1) * here)
        self.plan = GroupedPlan(name, accumulate, GroupedGemms() if gemms is None else gemms(name, full_shape[0], mine))

    def forward(self, x_NI: Tensor, segments: Segments) -> Tensor:
        """[N, I] -> [N, O]."""
        return grouped_linear(x_NI, self.weight, segments, self.plan)


class Experts(nn.Module, ABC):
    """Base of all implementations: two projections and an activation.

    Args:
        name: name in the whole model, such as `layers.3.mlp.experts`.
        model: `hidden`, `activation` and `ffn_hidden`.
        moe: `num_experts` and `ffn_hidden`.
        groups: `ep` and `etp`.
        seed, std, output_std: for the initial weights, N(0, std) by (seed, name); fc2 takes `output_std`, None is std.
        dtype, device: dtype and device of the weights.
        gradient_accumulation_fusion: add weight gradients to `main_grad` where it exists.
        linear: constructor of the two projections, for grouped products.

    Raises:
        ValueError: ep or etp does not divide a size.
    """

    grouped: ClassVar[bool]
    """True if `compute` calls the projections, each for all experts. Otherwise it only reads their weights
    (`reads_children`), so the gather of parameters, which hooks forwards, hooks the forward of the experts instead."""

    def __init__(
        self,
        name: str,
        model: ModelConfig,
        moe: MoEConfig,
        groups: ParallelGroups,
        *,
        seed: Seed = 0,
        std: float = 0.02,
        output_std: float | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        gradient_accumulation_fusion: bool = False,
        linear: Callable[..., Any] = StackedLinear,
    ) -> None:
        super().__init__()
        experts, hidden, width = moe.num_experts, model.hidden, expert_width(model, moe)
        blocks = 2 if model.activation in ("swiglu", "geglu") else 1
        if model.activation not in ACTIVATIONS:
            raise ValueError(f"{name}: activation {model.activation!r} is unknown; choose {', '.join(ACTIVATIONS)}")
        self.name, self.activation, self.reads_children = name, ACTIVATIONS[model.activation], not self.grouped
        self.weighted_activation = weighted_activation(model.activation)
        linear = linear if self.grouped else StackedLinear
        made: dict[str, Any] = {"ep": groups.ep, "etp": groups.etp, "seed": seed, "dtype": dtype, "device": device}
        made |= {"accumulate": gradient_accumulation_fusion}
        columns: dict[str, Any] = {"partition_dim": 1, "partition_stride": blocks, "std": std}
        rows: dict[str, Any] = {"partition_dim": 2, "std": std if output_std is None else output_std}
        self.fc1 = linear(name, "fc1", (experts, blocks * width, hidden), **columns, **made)
        self.fc2 = linear(name, "fc2", (experts, hidden, width), **rows, **made)
        self.input_shape = (experts // groups.ep.size, hidden)

    def forward(self, tokens_NH: Tensor, tokens_per_expert: Tensor, probs_N: Tensor) -> Tensor:
        """Run the experts: sorted rows, rows of each expert ([E/ep], on the host), weights of the rows -> [N, H].

        Raises:
            ValueError: shapes that do not fit together, or counts that do not add up to the rows. A grouped kernel
                would then leave rows uninitialised or read past them. Counts on a GPU are not checked.
        """
        self._check(tokens_NH, tokens_per_expert, probs_N)
        return self.compute(tokens_NH, tokens_per_expert, probs_N)

    @abstractmethod
    def compute(self, tokens_NH: Tensor, tokens_per_expert: Tensor, probs_N: Tensor) -> Tensor:
        """Compute `forward` after its checks."""

    def _check(self, tokens_NH: Tensor, tokens_per_expert: Tensor, probs_N: Tensor) -> None:
        experts, hidden = self.input_shape
        rows = tokens_NH.shape[0]
        if tokens_NH.shape != (rows, hidden) or probs_N.shape != (rows,):
            got = f"{list(tokens_NH.shape)} and {list(probs_N.shape)}"
            raise ValueError(f"{self.name}: rows are [N, {hidden}] and their weights [N], got {got}")
        if tokens_per_expert.device.type != "cpu":
            return
        counts = host_numbers(tokens_per_expert)
        if len(counts) != experts or sum(counts) != rows or min(counts) < 0:
            rule = f"{experts} numbers, none of them negative, whose sum is the number of rows"
            raise ValueError(f"{self.name}: {counts} rows per expert for {rows} rows; they must be {rule}")


class SequentialExperts(Experts):
    """One expert after the other, in plain autograd: easy to read, and slow for many experts.

    Its weight gradients arrive with the input gradients, never in a later W.
    """

    grouped = False

    def compute(self, tokens_NH: Tensor, tokens_per_expert: Tensor, probs_N: Tensor) -> Tensor:
        counts = host_numbers(tokens_per_expert)
        rows, weights = tokens_NH.split(counts), probs_N.split(counts)
        own = (self.fc1.weight.unbind(), self.fc2.weight.unbind())
        outputs = [
            weighted(self.activation(x @ fc1.t()), p) @ fc2.t()
            for x, p, fc1, fc2 in zip(rows, weights, *own, strict=True)
        ]
        return torch.cat(outputs)


class GroupedExperts(Experts):
    """All experts of a rank at once: one product for each projection (`grouped_gemm`), or the products of `linear`."""

    grouped = True

    def compute(self, tokens_NH: Tensor, tokens_per_expert: Tensor, probs_N: Tensor) -> Tensor:
        segments = Segments(tokens_per_expert)
        return self.fc2(self.weighted_activation(self.fc1(tokens_NH, segments), probs_N), segments)
