"""The all-gather dispatcher: every rank gets all tokens of tp_ep and takes the tokens of its experts.

    tokens, weights, map -> all-gather (tp_ep) -> pick and sort by local expert -> experts
    result <- reduce-scatter (tp_ep) <- put back into place <-

It needs no counts and no split sizes, and makes two large transfers. Every token goes to every rank. That pays where a
token goes to most ranks anyway (top_k near ep or above), or where equal transfers are much faster. One reduce-scatter
adds a token's results from its experts (over ep) and from the slices of one expert (over etp).

All ranks must hold the same number of tokens.

Shapes: S, B, H, T, E, N as in `dispatcher.py`; G = T x tp_ep gathered tokens, L = E/ep local experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from labkit.comm import collectives
from labkit.comm.groups import ParallelGroups
from labkit.comm.ledger import comm_scope, current_scope
from labkit.config import MoEConfig
from labkit.moe.dispatch.dispatcher import MoETokenDispatcher
from labkit.moe.dispatch.host_copy import HostCopy
from labkit.moe.dispatch.permutation import permute, unpermute
from labkit.parallel import mappings

__all__ = ["MoEAllGatherTokenDispatcher"]


class MoEAllGatherTokenDispatcher(MoETokenDispatcher):
    """Gathers all tokens of tp_ep; any ep and etp, and the same number of tokens on each rank."""

    def __init__(self, moe: MoEConfig, groups: ParallelGroups, **options: Any) -> None:
        super().__init__(moe, groups, **options)
        self.handed_on = ["routing_map"]

    def dispatch_preprocess(self, hidden_SBH: Tensor, probs_TE: Tensor, map_TE: Tensor) -> tuple[Tensor, Tensor]:
        self.routing_map = map_TE
        return self._flatten(hidden_SBH, probs_TE, map_TE), probs_TE

    def token_dispatch(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        with comm_scope(layer=self.name):
            with comm_scope(phase=current_scope().phase or "forward"):
                # as bytes: not every backend gathers bool
                self.routing_map = collectives.all_gather(self.routing_map.view(torch.uint8), self.tp_ep).view(
                    torch.bool
                )
            hidden = mappings.gather_from_sequence_parallel_region(hidden, self.tp_ep)
            return hidden, mappings.gather_from_sequence_parallel_region(probs, self.tp_ep)

    def dispatch_postprocess(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        local = slice(self.first_local_expert, self.first_local_expert + self.num_local_experts)
        map_GL = self.routing_map[:, local]
        self.num_gathered_tokens = hidden.shape[0]
        # In every configuration this rank learns its number of rows only here.
        tokens_per_expert = HostCopy(map_GL.sum(dim=0)).wait()
        rows_NH, probs_N, self.reversed_local_input_permutation_mapping = permute(
            hidden, map_GL, probs_TE=probs[:, local], num_out_tokens=int(tokens_per_expert.sum())
        )
        assert probs_N is not None
        return rows_NH, tokens_per_expert, probs_N

    def combine_preprocess(self, output_NH: Tensor) -> Tensor:
        return unpermute(output_NH, self.reversed_local_input_permutation_mapping, self.num_gathered_tokens)

    def token_combine(self, hidden: Tensor) -> Tensor:
        with comm_scope(layer=self.name):
            return mappings.reduce_scatter_to_sequence_parallel_region(hidden, self.tp_ep)

    def combine_postprocess(self, hidden: Tensor) -> Tensor:
        return hidden.view(self.hidden_shape)
