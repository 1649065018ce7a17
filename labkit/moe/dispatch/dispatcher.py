"""The interface of all dispatchers: they bring tokens to the ranks of their experts, and the results back.

A forward through the layer calls six steps in this order; experts are computed in the middle:

| step                   | work                                                     | communication        |
|------------------------|----------------------------------------------------------|----------------------|
| `dispatch_preprocess`  | count, sort this rank's tokens by expert (permutation 1) | counts               |
| `token_dispatch`       | -                                                        | tokens go out        |
| `dispatch_postprocess` | sort what came by local expert (permutation 2)           | over etp             |
| experts                | probabilities applied between activation and projection  | -                    |
| `combine_preprocess`   | undo permutation 2                                       | over etp             |
| `token_combine`        | -                                                        | results come back    |
| `combine_postprocess`  | undo permutation 1: add up each token's results          | -                    |

The steps are separate methods, because later steps need numbers on the host and `dispatch_preprocess` can do without
(`cuda_dtoh_point`). A step sets attributes of the dispatcher for later steps of the same forward. `handed_on` names the
attributes that `dispatch_preprocess` sets. Backward needs none of them, since autograd saves its own tensors.

The split sizes of a transfer must be numbers on the host, and the router's map is on the GPU. A forward makes one copy
to the host, at `cuda_dtoh_point`; nothing else here makes the host wait. The all-gather needs no split sizes. It copies
its counts in `dispatch_postprocess`.

Every rank of the group runs every step, even without tokens. Backward communicates in the same places, and a rank
outside autograd's graph would let the others wait.

Shapes: S sequence of this rank, B batch, H hidden, T = S B tokens of this rank, E experts, k = top_k. N rows for the
experts of this rank: one for each token and expert that it visits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labkit.comm.groups import ParallelGroups
from labkit.config import MoEConfig
from labkit.moe.dispatch.host_copy import HostCopy
from labkit.moe.routing import get_capacity

CUDA_DTOH_POINTS = ("before_permutation_1", "before_ep_alltoall")
"""Points of a forward at which counts may be copied to the host."""


class MoETokenDispatcher(ABC):
    """Brings tokens to their experts and the results back; the module lists the six steps.

    Args:
        moe: the section of the configuration.
        groups: this rank's groups; `ep`, `etp` and `tp_ep` are used.
        name: name of its communication in the ledger.
        cuda_dtoh_point: point at which counts are copied to the host. `before_permutation_1` is earliest; with
            `before_ep_alltoall` the host needs no number before the tokens travel.

    Raises:
        ValueError: ep does not divide the experts, `cuda_dtoh_point` is unknown, or it comes after the first use of
            the numbers.
    """

    def __init__(
        self,
        moe: MoEConfig,
        groups: ParallelGroups,
        *,
        name: str = "moe",
        cuda_dtoh_point: str = "before_permutation_1",
    ) -> None:
        if moe.num_experts % groups.ep.size:
            raise ValueError(
                f"moe.num_experts = {moe.num_experts} cannot be shared by the {groups.ep.size} ranks of ep: "
                f"it must be a multiple of {groups.ep.size}"
            )
        self.moe, self.name = moe, name
        self.ep, self.etp, self.tp_ep = groups.ep, groups.etp, groups.tp_ep
        self.num_experts = moe.num_experts
        self.num_local_experts = moe.num_experts // groups.ep.size
        self.first_local_expert = groups.ep.rank * self.num_local_experts
        self.shared_experts: Any = None
        self.hidden_shape = torch.Size()
        self._host_copy: HostCopy | None = None
        self.handed_on: list[str] = []
        """Attributes (dotted paths) that `dispatch_preprocess` sets for later steps: tensors or None. All else that
        later steps read follows from shapes and configuration."""
        self.cuda_dtoh_point = cuda_dtoh_point

    @property
    def cuda_dtoh_point(self) -> str:
        """Point at which the counts are copied to the host, one of `CUDA_DTOH_POINTS`."""
        return self._cuda_dtoh_point

    @cuda_dtoh_point.setter
    def cuda_dtoh_point(self, point: str) -> None:
        if point not in CUDA_DTOH_POINTS:
            raise ValueError(f"cuda_dtoh_point is {point!r}; choose one of {', '.join(CUDA_DTOH_POINTS)}")
        if point == "before_ep_alltoall" and self.drops_without_padding:
            raise ValueError(
                "cuda_dtoh_point = before_ep_alltoall needs sizes that are known before counting, but with a capacity "
                "and no padding only counting tells the number of dropped tokens. Set moe.pad_to_capacity, or leave "
                "moe.capacity_factor out"
            )
        self._cuda_dtoh_point = point

    @property
    def drops_without_padding(self) -> bool:
        """True where only counting tells the number of rows that leave this rank."""
        return self.moe.capacity_factor is not None and not self.moe.pad_to_capacity

    def capacity(self, num_tokens: int) -> int:
        """Rows that each rank gives each expert under `pad_to_capacity`."""
        moe = self.moe
        assert moe.capacity_factor is not None
        return get_capacity(
            num_tokens=num_tokens,
            top_k=moe.top_k,
            num_experts=moe.num_experts,
            capacity_factor=moe.capacity_factor,
        )

    def _num_out_tokens(self, num_tokens: int, counted: Callable[[], int]) -> int:
        """Rows that leave permutation 1. Only drops without padding make a count necessary."""
        if self.moe.pad_to_capacity:
            return self.num_experts * self.capacity(num_tokens)
        return counted() if self.drops_without_padding else num_tokens * self.moe.top_k

    def set_shared_experts(self, shared_experts: Any) -> None:
        """Compute the stages of the shared experts while tokens travel, and add their output at the end."""
        raise ValueError(
            f"{type(self).__name__} has no transfer to hide the shared experts behind; set moe.dispatcher to alltoall, "
            "or moe.shared_expert_overlap to false"
        )

    def _flatten(self, hidden_SBH: Tensor, probs_TE: Tensor, map_TE: Tensor) -> Tensor:
        """Remember the shape and return the tokens as rows [T, H]."""
        self.hidden_shape = hidden_SBH.shape
        hidden_TH = hidden_SBH.reshape(-1, hidden_SBH.shape[-1])
        wanted = (hidden_TH.shape[0], self.num_experts)
        for what, given in (("probs", probs_TE), ("map", map_TE)):
            if tuple(given.shape) != wanted:
                raise ValueError(f"{what} has shape {tuple(given.shape)}; tokens x experts is {wanted}")
        if map_TE.dtype != torch.bool:
            raise ValueError(f"the routing map is bool, got {map_TE.dtype}")
        return hidden_TH

    # ---- the six steps ----

    @abstractmethod
    def dispatch_preprocess(self, hidden_SBH: Tensor, probs_TE: Tensor, map_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Count the tokens of each expert and bring this rank's tokens into the order in which they leave.

        Args:
            hidden_SBH: input of the layer on this rank.
            probs_TE: weight of each expert for each token; read where the map is true.
            map_TE: bool, true for the experts of each token.

        Returns:
            Tokens and their weights, for `token_dispatch`.
        """

    @abstractmethod
    def token_dispatch(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Send tokens and weights to the ranks of their experts; return the received ones."""

    @abstractmethod
    def dispatch_postprocess(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sort by local expert: rows [N, H], rows of each local expert (int64 on the host, [E/ep]), weights [N]."""

    @abstractmethod
    def combine_preprocess(self, output_NH: Tensor) -> Tensor:
        """Bring the experts' output back into the order in which the tokens arrived."""

    @abstractmethod
    def token_combine(self, hidden: Tensor) -> Tensor:
        """Send results back to the ranks of the tokens; return the received ones."""

    @abstractmethod
    def combine_postprocess(self, hidden: Tensor) -> Tensor:
        """Add up each token's results, which include the weights, and restore the shape [S, B, H]."""
