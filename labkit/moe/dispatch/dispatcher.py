"""The interface of all dispatchers, which bring tokens to the ranks of their experts and the results back; and `local`.

A forward calls six steps in this order, with the experts in the middle:

| step                   | work                                                     | communication        |
|------------------------|----------------------------------------------------------|----------------------|
| `dispatch_preprocess`  | count, sort this rank's tokens by expert (permutation 1) | counts               |
| `token_dispatch`       | -                                                        | tokens go out        |
| `dispatch_postprocess` | sort what came by local expert (permutation 2)           | over etp             |
| experts                | probabilities applied between activation and projection  | -                    |
| `combine_preprocess`   | undo permutation 2                                       | over etp             |
| `token_combine`        | -                                                        | results come back    |
| `combine_postprocess`  | undo permutation 1: add up each token's results          | -                    |

This is the work of the all-to-all. The all-gather sends everything in `token_dispatch`, sorts only in
`dispatch_postprocess`, and reduce-scatters over tp_ep in `token_combine`.

A dispatcher keeps nothing between two steps. What later steps must know of this forward is its *metadata*: the first
step makes it, and every other step takes it and returns it with what it adds.

    rows, probs, metadata         = dispatch_preprocess(hidden_SBH, probs_TE, map_TE)
    rows, probs, metadata         = token_dispatch(rows, probs, metadata)
    rows, counts, probs, metadata = dispatch_postprocess(rows, probs, metadata)
    rows                          = experts(rows, counts, probs)
    rows, metadata                = combine_preprocess(rows, metadata)
    rows, metadata                = token_combine(rows, metadata)
    hidden_SBH                    = combine_postprocess(rows, metadata)

Each dispatcher has a NamedTuple of its own for it. A CUDA graph that ends after `dispatch_preprocess` returns the
tensors in it (`labkit/graphs/partial_moe.py`). Megatron's dispatchers keep the same things as attributes of their own.
Backward needs no metadata, since autograd saves its own tensors.

The split sizes of a transfer must be numbers on the host, and the router's map is on the GPU. A forward makes at most
one copy to the host, in the all-to-all at `cuda_dtoh_point`; nothing else here makes the host wait. The steps are
separate, because `dispatch_preprocess` can mostly do without these numbers (it cannot with a capacity and no padding).
The all-gather needs no split sizes. It copies its counts in `dispatch_postprocess`.

Every rank of the group runs every step, even without tokens. Backward communicates in the same places, so the others
would hang if a rank were outside autograd's graph.

Shapes: S sequence of this rank, B batch, H hidden, T = S B tokens of this rank, E experts, k = top_k. N rows, one
for each token and expert that it visits: up to `token_dispatch`, and from `token_combine` on, those of this rank's
tokens; in between those for this rank's experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from labkit.comm.groups import ParallelGroups
from labkit.config import MoEConfig
from labkit.moe.dispatch.host_copy import HostCopy
from labkit.moe.dispatch.permutation import permute, unpermute
from labkit.moe.routing import get_capacity

CUDA_DTOH_POINTS = ("before_permutation_1", "before_ep_alltoall")
"""Points of a forward at which counts may be copied to the host."""

Metadata: TypeAlias = Any
"""What the steps of one forward hand on: a NamedTuple of the dispatcher's own."""


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
        """True if only counting tells the number of rows that leave this rank."""
        return self.moe.capacity_factor is not None and not self.moe.pad_to_capacity

    def capacity(self, num_tokens: int) -> int:
        """Return how many rows each rank gives each expert under `pad_to_capacity`."""
        moe = self.moe
        assert moe.capacity_factor is not None
        return get_capacity(
            num_tokens=num_tokens,
            top_k=moe.top_k,
            num_experts=moe.num_experts,
            capacity_factor=moe.capacity_factor,
        )

    def rows_known_beforehand(self, num_tokens: int) -> int | None:
        """Return how many rows leave permutation 1; None if only counting tells."""
        if self.drops_without_padding:
            return None
        return self.num_experts * self.capacity(num_tokens) if self.moe.pad_to_capacity else num_tokens * self.moe.top_k

    def copy_at(self, point: str, counts: Tensor | None) -> HostCopy | None:
        """Start the copy of the counts to the host and return it if `point` is the configured one; else return None."""
        return HostCopy(counts) if counts is not None and point == self.cuda_dtoh_point else None

    def set_shared_experts(self, shared_experts: Any) -> None:
        """Compute the stages of the shared experts while tokens travel, and add their output at the end."""
        raise ValueError(
            f"{type(self).__name__} has no transfer that the shared experts could overlap with; set "
            "moe.dispatcher to alltoall, or moe.shared_expert_overlap to false"
        )

    def flatten(self, hidden_SBH: Tensor, probs_TE: Tensor, map_TE: Tensor) -> Tensor:
        """Return the tokens as rows [T, H]. Raises ValueError if weights or map do not fit them."""
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
    def dispatch_preprocess(
        self, hidden_SBH: Tensor, probs_TE: Tensor, map_TE: Tensor
    ) -> tuple[Tensor, Tensor, Metadata]:
        """Count the tokens of each expert and bring this rank's tokens into the order in which they leave.

        Args:
            hidden_SBH: input of the layer on this rank.
            probs_TE: weight of each expert for each token; read where the map is true.
            map_TE: bool, true for the experts of each token.

        Returns:
            Tokens and their weights, for `token_dispatch`, and the metadata of this forward.
        """

    @abstractmethod
    def token_dispatch(self, hidden: Tensor, probs: Tensor, metadata: Metadata) -> tuple[Tensor, Tensor, Metadata]:
        """Send tokens and weights to the ranks of their experts; return the received ones."""

    @abstractmethod
    def dispatch_postprocess(
        self, hidden: Tensor, probs: Tensor, metadata: Metadata
    ) -> tuple[Tensor, Tensor, Tensor, Metadata]:
        """Sort by local expert: rows [N, H], rows of each local expert (int64 on the host, [E/ep]), weights [N]."""

    @abstractmethod
    def combine_preprocess(self, output_NH: Tensor, metadata: Metadata) -> tuple[Tensor, Metadata]:
        """Bring the experts' output back into the order in which the tokens arrived."""

    @abstractmethod
    def token_combine(self, hidden: Tensor, metadata: Metadata) -> tuple[Tensor, Metadata]:
        """Send results back to the ranks of the tokens; return the received ones."""

    @abstractmethod
    def combine_postprocess(self, hidden: Tensor, metadata: Metadata) -> Tensor:
        """Add up each token's results, which include the weights, and restore the shape [S, B, H]."""


# ---- one rank that holds all experts ----


class LocalMetadata(NamedTuple):
    """The metadata of `MoELocalTokenDispatcher`."""

    hidden_shape: torch.Size
    """[S, B, H] of the layer's input."""
    token_of_row_N: Tensor
    """The token of each row, int64; Megatron's `reversed_local_input_permutation_mapping`."""
    tokens_per_expert: Tensor | None
    """Rows of each expert, int64 [E], where the router has made them; None under `pad_to_capacity`."""
    host_counts: HostCopy | None
    """The copy of these numbers to the host, once it has begun."""


class MoELocalTokenDispatcher(MoETokenDispatcher):
    """Sorts rows by expert, and back; nothing is sent, since all experts are on this rank: ep = etp = 1.

    It is the readable form of the dispatchers that work across ranks, and their reference in tests. Raises ValueError
    for other layouts.
    """

    def __init__(self, moe: MoEConfig, groups: ParallelGroups, **options: Any) -> None:
        super().__init__(moe, groups, **options)
        if self.ep.size > 1 or self.etp.size > 1:
            raise ValueError(
                f"the local dispatcher needs all experts on one rank, but ep = {self.ep.size}, etp = {self.etp.size}; "
                "set moe.dispatcher to alltoall or allgather"
            )

    def dispatch_preprocess(
        self, hidden_SBH: Tensor, probs_TE: Tensor, map_TE: Tensor
    ) -> tuple[Tensor, Tensor, LocalMetadata]:
        hidden_TH = self.flatten(hidden_SBH, probs_TE, map_TE)
        counts = None if self.moe.pad_to_capacity else map_TE.sum(dim=0)
        host_counts = self.copy_at("before_permutation_1", counts)
        rows = self.rows_known_beforehand(hidden_TH.shape[0])
        if rows is None:
            rows = int(self._counts(host_counts, hidden_TH.shape[0]).sum())
        rows_NH, probs_N, token_of_row_N = permute(hidden_TH, map_TE, probs_TE=probs_TE, num_out_tokens=rows)
        assert probs_N is not None
        return rows_NH, probs_N, LocalMetadata(hidden_SBH.shape, token_of_row_N, counts, host_counts)

    def _counts(self, host_counts: HostCopy | None, num_tokens: int) -> Tensor:
        """Return how many rows each expert gets, on the host."""
        if host_counts is None:
            # No operation of torch makes it, because a recorder would mistake one for work of the device, even
            # torch.from_numpy.
            return torch.frombuffer(np.full(self.num_experts, self.capacity(num_tokens)), dtype=torch.int64)
        return host_counts.wait()

    def token_dispatch(
        self, hidden: Tensor, probs: Tensor, metadata: LocalMetadata
    ) -> tuple[Tensor, Tensor, LocalMetadata]:
        host_counts = metadata.host_counts or self.copy_at("before_ep_alltoall", metadata.tokens_per_expert)
        return hidden, probs, metadata._replace(host_counts=host_counts)

    def dispatch_postprocess(
        self, hidden: Tensor, probs: Tensor, metadata: LocalMetadata
    ) -> tuple[Tensor, Tensor, Tensor, LocalMetadata]:
        counts = self._counts(metadata.host_counts, metadata.hidden_shape[:-1].numel())
        return hidden, counts, probs, metadata

    def combine_preprocess(self, output_NH: Tensor, metadata: LocalMetadata) -> tuple[Tensor, LocalMetadata]:
        return output_NH, metadata

    def token_combine(self, hidden: Tensor, metadata: LocalMetadata) -> tuple[Tensor, LocalMetadata]:
        return hidden, metadata

    def combine_postprocess(self, hidden: Tensor, metadata: LocalMetadata) -> Tensor:
        shape = metadata.hidden_shape
        return unpermute(hidden, metadata.token_of_row_N, shape[:-1].numel()).view(shape)
