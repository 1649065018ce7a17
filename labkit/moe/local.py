"""The dispatcher of one rank that holds all experts: sort by expert, and back. Nothing is sent.

It is the readable form of what the others do across ranks, and what they are compared with.

Shapes: S, B, H, T, E, N as in `dispatcher.py`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from labkit.config import MoEConfig
from labkit.moe.dispatcher import MoETokenDispatcher
from labkit.moe.host_copy import HostCopy
from labkit.moe.permutation import permute, unpermute
from labkit.parallel.groups import ParallelGroups

__all__ = ["MoELocalTokenDispatcher"]


class MoELocalTokenDispatcher(MoETokenDispatcher):
    """All experts are here: ep = etp = 1. Raises ValueError for other layouts."""

    def __init__(self, moe: MoEConfig, groups: ParallelGroups, **options: Any) -> None:
        super().__init__(moe, groups, **options)
        if self.ep.size > 1 or self.etp.size > 1:
            raise ValueError(
                f"the local dispatcher needs all experts on one rank, and ep = {self.ep.size}, etp = {self.etp.size}; "
                "set moe.dispatcher to alltoall or allgather"
            )
        self.cudagraph_attrs = ["tokens_per_expert", "reversed_local_input_permutation_mapping"]

    def dispatch_preprocess(self, hidden_SBH: Tensor, probs_TE: Tensor, map_TE: Tensor) -> tuple[Tensor, Tensor]:
        hidden_TH = self._flatten(hidden_SBH, probs_TE, map_TE)
        self.tokens_per_expert = map_TE.sum(dim=0)
        self._host_copy: HostCopy | None = None
        if self.cuda_dtoh_point == "before_permutation_1":
            self._host_copy = HostCopy(self.tokens_per_expert)
        # Without drops the number of rows is known beforehand, and nothing waits here.
        rows = None if self.moe.capacity_factor is not None else hidden_TH.shape[0] * self.moe.top_k
        rows_NH, probs_N, self.reversed_local_input_permutation_mapping = permute(
            hidden_TH, map_TE, probs_TE=probs_TE, num_out_tokens=rows
        )
        assert probs_N is not None
        return rows_NH, probs_N

    def token_dispatch(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, probs

    def dispatch_postprocess(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        copy = self._host_copy or HostCopy(self.tokens_per_expert)
        return hidden, copy.wait(), probs

    def combine_preprocess(self, output_NH: Tensor) -> Tensor:
        return output_NH

    def token_combine(self, hidden: Tensor) -> Tensor:
        return hidden

    def combine_postprocess(self, hidden: Tensor) -> Tensor:
        tokens = self.hidden_shape[:-1].numel()
        return unpermute(hidden, self.reversed_local_input_permutation_mapping, tokens).view(self.hidden_shape)
