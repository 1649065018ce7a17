"""The all-gather dispatcher: every rank gets all tokens of tp_ep and takes the tokens of its experts.

    map, tokens, weights -> all-gather (tp_ep) -> pick and sort by local expert -> experts
    result <- reduce-scatter (tp_ep) <- put back into place <-

It needs no split sizes, only the counts of the experts, and makes two large transfers. Every token goes to every rank,
which pays if a token goes to most ranks anyway (top_k near ep or above), or if equal transfers are much faster.
One reduce-scatter adds a token's results from its experts (over ep) and from the slices of one expert (over etp).

All ranks must hold the same number of tokens.

Shapes: S, B, H, T, E, N as in `dispatcher.py`; G = T x tp_ep gathered tokens, L = E/ep local experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from labkit.comm import collectives
from labkit.comm.ledger import comm_scope, current_scope
from labkit.moe.dispatch.dispatcher import MoETokenDispatcher
from labkit.moe.dispatch.host_copy import HostCopy
from labkit.moe.dispatch.permutation import permute, unpermute
from labkit.parallel import mappings

__all__ = ["MoEAllGatherTokenDispatcher"]


class AllGatherMetadata(NamedTuple):
    """The metadata of `MoEAllGatherTokenDispatcher`."""

    hidden_shape: torch.Size
    """[S, B, H] of the layer's input."""
    routing_map: Tensor
    """True for the experts of each token: bool [T, E], and [G, E] from `token_dispatch` on."""
    token_of_row_N: Tensor | None = None
    """The gathered token of each row, int64; from `dispatch_postprocess` on."""


class MoEAllGatherTokenDispatcher(MoETokenDispatcher):
    """Gathers all tokens of tp_ep; any ep and etp, and the same number of tokens on each rank."""

    def dispatch_preprocess(
        self, hidden_SBH: Tensor, probs_TE: Tensor, map_TE: Tensor
    ) -> tuple[Tensor, Tensor, AllGatherMetadata]:
        hidden_TH = self.flatten(hidden_SBH, probs_TE, map_TE)
        return hidden_TH, probs_TE, AllGatherMetadata(hidden_SBH.shape, map_TE)

    def token_dispatch(
        self, hidden: Tensor, probs: Tensor, metadata: AllGatherMetadata
    ) -> tuple[Tensor, Tensor, AllGatherMetadata]:
        with comm_scope(layer=self.name):
            with comm_scope(phase=current_scope().phase or "forward"):
                map_as_bytes = metadata.routing_map.view(torch.uint8)  # not every backend gathers bool
                map_GE = collectives.all_gather(map_as_bytes, self.tp_ep).view(torch.bool)
            hidden = mappings.gather_from_sequence_parallel_region(hidden, self.tp_ep)
            probs = mappings.gather_from_sequence_parallel_region(probs, self.tp_ep)
        return hidden, probs, metadata._replace(routing_map=map_GE)

    def dispatch_postprocess(
        self, hidden: Tensor, probs: Tensor, metadata: AllGatherMetadata
    ) -> tuple[Tensor, Tensor, Tensor, AllGatherMetadata]:
        local = slice(self.first_local_expert, self.first_local_expert + self.num_local_experts)
        map_GL = metadata.routing_map[:, local]
        # Whatever the configuration, this rank learns its number of rows only here.
        tokens_per_expert = HostCopy(map_GL.sum(dim=0)).wait()
        rows_NH, probs_N, token_of_row_N = permute(
            hidden, map_GL, probs_TE=probs[:, local], num_out_tokens=int(tokens_per_expert.sum())
        )
        assert probs_N is not None
        return rows_NH, tokens_per_expert, probs_N, metadata._replace(token_of_row_N=token_of_row_N)

    def combine_preprocess(self, output_NH: Tensor, metadata: AllGatherMetadata) -> tuple[Tensor, AllGatherMetadata]:
        assert metadata.token_of_row_N is not None, "`dispatch_postprocess` sorts the rows before"
        gathered_tokens = len(metadata.routing_map)
        return unpermute(output_NH, metadata.token_of_row_N, gathered_tokens), metadata

    def token_combine(self, hidden: Tensor, metadata: AllGatherMetadata) -> tuple[Tensor, AllGatherMetadata]:
        with comm_scope(layer=self.name):
            return mappings.reduce_scatter_to_sequence_parallel_region(hidden, self.tp_ep), metadata

    def combine_postprocess(self, hidden: Tensor, metadata: AllGatherMetadata) -> Tensor:
        return hidden.view(metadata.hidden_shape)
