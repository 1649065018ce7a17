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

They are separate methods: `dispatch_preprocess` can do without a number on the host, and what follows depends on such
numbers (`cuda_dtoh_point`). A step leaves attributes of the dispatcher for later steps, valid for one forward.
`handed_on` names those that `dispatch_preprocess` leaves. Backward passes need none of them, since the operations save
what they need.

The split sizes of a transfer must be numbers on the host, and the router's map is on the GPU. There is one copy to the
host in a forward, at `cuda_dtoh_point`; nothing else here makes the host wait. (The all-gather needs no split sizes; it
copies its counts in `dispatch_postprocess`, when it has them.)

Every rank of the group runs every step, with zero tokens too: backward passes communicate in the same places, and a
rank that left the autograd graph would leave the others waiting.

Shapes: S sequence of this rank, B batch, H hidden, T = S B tokens of this rank, E experts, N rows for the experts of
this rank (tokens x experts they go to), k = top_k.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labkit.config import MoEConfig
from labkit.moe.dispatch.host_copy import HostCopy
from labkit.moe.routing import get_capacity
from labkit.parallel.groups import ParallelGroups

CUDA_DTOH_POINTS = ("before_permutation_1", "before_ep_alltoall")
"""Where counts may be copied to the host."""


class MoETokenDispatcher(ABC):
    """Takes tokens to their experts and the results back; see the module for the six steps.

    Args:
        moe: the section of the configuration.
        groups: this rank's groups; `ep`, `etp` and `tp_ep` are used.
        name: under which communication is booked in the ledger.
        cuda_dtoh_point: when counts are copied to the host. `before_permutation_1` is earliest; with
            `before_ep_alltoall` the host needs no number before the tokens travel.

    Raises:
        ValueError: experts that ep does not divide; an unknown `cuda_dtoh_point`, or one that comes after the first
            use of the numbers.
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
        """Attributes (dotted paths) that `dispatch_preprocess` sets and later steps read, tensors or None. Beside these
        they read only what shapes and configuration fix."""
        self.cuda_dtoh_point = cuda_dtoh_point

    @property
    def cuda_dtoh_point(self) -> str:
        """Where the counts are copied to the host: one of `CUDA_DTOH_POINTS`."""
        return self._cuda_dtoh_point

    @cuda_dtoh_point.setter
    def cuda_dtoh_point(self, point: str) -> None:
        if point not in CUDA_DTOH_POINTS:
            raise ValueError(f"cuda_dtoh_point is {point!r}; choose one of {', '.join(CUDA_DTOH_POINTS)}")
        if point == "before_ep_alltoall" and self.drops_without_padding:
            raise ValueError(
                "cuda_dtoh_point = before_ep_alltoall needs sizes that are known before counting, and a capacity "
                "without padding drops a number of tokens that only counting tells; set moe.pad_to_capacity, or leave "
                "moe.capacity_factor out"
            )
        self._cuda_dtoh_point = point

    @property
    def drops_without_padding(self) -> bool:
        """Whether the number of rows that leave this rank is known only after counting."""
        return self.moe.capacity_factor is not None and not self.moe.pad_to_capacity

    def capacity(self, num_tokens: int) -> int:
        """Rows of an expert from each rank under `pad_to_capacity`."""
        moe = self.moe
        assert moe.capacity_factor is not None
        return get_capacity(
            num_tokens=num_tokens,
            top_k=moe.top_k,
            num_experts=moe.num_experts,
            capacity_factor=moe.capacity_factor,
        )

    def _num_out_tokens(self, num_tokens: int, counted: Callable[[], int]) -> int:
        """Rows that leave permutation 1. Only where tokens are dropped without padding must they be counted."""
        if self.moe.pad_to_capacity:
            return self.num_experts * self.capacity(num_tokens)
        return counted() if self.drops_without_padding else num_tokens * self.moe.top_k

    def set_shared_experts(self, shared_experts: Any) -> None:
        """Have the stages of the shared experts computed while tokens travel, and their output added at the end."""
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
            map_TE: bool, which experts a token goes to.

        Returns:
            What `token_dispatch` takes: tokens and their weights.
        """

    @abstractmethod
    def token_dispatch(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Send tokens and weights to the ranks of their experts; return what came."""

    @abstractmethod
    def dispatch_postprocess(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sort by local expert: rows [N, H], rows of each local expert (int64 on the host, [E/ep]), weights [N]."""

    @abstractmethod
    def combine_preprocess(self, output_NH: Tensor) -> Tensor:
        """Bring the experts' output back into the order in which the tokens came."""

    @abstractmethod
    def token_combine(self, hidden: Tensor) -> Tensor:
        """Send results back to the ranks of the tokens; return what came."""

    @abstractmethod
    def combine_postprocess(self, hidden: Tensor) -> Tensor:
        """Add up each token's results (weights are in them already) and restore the shape [S, B, H]."""
