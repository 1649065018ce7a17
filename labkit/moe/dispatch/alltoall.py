"""The all-to-all dispatcher: every token travels to the ranks of its experts, and to no other (arXiv 2006.16668).

    counts -> permutation 1 -> all-to-all (ep) -> all-gather (etp) -> permutation 2 -> experts
    result <- permutation 1 <- all-to-all (ep) <- reduce-scatter (etp) <- permutation 2 <-

A rank counts its tokens for each expert. An all-gather over tp_ep gives all ranks the table of counts, and all split
sizes of the forward follow from this table. The all-to-all sends a row for each (token, expert), as
`plan/traffic.py` counts them. With tensor-parallel experts (etp) each rank of an expert computes a slice of its width
for all rows, so these ranks gather their rows before, and a reduce-scatter adds the partial sums after.

With `pad_to_capacity` every expert gets the same number of rows from every rank. The table is known beforehand, and no
number comes from the GPU.

Shapes: S, B, H, T, E, N as in `dispatcher.py`; L = E/ep local experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from labkit.comm import collectives
from labkit.comm.groups import ParallelGroups
from labkit.comm.in_flight import AllToAllInFlight, all_to_all_start
from labkit.comm.ledger import comm_scope, current_scope
from labkit.config import MoEConfig
from labkit.moe.dispatch.dispatcher import MoETokenDispatcher
from labkit.moe.dispatch.host_copy import HostCopy
from labkit.moe.dispatch.permutation import permute, sort_chunks_by_idxs, unpermute
from labkit.moe.shared_experts import SharedExpertsStage
from labkit.parallel import mappings

__all__ = ["MoEAlltoAllTokenDispatcher", "Splits"]


@dataclass(frozen=True, slots=True)
class Splits:
    """The split sizes of one rank, in rows, on the host."""

    num_out_tokens: int
    """Rows that leave permutation 1."""
    input_splits: list[int]
    """Rows sent to each rank of ep."""
    output_splits: list[int]
    """Rows received from each rank of ep."""
    output_splits_tp: list[int]
    """Rows that each rank of etp holds after the all-to-all."""
    chunks: list[int]
    """Rows from each rank for each local expert: etp x ep x L numbers, in the order after the all-gather."""
    tokens_per_expert: Tensor
    """Rows of each local expert, int64 [L]."""

    @classmethod
    def of(cls, counts: Tensor | np.ndarray, ep_rank: int, etp_rank: int) -> Splits:
        """Derive them from the table of counts on the host, [etp, ep, E]: rows of each rank for each expert."""
        table = np.asarray(counts, dtype=np.int64)
        ep, experts = table.shape[1:]
        per_rank = experts // ep
        own = table[etp_rank, ep_rank]
        local = table[:, :, ep_rank * per_rank : (ep_rank + 1) * per_rank]
        # No operation of torch makes it, because a recorder would mistake one for work of the device.
        tokens_per_expert = torch.frombuffer(local.sum(axis=(0, 1)), dtype=torch.int64)
        return cls(
            num_out_tokens=int(own.sum()),
            input_splits=own.reshape(ep, per_rank).sum(axis=1).tolist(),
            output_splits=local[etp_rank].sum(axis=1).tolist(),
            output_splits_tp=local.sum(axis=(1, 2)).tolist(),
            chunks=local.ravel().tolist(),
            tokens_per_expert=tokens_per_expert,
        )


class AllToAllMetadata(NamedTuple):
    """The metadata of `MoEAlltoAllTokenDispatcher`."""

    hidden_shape: torch.Size
    """[S, B, H] of the layer's input."""
    token_of_row_N: Tensor
    """The token of each row that leaves, int64; Megatron's `reversed_local_input_permutation_mapping`."""
    num_global_tokens_per_expert: Tensor | None
    """Rows of each rank for each expert, int32 [etp, ep, E], where the router has made them; None if padded."""
    host_counts: HostCopy | None
    """The copy of this table to the host, once it has begun."""
    shared_experts: SharedExpertsStage | None
    """How far the shared experts are, if they are computed between the steps."""
    splits: Splits | None = None
    """The split sizes of all transfers; from `token_dispatch` on."""


class MoEAlltoAllTokenDispatcher(MoETokenDispatcher):
    """Sends each token to the ranks of its experts; any ep and etp."""

    def __init__(self, moe: MoEConfig, groups: ParallelGroups, **options: Any) -> None:
        super().__init__(moe, groups, **options)
        sources, local = self.tp_ep.size, self.num_local_experts
        by_source = torch.arange(sources * local)
        self.sort_input_by_local_experts: list[int] = by_source.view(sources, local).t().flatten().tolist()
        self.restore_output_by_local_experts: list[int] = by_source.view(local, sources).t().flatten().tolist()

    def set_shared_experts(self, shared_experts: Any) -> None:
        self.shared_experts = shared_experts

    # ---- counts ----

    def gather_counts(self, map_TE: Tensor) -> Tensor:
        """Return how many rows each rank has for each expert, from this rank's map: int32 [etp, ep, E]."""
        counts_E = map_TE.sum(dim=0, dtype=torch.int32)
        with comm_scope(phase=current_scope().phase or "forward"):
            return self._by_axes(collectives.all_gather(counts_E, self.tp_ep))

    def _by_axes(self, table: Tensor) -> Tensor:
        """Bring counts from the order of tp_ep's ranks to [etp, ep, E]. Either axis may vary faster in tp_ep."""
        both = self.ep.size > 1 and self.etp.size > 1
        if both and self.tp_ep.ranks.index(self.ep.ranks[1]) - self.tp_ep.ranks.index(self.ep.ranks[0]) == 1:
            return table.view(self.etp.size, self.ep.size, self.num_experts)
        return table.view(self.ep.size, self.etp.size, self.num_experts).transpose(0, 1).contiguous()

    def _splits(self, host_counts: HostCopy | None, num_tokens: int) -> Splits:
        """Return the split sizes of this forward. Waits for the copy of the counts, which padding does not need."""
        if host_counts is None:
            counts = np.full((self.etp.size, self.ep.size, self.num_experts), self.capacity(num_tokens))
        else:
            counts = host_counts.wait()
        return Splits.of(counts, self.ep.rank, self.etp.rank)

    # ---- the six steps ----

    def dispatch_preprocess(
        self, hidden_SBH: Tensor, probs_TE: Tensor, map_TE: Tensor
    ) -> tuple[Tensor, Tensor, AllToAllMetadata]:
        hidden_TH = self.flatten(hidden_SBH, probs_TE, map_TE)
        with comm_scope(layer=self.name):
            counts = None if self.moe.pad_to_capacity else self.gather_counts(map_TE)
        shared = None if self.shared_experts is None else self.shared_experts.pre_forward_comm(hidden_SBH)
        host_counts = self.copy_at("before_permutation_1", counts)
        rows = self.rows_known_beforehand(hidden_TH.shape[0])
        if rows is None:
            rows = self._splits(host_counts, hidden_TH.shape[0]).num_out_tokens
        rows_NH, probs_N, token_of_row_N = permute(hidden_TH, map_TE, probs_TE=probs_TE, num_out_tokens=rows)
        assert probs_N is not None
        return rows_NH, probs_N, AllToAllMetadata(hidden_SBH.shape, token_of_row_N, counts, host_counts, shared)

    def token_dispatch(
        self, hidden: Tensor, probs: Tensor, metadata: AllToAllMetadata
    ) -> tuple[Tensor, Tensor, AllToAllMetadata]:
        counts, shared = metadata.num_global_tokens_per_expert, metadata.shared_experts
        host_counts = metadata.host_counts or self.copy_at("before_ep_alltoall", counts)
        splits = self._splits(host_counts, metadata.hidden_shape[:-1].numel())
        with comm_scope(layer=self.name):
            # both transfers start at once, and the shared experts compute meanwhile
            under_way = [
                all_to_all_start(x, self.ep, splits.output_splits, splits.input_splits) for x in (hidden, probs)
            ]
            if shared is not None:
                shared = self.shared_experts.linear_fc1_forward_and_act(shared)
            hidden, probs = (transfer.wait() for transfer in under_way)
        return hidden, probs, metadata._replace(splits=splits, shared_experts=shared)

    def start_dispatch(
        self, hidden: Tensor, probs: Tensor, metadata: AllToAllMetadata
    ) -> tuple[tuple[AllToAllInFlight, AllToAllInFlight], AllToAllMetadata]:
        """Start `token_dispatch`, for merged pairs: return its transfers, of rows and of weights, not yet awaited."""
        counts = metadata.num_global_tokens_per_expert
        host_counts = metadata.host_counts or self.copy_at("before_ep_alltoall", counts)
        splits = self._splits(host_counts, metadata.hidden_shape[:-1].numel())
        rows, weights = (
            all_to_all_start(x, self.ep, splits.output_splits, splits.input_splits) for x in (hidden, probs)
        )
        return (rows, weights), metadata._replace(splits=splits)

    def start_combine(self, hidden: Tensor, metadata: AllToAllMetadata) -> AllToAllInFlight:
        """Start `token_combine`, for merged pairs."""
        splits = _known(metadata.splits)
        return all_to_all_start(hidden, self.ep, splits.input_splits, splits.output_splits)

    def dispatch_postprocess(
        self, hidden: Tensor, probs: Tensor, metadata: AllToAllMetadata
    ) -> tuple[Tensor, Tensor, Tensor, AllToAllMetadata]:
        splits = _known(metadata.splits)
        with comm_scope(layer=self.name):
            gathered = [
                mappings.gather_from_sequence_parallel_region(x, self.etp, output_split_sizes=splits.output_splits_tp)
                for x in (hidden, probs)
            ]
        hidden, probs = (sort_chunks_by_idxs(x, splits.chunks, self.sort_input_by_local_experts) for x in gathered)
        return hidden, splits.tokens_per_expert, probs, metadata

    def combine_preprocess(self, output_NH: Tensor, metadata: AllToAllMetadata) -> tuple[Tensor, AllToAllMetadata]:
        splits = _known(metadata.splits)
        by_expert = [splits.chunks[i] for i in self.sort_input_by_local_experts]
        output_NH = sort_chunks_by_idxs(output_NH, by_expert, self.restore_output_by_local_experts)
        with comm_scope(layer=self.name):
            hidden = mappings.reduce_scatter_to_sequence_parallel_region(
                output_NH, self.etp, input_split_sizes=splits.output_splits_tp
            )
        return hidden, metadata

    def token_combine(self, hidden: Tensor, metadata: AllToAllMetadata) -> tuple[Tensor, AllToAllMetadata]:
        splits, shared = _known(metadata.splits), metadata.shared_experts
        with comm_scope(layer=self.name):
            under_way = all_to_all_start(hidden, self.ep, splits.input_splits, splits.output_splits)
            if shared is not None:
                shared = self.shared_experts.linear_fc2_forward(shared)
            hidden = under_way.wait()
        return hidden, metadata._replace(shared_experts=shared)

    def combine_postprocess(self, hidden: Tensor, metadata: AllToAllMetadata) -> Tensor:
        shape, shared = metadata.hidden_shape, metadata.shared_experts
        if shared is not None:
            shared = self.shared_experts.post_forward_comm(shared)
        output = unpermute(hidden, metadata.token_of_row_N, shape[:-1].numel()).view(shape)
        return output if shared is None else output + self.shared_experts.get_output(shared)


def _known(splits: Splits | None) -> Splits:
    assert splits is not None, "`token_dispatch` finds the split sizes"
    return splits
